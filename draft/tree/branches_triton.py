"""The kernel of branches.py: one program for each branch and block of its feature; the first block's program also fills the
tables.

Shapes: B sequences, K topk, R = B * K branches, P parents of a sequence, H hidden, W steps so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.ops.launch import chained


@triton.jit(do_not_specialize=["steps", "stride_row"], do_not_specialize_on_alignment=["page_table", "lens"])
def fork_kernel(
    page_table,  # [B, pages] int32
    lens,  # [B] int32
    parents,  # [B, K] int64
    hidden,  # [B * P, H]
    ancestors,  # [B * P, W] int32
    next_hidden,  # [R, H]
    positions,  # [R] int64
    slots,  # [R] int64
    table,  # [R, W + 1] int32
    table_lens,  # [R] int32
    steps,  # W
    stride_row,
    K: tl.constexpr,
    P: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PADDED_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    b, k = r // K, r % K
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w = tl.arange(0, PADDED_STEPS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parent = b * P
    if P > 1:
        parent += tl.load(parents + r)
    x = tl.load(hidden + parent * SIZE + h, mask=h < SIZE)
    if tl.program_id(1) == 0:
        length = tl.load(lens + b)
        slot = slots_of(page_table + b * stride_row, length + steps * K + k, True, PAGE_SIZE)
        tl.store(positions + r, (length + steps).to(tl.int64))
        tl.store(slots + r, slot)
        tl.store(table_lens + r, steps + 1)
        path = tl.load(ancestors + parent * steps + w, mask=w < steps, other=0)
        tl.store(table + r * (steps + 1) + w, tl.where(w < steps, path, slot.to(tl.int32)), mask=w <= steps)
    tl.store(next_hidden + r * SIZE + h, x, mask=h < SIZE)


def launch_fork(
    pages: PageTable, lens_B: Tensor, parents_BK: Tensor, hidden: Tensor, ancestors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Segment]:
    """`branches.fork`: (hidden_RH, positions_R, slots_R, suffix)."""
    (B, K), W, H = parents_BK.shape, ancestors.shape[1], hidden.shape[1]
    R, P, device = B * K, hidden.shape[0] // B, hidden.device
    assert P == 1 or parents_BK.is_contiguous()
    assert hidden.is_contiguous() and ancestors.is_contiguous() and pages.table.stride(1) == 1
    next_hidden = hidden.new_empty(R, H)
    positions, slots = (torch.empty(R, dtype=torch.int64, device=device) for _ in range(2))
    table = torch.empty(R, W + 1, dtype=torch.int32, device=device)
    lens = torch.empty(R, dtype=torch.int32, device=device)
    fork_kernel[(R, triton.cdiv(H, 1024))](
        pages.table, lens_B, parents_BK, hidden, ancestors, next_hidden, positions, slots, table, lens,
        W, pages.table.stride(0), K=K, P=P, SIZE=H, PAGE_SIZE=pages.page_size,
        PADDED_STEPS=max(8, triton.next_power_of_2(W + 1)), BLOCK=1024, num_warps=4, **chained(device),
    )  # fmt: skip
    return next_hidden, positions, slots, Segment.of_slots(table, lens, lens_B)
