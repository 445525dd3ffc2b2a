"""The kernels around the all-to-all of partial states: one packs the states to send, the other merges the received ones.

A row is the output of one query and head, followed by its lse.  A program handles several rows.  The kernels access the lse
through a float32 view of the same memory.

Order of chained launches (specdec/ops/launch.py): both kernels trigger early, and read nothing before gdc_wait; exchanges
between GPUs do the same.  The suffix kernel after the merge reads queries, and the suffix's keys and table, before its wait.
These are complete: the attention kernel before the packing triggers late, so when packing starts all earlier kernels have
ended.

Shapes: T queries, H heads of one rank, D ranks, E value dim, X elements of a row, R rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.state import AttentionState
from specdec.ops.launch import chained

BLOCK = 1024  # elements that a program holds


@triton.jit(do_not_specialize=["queries", "heads"])
def pack_kernel(
    out,  # [T, D * H, E]
    lse,  # [T, D * H] float32
    states,  # [D, T, H, X]
    lse_words,  # the same memory in float32
    queries,  # T
    heads,  # H
    RANKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    ROW: tl.constexpr,  # X
    WORDS: tl.constexpr,  # float32 words of a row
    LSE_AT: tl.constexpr,  # float32 words before the lse
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_R, e = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, PADDED_VALUE)
    ok_R = row_R < queries * RANKS * heads
    head_R = row_R % (RANKS * heads)
    to_R = (head_R // heads * queries + row_R // (RANKS * heads)) * heads + head_R % heads
    ok_RE = ok_R[:, None] & (e < VALUE_DIM)[None, :]
    x_RE = tl.load(out + row_R[:, None] * VALUE_DIM + e[None, :], mask=ok_RE, other=0.0)
    tl.store(states + to_R[:, None] * ROW + e[None, :], x_RE, mask=ok_RE)
    tl.store(lse_words + to_R * WORDS + LSE_AT, tl.load(lse + row_R, mask=ok_R, other=0.0), mask=ok_R)


@triton.jit(do_not_specialize=["rows"])
def merge_ranks_kernel(
    states,  # [D, R, X]
    lse_words,  # the same memory in float32
    out,  # [R, E]
    lse,  # [R] float32
    rows,  # R
    RANKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    ROW: tl.constexpr,  # this and the next as in pack_kernel
    WORDS: tl.constexpr,
    LSE_AT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row_R, e = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, PADDED_VALUE)
    ok_R = row_R < rows
    ok_RE = ok_R[:, None] & (e < VALUE_DIM)[None, :]
    top_R = tl.full([BLOCK_R], -float("inf"), tl.float32)
    for rank in tl.static_range(RANKS):
        lse_R = tl.load(lse_words + (rank * rows + row_R) * WORDS + LSE_AT, mask=ok_R, other=-float("inf"))
        top_R = tl.maximum(top_R, lse_R)
    shift_R = tl.where(top_R == -float("inf"), 0.0, top_R)  # -inf: no rank keeps a key
    total_R = tl.zeros([BLOCK_R], tl.float32)
    sum_RE = tl.zeros([BLOCK_R, PADDED_VALUE], tl.float32)
    for rank in tl.static_range(RANKS):
        lse_R = tl.load(lse_words + (rank * rows + row_R) * WORDS + LSE_AT, mask=ok_R, other=-float("inf"))
        weight_R = tl.exp(lse_R - shift_R)
        x_RE = tl.load(states + (rank * rows + row_R[:, None]) * ROW + e[None, :], mask=ok_RE, other=0.0).to(tl.float32)
        total_R += weight_R
        sum_RE += tl.where((lse_R == -float("inf"))[:, None], 0.0, x_RE * weight_R[:, None])  # NaN of a key read stays NaN
    none_R = total_R == 0
    safe_R = tl.where(none_R, 1.0, total_R)
    tl.store(lse + row_R, tl.where(none_R, -float("inf"), shift_R + tl.log(safe_R)), mask=ok_R)
    tl.store(out + row_R[:, None] * VALUE_DIM + e[None, :], (sum_RE / safe_R[:, None]).to(out.dtype.element_ty), mask=ok_RE)


def launch_pack(partial: AttentionState, shape: tuple[int, int, int, int]) -> Tensor:
    """`pack_states`: [D, T, H, X], the given shape.  The padding after an lse is neither written nor read."""
    out, lse = partial.out_THD.contiguous(), partial.lse_TH.contiguous()
    states = torch.empty(shape, dtype=out.dtype, device=out.device)
    (D, T, H, _), options = shape, _options(states, out.shape[2])
    if rows := D * T * H:
        pack_kernel[(triton.cdiv(rows, options["BLOCK_R"]),)](
            out, lse, states, states.view(torch.float32), T, H, RANKS=D, **options
        )  # fmt: skip
    return states


def launch_merge(states: Tensor, value_dim: int) -> AttentionState:
    """`merge_ranks`.  states: [D, T, H, X]."""
    (D, T, H, _), options = states.shape, _options(states, value_dim)
    assert states.is_contiguous()
    state = AttentionState.empty((T, H, value_dim), states.dtype, states.device)
    if rows := T * H:
        merge_ranks_kernel[(triton.cdiv(rows, options["BLOCK_R"]),)](
            states, states.view(torch.float32), *state, rows, RANKS=D, **options
        )  # fmt: skip
    return state


def _options(states: Tensor, value_dim: int) -> dict[str, int | bool]:
    """The constants of both kernels."""
    row, padded = states.shape[-1], triton.next_power_of_2(value_dim)
    words = row * states.itemsize // 4
    return {
        "VALUE_DIM": value_dim, "PADDED_VALUE": padded, "ROW": row, "WORDS": words,
        "LSE_AT": value_dim * states.itemsize // 4, "BLOCK_R": max(1, BLOCK // padded), "num_warps": 4,
        **chained(states.device),
    }  # fmt: skip
