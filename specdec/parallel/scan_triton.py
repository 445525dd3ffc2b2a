"""Scans of logits whose runs of the vocabulary lie on several ranks: each scans its own, and all gather what all have found.

The result has the form of `launch_scan`'s for whole logits, with the slices of all ranks one after the other, so the same
merges go on with it.

Shapes: N ranks, R rows, W a rank's run of the vocabulary, S slices of a run, k best.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.topk_triton import LOWEST_64, key_index, launch_scan, scan_slices


@triton.jit(do_not_specialize=["run", "slices", "own_rank"])
def arrange_kernel(
    gathered,  # [N, L] int64: R * S * k keys, then R * S sums, two in each number
    found,  # [L] int64: what this rank has given
    keys,  # [R, N, S, k] int64
    sums,  # [R, N, S] float32
    run,  # W
    slices,
    own_rank,
    K: tl.constexpr,
    PADDED_M: tl.constexpr,
    PADDED_S: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PDL: tl.constexpr,
):
    row, rank = tl.program_id(0), tl.program_id(1)
    rows, ranks = tl.num_programs(0), tl.num_programs(1)
    m_M = tl.arange(0, PADDED_M)
    s_S = tl.arange(0, PADDED_S)
    ok_M = m_M < slices * K
    ok_S = s_S < slices
    # This rank's own keys are sound and differ from each other whatever became of the exchange, so k tokens are found.
    own = gathered + rank * (rows * slices * K + (rows * slices + 1) // 2) if rank != own_rank else found
    to = row * ranks + rank
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    key_M = tl.load(own + row * slices * K + m_M, mask=ok_M, other=0)
    # If a rank is lost, its part may hold anything.  That must not become an index beyond the vocabulary.
    key_M = tl.where(key_index(key_M) < run, key_M, LOWEST_64 + 0x7FFFFFFF)
    tl.store(keys + to * slices * K + m_M, key_M - rank * run, mask=ok_M)  # a key holds its index inverted
    if SOFTMAX:
        place_S = row * slices + s_S
        pair_S = tl.load(own + rows * slices * K + place_S // 2, mask=ok_S, other=0)
        bits_S = (pair_S >> ((place_S % 2) * 32).to(tl.int64)).to(tl.int32)
        tl.store(sums + to * slices + s_S, bits_S.to(tl.float32, bitcast=True), mask=ok_S)


def launch_scan_ranks(
    logits_RW: Tensor, k: int, softmax: bool, gather: Callable[[Tensor], Tensor], rank: int
) -> tuple[Tensor, Tensor]:
    """`launch_scan` of the logits of all ranks, whose runs are equally long: (keys [R, N * S, k], sums [R, N * S]).

    gather: gives a tensor of every rank, one after the other.  rank: this one.
    """
    (R, W), device = logits_RW.shape, logits_RW.device
    S = scan_slices(R, W, k)
    own_L = torch.empty(R * S * k + (R * S + 1) // 2, dtype=torch.int64, device=device)
    keys_RSk, sums_RS = own_L[: R * S * k].view(R, S, k), own_L[R * S * k :].view(torch.float32)[: R * S].view(R, S)
    launch_scan(logits_RW, k, softmax, (keys_RSk, sums_RS))
    gathered_NL = gather(own_L)
    N = len(gathered_NL)
    keys = torch.empty(R, N * S, k, dtype=torch.int64, device=device)
    sums = torch.empty(R, N * S, dtype=torch.float32, device=device)
    if R:
        arrange_kernel[(R, N)](
            gathered_NL, own_L, keys, sums, W, S, rank, K=k, PADDED_M=triton.next_power_of_2(S * k),
            PADDED_S=triton.next_power_of_2(S), SOFTMAX=softmax, num_warps=1, **chained(device),
        )  # fmt: skip
    return keys, sums
