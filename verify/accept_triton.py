"""The kernel of accept.py: one program for each sequence; every node walks up to the root and checks each token on the way.

Shapes: B sequences, N nodes, E places on a path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.emitted import EmittedRows
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.ops.launch import chained


@triton.jit
def best_path(parent_N, taken_N, n, places, BLOCK: tl.constexpr):
    """`accept.best_path` of one tree.  parent_N: BLOCK where there is no node.  n: 0 to BLOCK - 1."""
    at, length, best, is_on = places * 0, places * 0, places * 0, places * 0 + 1
    for _ in range(places - 1):
        child = tl.min(tl.where((parent_N == at) & (n > at), n, BLOCK), 0)
        is_on = is_on * tl.sum(tl.where((n == child) & taken_N, 1, 0), 0)
        best += is_on
        length += (child < BLOCK).to(tl.int32)
        at = child
    return best, length


@triton.jit(
    do_not_specialize=[
        "nodes",
        "places",
        "stride_tokens_b",
        "stride_tokens_n",
        "stride_parents",
        "stride_targets",
        "width",
        "stride_sources",
    ],
    do_not_specialize_on_alignment=[
        "lens",
        "bonus",
        "active",
        "speculates",
        "tokens",
        "counts",
        "said",
        "best_paths",
        "said_sources",
    ],
)
def accept_kernel(
    tokens,  # [B, N] int64
    parents,  # [B, N] int64
    targets,  # [B, N] int64
    lens,  # [B] int32, updated
    bonus,  # [B] int64, written
    active,  # [B] int32: 0 where the root alone is taken, and the length stays
    speculates,  # [B] int32: 0 where the root alone is taken
    path,  # [B, E] int64
    accepted,  # [B] int64
    valid,  # [B, E] int64: the tokens, 0 for -1
    counts,  # [B] int64: of EmittedRows, the same number
    said,  # [B, E] int64: of EmittedRows, the tokens
    best_paths,  # [B, 2] int64: of EmittedRows, what accept.best_path gives
    sources,  # [B, N] int64 if HAS_SOURCES
    said_sources,  # [B, E - 1] int64: of EmittedRows, the sources of the path after the root
    base_lens,  # [B] int32
    nodes,  # N
    places,  # E
    stride_tokens_b,
    stride_tokens_n,
    stride_parents,
    stride_targets,
    width,  # X, of a row of EmittedRows
    stride_sources,
    HAS_SOURCES: tl.constexpr,
    IS_CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    ok_N = n < nodes
    tokens += b * stride_tokens_b
    parents += b * stride_parents
    targets += b * stride_targets
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.load(lens + b)
    target_N = tl.load(targets + n, mask=ok_N, other=0)
    depth_N = tl.zeros([BLOCK], tl.int32)
    is_active = tl.load(active + b)
    taken_N = ok_N & ((n == 0) | (tl.load(speculates + b) * is_active > 0))
    at_N = tl.where(ok_N, n, 0)
    for _ in range(places - 1):
        parent_N = tl.load(parents + at_N).to(tl.int32)
        hit_N = tl.load(tokens + at_N * stride_tokens_n) == tl.load(targets + parent_N)
        taken_N = taken_N & (hit_N | (at_N == 0))
        depth_N += (at_N > 0).to(tl.int32)
        at_N = parent_N
    count = tl.sum(taken_N.to(tl.int32), 0) - 1
    taken_N = taken_N & (depth_N < places)
    # The taken nodes form one path, so a node's place on the path is its depth.  Later places hold their own place number.
    rest_N = (n > count) & (n < places)
    to_N = b * places + tl.where(taken_N, depth_N, n)
    valid_N = tl.maximum(target_N, 0)
    tl.store(path + to_N, n.to(tl.int64), mask=taken_N)
    tl.store(valid + to_N, valid_N, mask=taken_N)
    said += b * width
    tl.store(said + tl.where(taken_N, depth_N, n), target_N, mask=taken_N)
    tl.store(path + b * places + n, n.to(tl.int64), mask=rest_N)
    tl.store(valid + b * places + n, valid_N, mask=rest_N)
    tl.store(said + n, target_N, mask=rest_N)
    if HAS_SOURCES:
        source_N = tl.load(sources + b * stride_sources + n, mask=ok_N, other=0)
        said_sources += b * width - 1  # the root has no column
        tl.store(said_sources + depth_N, source_N, mask=taken_N & (n > 0))
        tl.store(said_sources + n, source_N, mask=rest_N)
    tl.store(counts + b * width, count.to(tl.int64))
    best, path_length = count, places - 1
    if not IS_CHAIN:
        best, path_length = best_path(tl.load(parents + n, mask=ok_N, other=BLOCK).to(tl.int32), taken_N, n, places, BLOCK)
    tl.store(best_paths + b * width, best.to(tl.int64))
    tl.store(best_paths + b * width + 1, path_length.to(tl.int64))
    tl.store(accepted + b, count.to(tl.int64))
    tl.store(bonus + b, tl.sum(tl.where(taken_N & (depth_N == count), valid_N, 0), 0))
    tl.store(base_lens + b, length)
    tl.store(lens + b, length + (count + 1) * is_active)


def launch_accept(
    tree: DraftTree, target_tokens_BN: Tensor, state: BatchState
) -> tuple[Tensor, Tensor, Tensor, EmittedRows, Tensor]:
    """`accept.accept`: (path_BE, accepted_B, tokens_BE, emitted, base_lens_B)."""
    B, N = target_tokens_BN.shape
    E, device = tree.max_depth + 1, target_tokens_BN.device
    assert tree.parents_BN.stride(1) == 1 and target_tokens_BN.stride(1) == 1
    assert tree.sources_BN is None or tree.sources_BN.stride(1) == 1
    assert tree.tokens_BN.shape == tree.parents_BN.shape == (B, N) and E <= N
    path, valid = (torch.empty(B, E, dtype=torch.int64, device=device) for _ in range(2))
    sources_BN = tree.sources_BN
    emitted = EmittedRows.empty(B, E, device, 0 if sources_BN is None else E - 1)
    accepted, base_lens = torch.empty(B, dtype=torch.int64, device=device), torch.empty_like(state.lens_B)
    block = max(32, triton.next_power_of_2(N))
    accept_kernel[(B,)](
        tree.tokens_BN, tree.parents_BN, target_tokens_BN, state.lens_B, state.bonus_B, state.active_B, state.speculates_B,
        path, accepted, valid, emitted.accepted_B, emitted.tokens_BE, emitted.best_B2,
        path if sources_BN is None else sources_BN, emitted.sources_BD, base_lens,
        N, E, *tree.tokens_BN.stride(), tree.parents_BN.stride(0), target_tokens_BN.stride(0), emitted.numbers_BX.stride(0),
        0 if sources_BN is None else sources_BN.stride(0), sources_BN is not None, tree.is_chain or N == 1,
        BLOCK=block, num_warps=max(1, min(8, block // 64)), **chained(device),
    )  # fmt: skip
    return path, accepted, valid, emitted, base_lens
