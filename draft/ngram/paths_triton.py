"""The kernel of source.py: one program for each match of each sequence, which copies how the text goes on there.

Shapes: B sequences, M matches, which are paths, D tokens of a path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.draft.ngram.lookup import SHIFT, PagedTexts
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.draft.join.paths import Paths


@triton.jit(
    do_not_specialize=["stride_row", "depth", "room", "stride_tokens", "stride_lengths"],
    do_not_specialize_on_alignment=["page_table", "lens", "tokens", "lengths"],
)
def match_paths_kernel(
    page_table,  # [B, pages] int32
    lens,  # [B] int32
    text,  # [slots] int32
    keys,  # [B, M] int64
    tokens,  # [B, M, room] int64, with a stride between sequences
    lengths,  # [B, M] int64, likewise
    stride_row,
    depth,  # D
    room,
    stride_tokens,
    stride_lengths,
    BITS: tl.constexpr,  # SHIFT
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d_D = tl.arange(0, BLOCK)
    ok_D = d_D < depth
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    low = (tl.full([], 1, tl.int64) << BITS) - 1
    last = tl.maximum(tl.load(lens + b).to(tl.int64) - 1, 0)
    keys += b * tl.num_programs(1)
    first_key, own_key = tl.load(keys), tl.load(keys + p)
    key = tl.where(own_key >= 0, own_key, first_key)
    end = tl.where(first_key >= 0, key & low, last - 1)
    position_D = end + 1 + d_D % tl.maximum(last - end, 1)
    position_D = tl.minimum(tl.maximum(position_D, 0), last)
    slot_D = slots_of(page_table + b * stride_row, position_D, ok_D, PAGE_SIZE)
    token_D = tl.where(ok_D, tl.load(text + slot_D, mask=ok_D, other=0).to(tl.int64), -1)
    tl.store(tokens + b * stride_tokens + p * room + d_D, token_D, mask=d_D < room)
    tl.store(lengths + b * stride_lengths + p, tl.maximum(own_key >> BITS, 0))


def launch_paths(text: PagedTexts, keys_BM: Tensor, depth: int, out: Paths) -> None:
    """`source.fill_paths`, once the places are found."""
    (B, M), pages, (tokens_BPD, lengths_BP) = keys_BM.shape, text.pages, out[:2]
    room = tokens_BPD.shape[2]
    assert tokens_BPD.shape[1] == M and pages.table.stride(1) == 1 and depth <= room and keys_BM.is_contiguous()
    assert tokens_BPD.stride()[1:] == (room, 1) and lengths_BP.stride(1) == 1
    match_paths_kernel[(B, M)](
        pages.table, text.lens_B, text.tokens_N, keys_BM, tokens_BPD, lengths_BP,
        pages.table.stride(0), depth, room, tokens_BPD.stride(0), lengths_BP.stride(0),
        BITS=SHIFT, PAGE_SIZE=pages.page_size, BLOCK=max(16, triton.next_power_of_2(room)),
        num_warps=1, **chained(keys_BM.device),
    )  # fmt: skip
