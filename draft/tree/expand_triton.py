"""The kernels of expand.py: one writes the first level's candidates, the other grows a level from scanned logits.

The kernel that grows a level runs one program for each sequence.

Shapes: B sequences, K topk, R branches (rows of logits) of a sequence, C children of a branch; R = C = K, padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.topk_triton import LOWEST_64, Scan, key_index, key_value, launch_scan, make_key, merge_rows, merge_sizes

if TYPE_CHECKING:
    from specdec.draft.tree.expand import Beam, Candidates


@triton.jit(do_not_specialize=["rows", "stride_b"])
def first_level_kernel(
    tokens,  # [B, K] int64
    logp,  # [B, K] float32
    candidate_tokens,  # [B, C] int64
    candidate_scores,  # [B, C] float32
    candidate_parents,  # [B, C] int64
    rows,  # B * K
    stride_b,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = r < rows
    to = (r // K) * stride_b + r % K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(candidate_tokens + to, tl.load(tokens + r, mask=ok), mask=ok)
    tl.store(candidate_scores + to, tl.load(logp + r, mask=ok), mask=ok)
    tl.store(candidate_parents + to, tl.full([BLOCK], -1, tl.int64), mask=ok)


@triton.jit(do_not_specialize=["slices", "start", "stride_b", "stride_indices"])
def expand_kernel(
    keys,  # [B * K, S, K] int64, from scan_kernel
    sums,  # [B * K, S] float32
    offsets,  # [V] int64
    scores,  # [B, K] float32: the beam's
    indices,  # [B, K] int64: the beam's candidates
    candidate_tokens,  # [B, C] int64
    candidate_scores,  # [B, C] float32
    candidate_parents,  # [B, C] int64
    next_tokens,  # [B, K] int64: the next beam
    next_scores,  # [B, K] float32
    next_indices,  # [B, K] int64
    next_parents,  # [B, K] int64
    slices,
    start,  # the level's first candidate
    stride_b,
    stride_indices,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_M: tl.constexpr,
    PADDED_S: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0)
    k = tl.arange(0, PADDED_K)
    ok_K = k < K
    ok_RC = ok_K[:, None] & ok_K[None, :]
    child_RC = k[:, None] * K + k[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_RC, logp_RC, _ = merge_rows(keys, sums, b * K + k, ok_K, slices, K, PADDED_K, PADDED_M, PADDED_S, True)
    token_RC = token_RC.to(tl.int64)
    if HAS_OFFSETS:
        token_RC += tl.load(offsets + token_RC, mask=ok_RC, other=0)
    score_R = tl.load(scores + b * K + k, mask=ok_K, other=0.0)
    parent_R = tl.load(indices + b * stride_indices + k, mask=ok_K, other=0)
    score_RC = score_R[:, None] + logp_RC
    to_RC = b.to(tl.int64) * stride_b + start + child_RC
    tl.store(candidate_tokens + to_RC, token_RC, mask=ok_RC)
    tl.store(candidate_scores + to_RC, score_RC, mask=ok_RC)
    tl.store(candidate_parents + to_RC, tl.broadcast_to(parent_R[:, None], (PADDED_K, PADDED_K)), mask=ok_RC)

    lowest = tl.full([], LOWEST_64, tl.int64)
    key_RC = tl.where(ok_RC, make_key(score_RC, child_RC), lowest)
    best_K = tl.full([PADDED_K], 0x7FFFFFFF, tl.int64)  # the padding's key decodes to index 0
    for i in range(K):
        best = tl.max(key_RC)
        key_RC = tl.where(key_RC == best, lowest, key_RC)
        best_K = tl.where(k == i, best, best_K)
    child_K = key_index(best_K)
    from_K = (child_K // K) * PADDED_K + child_K % K
    token_K = tl.gather(tl.reshape(token_RC, [PADDED_K * PADDED_K]), from_K, 0)
    at_K = b * K + k
    tl.store(next_tokens + at_K, token_K, mask=ok_K)
    tl.store(next_scores + at_K, key_value(best_K), mask=ok_K)
    tl.store(next_indices + at_K, (start + child_K).to(tl.int64), mask=ok_K)
    tl.store(next_parents + at_K, (child_K // K).to(tl.int64), mask=ok_K)


def launch_first_level(candidates: Candidates, tokens_BK: Tensor, logp_BK: Tensor) -> None:
    """Writes the first level's tokens, log-probabilities and parents (-1) into `candidates`."""
    rows = tokens_BK.numel()
    assert tokens_BK.is_contiguous() and logp_BK.is_contiguous()
    first_level_kernel[(triton.cdiv(rows, 128),)](
        tokens_BK, logp_BK, candidates.tokens_BC, candidates.scores_BC, candidates.parents_BC,
        rows, candidates.tokens_BC.stride(0), K=tokens_BK.shape[1], BLOCK=128, num_warps=1, **chained(logp_BK.device),
    )  # fmt: skip


def launch_expand(
    candidates: Candidates, level: int, beam: Beam, logits_RV: Tensor, offsets_V: Tensor | None, scan: Scan = launch_scan
) -> Beam:
    """`expand.expand`: scans the logits, then grows the level."""
    B, K = beam.tokens_BK.shape
    assert logits_RV.shape[0] == B * K and beam.scores_BK.is_contiguous()
    keys, sums = scan(logits_RV, K, True)
    tokens, indices, parents = (torch.empty(B, K, dtype=torch.int64, device=logits_RV.device) for _ in range(3))
    scores = torch.empty(B, K, dtype=torch.float32, device=logits_RV.device)
    sizes = merge_sizes(keys.shape[1], K)
    expand_kernel[(B,)](
        keys, sums, keys if offsets_V is None else offsets_V, beam.scores_BK, beam.indices_BK,
        candidates.tokens_BC, candidates.scores_BC, candidates.parents_BC, tokens, scores, indices, parents,
        keys.shape[1], K + K * K * (level - 2), candidates.tokens_BC.stride(0), beam.indices_BK.stride(0),
        **sizes, HAS_OFFSETS=offsets_V is not None,
        num_warps=max(4, min(16, sizes["PADDED_K"] * sizes["PADDED_M"] // 512)), **chained(logits_RV.device),
    )  # fmt: skip
    return type(beam)(tokens, scores, indices, parents)
