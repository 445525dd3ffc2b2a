"""The kernel of `tree_numbers`: what the host is to know of each node, in one tensor and one launch.

Torch would take five launches, of which each costs a small model's round about a hundredth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.ops.launch import chained

BLOCK = 256
NO_SCORE = 0x7FF8000000000000  # the bits of the float64 number NaN


@triton.jit(
    do_not_specialize=["nodes", "total", "stride_parents"],
    do_not_specialize_on_alignment=["tokens", "parents", "chosen", "sources", "scores", "numbers"],
)
def tree_numbers_kernel(
    tokens, parents, chosen,  # [B, N] int64
    sources,  # [B, N] int64; unused without HAS_SOURCES
    scores,  # [B, N] float32; unused without HAS_SCORES
    numbers,  # [B, 5, N] int64, written
    nodes, total,  # N, B * N
    stride_parents,
    HAS_SOURCES: tl.constexpr, HAS_SCORES: tl.constexpr, NO_SCORE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = places < total
    b, n = places // nodes, places % nodes
    out = numbers + 5 * b * nodes + n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(out, tl.load(tokens + places, mask=ok), mask=ok)
    tl.store(out + nodes, tl.load(parents + b * stride_parents + n, mask=ok), mask=ok)
    tl.store(out + 2 * nodes, tl.load(chosen + places, mask=ok), mask=ok)
    bits = tl.zeros([BLOCK], tl.int64)
    if HAS_SOURCES:
        bits = tl.load(sources + places, mask=ok)
    tl.store(out + 3 * nodes, bits, mask=ok)
    bits = tl.full([BLOCK], NO_SCORE, tl.int64)
    if HAS_SCORES:
        bits = tl.load(scores + places, mask=ok, other=0.0).to(tl.float64).to(tl.int64, bitcast=True)
    tl.store(out + 4 * nodes, bits, mask=ok)


def launch_tree_numbers(tree: DraftTree, chosen_BN: Tensor) -> Tensor:
    """`tree_numbers`, [B, 5, N] int64.  A chain's parents may be one row for all sequences."""
    B, N = tree.tokens_BN.shape
    tokens_BN, parents_BN, chosen_BN = tree.tokens_BN.contiguous(), tree.parents_BN, chosen_BN.contiguous()
    sources_BN = tokens_BN if tree.sources_BN is None else tree.sources_BN.contiguous()
    scores_BN = tokens_BN if tree.scores_BN is None else tree.scores_BN.contiguous()
    assert parents_BN.stride(1) == 1 or N == 1
    assert tree.scores_BN is None or scores_BN.dtype is torch.float32
    numbers_B5N = torch.empty(B, 5, N, dtype=torch.int64, device=tokens_BN.device)
    tree_numbers_kernel[(triton.cdiv(B * N, BLOCK),)](
        tokens_BN, parents_BN, chosen_BN, sources_BN, scores_BN, numbers_B5N, N, B * N, parents_BN.stride(0),
        tree.sources_BN is not None, tree.scores_BN is not None, NO_SCORE, BLOCK, num_warps=4, **chained(tokens_BN.device),
    )  # fmt: skip
    return numbers_B5N
