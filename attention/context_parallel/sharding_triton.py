"""The kernels of `KVSharding`: how many tokens of each sequence a rank keeps, and where it keeps the tokens of some slots.

Order of chained launches (specdec/ops/launch.py): both kernels read nothing before gdc_wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.attention.context_parallel.sharding import KVSharding

BLOCK = 256


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["lens"])
def local_lens_kernel(
    lens,  # int32
    local_lens,  # int32
    count,
    RANK: tl.constexpr,
    CYCLE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # No gdc_launch_dependents: the next kernel may be attention, which reads lengths before its own wait.
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lens + at, mask=at < count, other=0)
    rest = tl.minimum(tl.maximum(length % CYCLE - RANK * INTERLEAVE, 0), INTERLEAVE)
    tl.store(local_lens + at, length // CYCLE * INTERLEAVE + rest, mask=at < count)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def local_slots_kernel(
    slots,  # int64
    local_slots,  # int64
    count,
    RANK: tl.constexpr,
    CYCLE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
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
    page = tl.where(place % CYCLE // INTERLEAVE == RANK, slot // WHOLE_PAGE, DUMMY_PAGE)
    tl.store(local_slots + at, page * PAGE_SIZE + place // CYCLE * INTERLEAVE + place % INTERLEAVE, mask=at < count)


def launch_local_lens(sharding: KVSharding, lens_B: Tensor) -> Tensor:
    """`KVSharding.local_lens`."""
    local_lens_B = torch.empty_like(lens_B)
    assert lens_B.is_contiguous()
    if count := lens_B.numel():
        rank, ranks, _, interleave = sharding
        local_lens_kernel[(triton.cdiv(count, BLOCK),)](
            lens_B, local_lens_B, count, RANK=rank, CYCLE=interleave * ranks, INTERLEAVE=interleave, BLOCK=BLOCK, num_warps=1,
            **chained(lens_B.device),
        )  # fmt: skip
    return local_lens_B


def launch_local_slots(sharding: KVSharding, slots: Tensor, dummy_page: int) -> Tensor:
    """`KVSharding.local_slots`."""
    slots = slots.contiguous()
    local = torch.empty_like(slots)
    if count := slots.numel():
        rank, ranks, page_size, interleave = sharding
        local_slots_kernel[(triton.cdiv(count, BLOCK),)](
            slots, local, count, RANK=rank, CYCLE=interleave * ranks, INTERLEAVE=interleave, WHOLE_PAGE=page_size * ranks,
            PAGE_SIZE=page_size, DUMMY_PAGE=dummy_page, BLOCK=BLOCK, num_warps=1, **chained(slots.device),
        )  # fmt: skip
    return local
