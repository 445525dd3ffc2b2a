"""The kernels of states.py: what a pass over trees reads and writes, and what is pending after it.  A program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.limits import TRASH, ZEROS
from specdec.ops.launch import chained


@triton.jit(do_not_specialize_on_alignment=["active", "numbers", "counts"])
def state_numbers_kernel(
    active,  # [B] int32
    numbers,  # [B, 3] int64
    counts,  # [B] int32
    read, write,  # [B] int64, written
    pending,  # [B] int32, written
    ZEROS: tl.constexpr, TRASH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    runs = tl.load(active + b) > 0
    tl.store(read + b, tl.where(runs, tl.load(numbers + 3 * b), ZEROS))
    tl.store(write + b, tl.where(runs, tl.load(numbers + 3 * b + 1), TRASH))
    tl.store(pending + b, tl.where(runs, tl.load(counts + b), 0))


@triton.jit(
    do_not_specialize=["places", "stride_path", "stride_kept"],
    do_not_specialize_on_alignment=["active", "numbers", "counts", "kept"],
)
def commit_states_kernel(
    active,  # [B] int32
    path,  # [B, E] int64
    accepted,  # [B] int64
    numbers,  # [B, 3] int64, updated
    kept,  # [B, at least E] int64, updated
    counts,  # [B] int32, updated
    places,  # E
    stride_path,
    stride_kept,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(active + b) > 0:
        written, following = tl.load(numbers + 3 * b + 1), tl.load(numbers + 3 * b + 2)
        tl.store(numbers + 3 * b, written)
        tl.store(numbers + 3 * b + 1, following)
        tl.store(numbers + 3 * b + 2, written)
        tl.store(kept + b * stride_kept + e, tl.load(path + b * stride_path + e, mask=e < places), mask=e < places)
        tl.store(counts + b, (tl.load(accepted + b) + 1).to(tl.int32))


def launch_state_numbers(active_B: Tensor, numbers_B3: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers that rows read, and write, [B] int64 each, and how many nodes are pending, [B] int32."""
    assert numbers_B3.is_contiguous()
    B, device = len(active_B), active_B.device
    read_B, write_B = (torch.empty(B, dtype=torch.int64, device=device) for _ in range(2))
    pending_B = torch.empty(B, dtype=torch.int32, device=device)
    state_numbers_kernel[(B,)](
        active_B, numbers_B3, count_B, read_B, write_B, pending_B, ZEROS, TRASH, num_warps=1, **chained(device)
    )
    return read_B, write_B, pending_B


def launch_commit_states(
    active_B: Tensor, path_BE: Tensor, accepted_B: Tensor, numbers_B3: Tensor, kept_BE: Tensor, count_B: Tensor
) -> None:
    """`StateRows.commit`.  kept_BE: its path_BE, which may have more places."""
    B, E = path_BE.shape
    assert numbers_B3.is_contiguous() and path_BE.stride(1) == kept_BE.stride(1) == accepted_B.stride(0) == 1
    assert E <= kept_BE.shape[1]
    commit_states_kernel[(B,)](
        active_B, path_BE, accepted_B, numbers_B3, kept_BE, count_B, E, path_BE.stride(0), kept_BE.stride(0),
        BLOCK=max(16, triton.next_power_of_2(E)), num_warps=1, **chained(active_B.device),
    )  # fmt: skip
