"""The kernel of `move_slots`: it moves accepted tokens to their final slots, in all layers, in one launch.

One program handles one sequence, one layer and one block of columns.  It holds that block of all the sequence's moving tokens,
so it reads everything before it writes; sequences share no slot, so programs do not conflict.

Shapes: B sequences, N slots of a sequence, E tokens of a path.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained


@triton.jit(do_not_specialize=["places", "num_slots", "stride_path", "stride_targets"])
def move_kernel(
    kv,  # [layers, slots, SIZE]
    slots,  # [B, N] int64
    path,  # [B, E] int64
    targets,  # [B, E] int64
    places,  # E
    num_slots,  # N
    stride_path,
    stride_layer,
    stride_targets,
    SIZE: tl.constexpr,
    PADDED_PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TARGETS: tl.constexpr,  # else slot number e is the target of place e
    PDL: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    kv += tl.program_id(2).to(tl.int64) * stride_layer
    e = tl.arange(0, PADDED_PLACES)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok_E = e < places
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    node_E = tl.load(path + b * stride_path + e, mask=ok_E, other=0)
    moves_E = ok_E & (HAS_TARGETS | (node_E != e))
    from_E = tl.load(slots + b * num_slots + node_E, mask=moves_E, other=0)
    to_E = tl.load(targets + b * stride_targets + e, mask=moves_E, other=0)
    ok = moves_E[:, None] & (column < SIZE)[None, :]
    x = tl.load(kv + from_E[:, None] * SIZE + column[None, :], mask=ok)
    tl.debug_barrier()  # all threads have read: the slot that one thread writes is the slot that another one reads
    tl.store(kv + to_E[:, None] * SIZE + column[None, :], x, mask=ok)


def launch_move(kv: Tensor, slots_BN: Tensor, path_BE: Tensor, targets_BE: Tensor | None = None) -> None:
    """Launches the move of `KVCache.move` on kv [layers, num_slots, ...]; slots_BN, path_BE and targets_BE are int64."""
    has_targets = targets_BE is not None
    targets_BE = slots_BN if targets_BE is None else targets_BE
    layers, size = kv.shape[0], kv[0, 0].numel()
    (B, N), E = slots_BN.shape, path_BE.shape[1]
    assert kv.is_contiguous() and slots_BN.is_contiguous() and path_BE.stride(1) == targets_BE.stride(1) == 1
    padded = triton.next_power_of_2(E)
    block = min(triton.next_power_of_2(size), max(32, 4096 // padded))
    if B * E:
        move_kernel[(triton.cdiv(size, block), B, layers)](
            kv, slots_BN, path_BE, targets_BE, E, N, path_BE.stride(0), kv.stride(0), targets_BE.stride(0),
            SIZE=size, PADDED_PLACES=padded, BLOCK=block, HAS_TARGETS=has_targets, num_warps=4, **chained(kv.device),
        )  # fmt: skip
