"""The kernel of halt.py: one program for each sequence, which follows the emitted tokens one after the other.

Shapes: B sequences, E places on a path, V the vocabulary, X entries of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.state import BatchState
from specdec.ops.launch import chained
from specdec.verify.accept import Accepted


@triton.jit(
    do_not_specialize=["places", "stride_path", "stride_tokens", "stride_classes", "stride_after"],
    do_not_specialize_on_alignment=["states", "first_halts", "num_classes", "classes", "after", "lens", "bonus", "active"],
)
def halt_kernel(
    path,  # [B, E] int64, updated
    accepted,  # [B] int64, updated
    tokens,  # [B, E] int64
    base_lens,  # [B] int32
    roots,  # [B] int64
    lens,  # [B] int32, written
    bonus,  # [B] int64, written
    active,  # [B] int32
    states,  # [B] int32, updated
    first_halts,  # [B] int32
    num_classes,  # [B] int32
    classes,  # [B, V] int16
    after,  # [B, X] int16
    taken,  # [B] int64, written
    halted,  # [B] int64, written
    places,  # E
    stride_path,
    stride_tokens,
    stride_classes,
    stride_after,
    HALTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_E = tl.load(tokens + b * stride_tokens + e, mask=e < places, other=0)
    class_E = tl.load(classes + b * stride_classes + token_E).to(tl.int32)
    count = (tl.load(accepted + b).to(tl.int32) + 1) * tl.load(active + b)
    state, first_halt, width = tl.load(states + b), tl.load(first_halts + b), tl.load(num_classes + b)
    took = count * 0
    for place in range(places):
        goes_on = count > place
        if HALTS:
            goes_on = goes_on & (state < first_halt)
        at = state * width + tl.sum(tl.where(e == place, class_E, 0), 0)
        state = tl.where(goes_on, tl.load(after + b * stride_after + at).to(tl.int32), state)
        took += goes_on.to(tl.int32)
    last = tl.maximum(took - 1, 0)
    token = tl.sum(tl.where(e == last, token_E, 0), 0)
    tl.store(path + b * stride_path + e, e.to(tl.int64), mask=(e > last) & (e < places))
    tl.store(accepted + b, last.to(tl.int64))
    tl.store(bonus + b, tl.where(took > 0, token, tl.load(roots + b)))
    tl.store(lens + b, tl.load(base_lens + b) + took)
    tl.store(states + b, state)
    tl.store(taken + b, took.to(tl.int64))
    tl.store(halted + b, (state >= first_halt).to(tl.int64))


def launch_halt(
    state: BatchState, accepted: Accepted, base_lens_B: Tensor, root_B: Tensor, halts: bool
) -> tuple[Tensor, Tensor]:
    """`halt.halt`, in place: (how many tokens each row emits, whether it has halted), both int64."""
    waits, (path_BE, accepted_B, tokens_BE, _) = state.waiting, accepted
    assert path_BE.stride(1) == tokens_BE.stride(1) == waits.class_BV.stride(1) == 1
    taken_B, halted_B = torch.empty_like(accepted_B), torch.empty_like(accepted_B)
    B, E = path_BE.shape
    halt_kernel[(B,)](
        path_BE, accepted_B, tokens_BE, base_lens_B, root_B, state.lens_B, state.bonus_B, state.active_B,
        waits.state_B, waits.first_halt_B, waits.num_classes_B, waits.class_BV, waits.after_BX, taken_B, halted_B,
        E, path_BE.stride(0), tokens_BE.stride(0), waits.class_BV.stride(0), waits.after_BX.stride(0),
        HALTS=halts, BLOCK=max(16, triton.next_power_of_2(E)), num_warps=1, **chained(root_B.device),
    )  # fmt: skip
    return taken_B, halted_B
