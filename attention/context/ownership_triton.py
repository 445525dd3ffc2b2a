"""The kernels of `Ownership`: how many tokens of each sequence a rank keeps, and where it keeps the tokens of some slots.

Both compute each number of theirs from one number that they read after their wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.attention.context.ownership import Ownership

BLOCK = 256


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["lens"])
def counts_kernel(
    lens,  # int32
    counts,  # int32
    count,
    RANK: tl.constexpr,
    TURN: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # No gdc_launch_dependents: the next kernel may be attention, which reads lengths before its own wait.
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lens + at, mask=at < count, other=0)
    rest = tl.minimum(tl.maximum(length % TURN - RANK * RUN, 0), RUN)
    tl.store(counts + at, length // TURN * RUN + rest, mask=at < count)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def own_slots_kernel(
    slots,  # int64
    own,  # int64
    count,
    RANK: tl.constexpr,
    TURN: tl.constexpr,
    RUN: tl.constexpr,
    WHOLE_PAGE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DUMMY_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < count, other=0)
    place = slot % WHOLE_PAGE
    page = tl.where(place % TURN // RUN == RANK, slot // WHOLE_PAGE, DUMMY_PAGE)
    tl.store(own + at, page * PAGE_SIZE + place // TURN * RUN + place % RUN, mask=at < count)


def launch_counts(ownership: Ownership, lens_B: Tensor) -> Tensor:
    """`Ownership.counts`."""
    counts_B = torch.empty_like(lens_B)
    assert lens_B.is_contiguous()
    if count := lens_B.numel():
        rank, ranks, _, run = ownership
        counts_kernel[(triton.cdiv(count, BLOCK),)](
            lens_B, counts_B, count, RANK=rank, TURN=run * ranks, RUN=run, BLOCK=BLOCK, num_warps=1, **chained(lens_B.device)
        )  # fmt: skip
    return counts_B


def launch_own_slots(ownership: Ownership, slots: Tensor, dummy_page: int) -> Tensor:
    """`Ownership.own_slots`."""
    slots = slots.contiguous()
    own = torch.empty_like(slots)
    if count := slots.numel():
        rank, ranks, page_size, run = ownership
        own_slots_kernel[(triton.cdiv(count, BLOCK),)](
            slots, own, count, RANK=rank, TURN=run * ranks, RUN=run, WHOLE_PAGE=page_size * ranks, PAGE_SIZE=page_size,
            DUMMY_PAGE=dummy_page, BLOCK=BLOCK, num_warps=1, **chained(slots.device),
        )  # fmt: skip
    return own
