"""The kernel of tables.py: every node walks up to the root and writes its path on the way.

Shapes: B sequences, N nodes, T = B * N, W table width (the most nodes of a path).
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


@triton.jit(
    do_not_specialize=["total", "num_nodes", "width", "stride_row", "stride_parents"],
    do_not_specialize_on_alignment=["page_table", "lens"],
)
def path_tables_kernel(
    page_table,  # [B, pages] int32
    lens,  # [B] int32
    parents,  # [B, N] int64
    positions,  # [T] int64
    slots,  # [T] int64
    table,  # [T, W] int32
    table_lens,  # [T] int32
    total,  # T
    num_nodes,  # N
    width,  # W
    stride_row,
    stride_parents,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = t < total
    b, node = (t // num_nodes).to(tl.int64), t % num_nodes
    page_table += b * stride_row
    parents += b * stride_parents
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(lens + b, mask=ok, other=0)
    depth = tl.zeros([BLOCK], tl.int32)
    at = node
    for _ in range(width - 1):
        depth += (at > 0).to(tl.int32)
        at = tl.load(parents + at, mask=ok, other=0).to(tl.int32)
    own = slots_of(page_table, length + node, ok, PAGE_SIZE)
    tl.store(positions + t, (length + depth).to(tl.int64), mask=ok)
    tl.store(slots + t, own, mask=ok)
    tl.store(table_lens + t, depth + 1, mask=ok)
    at = node
    for i in range(width):
        place = width - 1 - i
        slot = slots_of(page_table, length + at, ok, PAGE_SIZE)  # after its length, a row repeats the node itself
        tl.store(table + t.to(tl.int64) * width + place, slot.to(tl.int32), mask=ok)
        parent = tl.load(parents + at, mask=ok, other=0).to(tl.int32)
        at = tl.where(place <= depth, parent, at)


def launch_path_tables(pages: PageTable, lens_B: Tensor, parents_BN: Tensor, width: int) -> tuple[Tensor, Tensor, Segment]:
    """`tables.path_tables`, with suffix rows of `width` slots."""
    B, N = parents_BN.shape
    device = lens_B.device
    assert pages.table.stride(1) == 1 and parents_BN.stride(1) == 1 and lens_B.is_contiguous()
    positions, slots = (torch.empty(B * N, dtype=torch.int64, device=device) for _ in range(2))
    table = torch.empty(B * N, width, dtype=torch.int32, device=device)
    lens = torch.empty(B * N, dtype=torch.int32, device=device)
    path_tables_kernel[(triton.cdiv(B * N, 64),)](
        pages.table, lens_B, parents_BN, positions, slots, table, lens,
        B * N, N, width, pages.table.stride(0), parents_BN.stride(0),
        PAGE_SIZE=pages.page_size, BLOCK=64, num_warps=2, **chained(device),
    )  # fmt: skip
    return positions, slots.view(B, N), Segment.of_slots(table, lens, lens_B)
