"""The kernels of correct.py.  A program holds some rows of w2, which it reads before the kernel in front is complete.

In a chain each program finds the last level's token by itself, in what the last level's programs left: of each slice of the
vocabulary the best token's key (ops/topk_triton.py).  So a level is one launch.

Shapes: B sequences, S levels, R rows, W draft vocabulary, N tokens of a slice, M slices, C rows of a program, r rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.topk_triton import LOWEST_64, key_index, make_key

SLICE, ROWS, WARPS = 64, 16, 4  # tokens and rows of a program; measured: benchmarks/rounds/README.md, "Heads of one pass"


@triton.jit
def _added(w2_Nr, w1_Cr, own_CN):
    """own + w2 w1, [C, N], rounded as a product and a sum are."""
    added_CN = tl.dot(w1_Cr, tl.trans(w2_Nr), input_precision="ieee").to(own_CN.dtype).to(tl.float32)
    return (own_CN.to(tl.float32) + added_CN).to(own_CN.dtype)


@triton.jit(do_not_specialize=["rows", "each"])
def corrected_logits_kernel(
    own,  # [B, W]
    before,  # [R] int64
    w1,  # [V, r]
    w2,  # [W, r]
    logits,  # [R, W]
    rows,  # R
    each,  # R / B
    vocab,  # W
    stride_own,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    PDL: tl.constexpr,
):
    n, i = tl.program_id(0) * SLICE + tl.arange(0, SLICE), tl.arange(0, PADDED)
    c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ok_N, ok_C, ok_r = n < vocab, c < rows, i < RANK
    w2_Nr = tl.load(w2 + n.to(tl.int64)[:, None] * RANK + i[None, :], mask=ok_N[:, None] & ok_r[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token_C = tl.load(before + c, mask=ok_C, other=0)
    ok_CN = ok_C[:, None] & ok_N[None, :]
    own_CN = tl.load(own + (c // each).to(tl.int64)[:, None] * stride_own + n[None, :], mask=ok_CN, other=0.0)
    w1_Cr = tl.load(w1 + token_C[:, None] * RANK + i[None, :], mask=ok_C[:, None] & ok_r[None, :], other=0.0)
    tl.store(logits + c.to(tl.int64)[:, None] * vocab + n[None, :], _added(w2_Nr, w1_Cr, own_CN), mask=ok_CN)


@triton.jit
def _best(keys, c, ok_C, slices, offsets, PADDED_M: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """The best tokens [C] int64 of rows of keys [B, M]."""
    m = tl.arange(0, PADDED_M)
    ok_CM = ok_C[:, None] & (m < slices)[None, :]
    best_C = tl.max(tl.load(keys + c[:, None] * slices + m[None, :], mask=ok_CM, other=LOWEST_64), 1)
    token_C = tl.where(ok_C, key_index(best_C), 0).to(tl.int64)
    if HAS_OFFSETS:
        token_C += tl.load(offsets + token_C, mask=ok_C, other=0)
    return token_C


@triton.jit(do_not_specialize=["rows", "slices"])
def chain_step_kernel(
    own,  # [B, W]
    before,  # [B] int64 tokens if FIRST, else [B, M] int64 keys
    w1,  # [V, r]
    w2,  # [W, r]
    offsets,  # [W] int64
    keys,  # [B, M] int64
    rows,  # B
    slices,  # M
    vocab,  # W
    stride_own,
    FIRST: tl.constexpr,
    ALONE: tl.constexpr,  # whether B is 1
    RANK: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    PADDED_M: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    n, i, c = tl.program_id(0) * SLICE + tl.arange(0, SLICE), tl.arange(0, PADDED), tl.arange(0, ROWS)
    ok_N, ok_C, ok_r = n < vocab, c < rows, i < RANK
    ok_CN = ok_C[:, None] & ok_N[None, :]
    own += c.to(tl.int64)[:, None] * stride_own + n[None, :]
    w2_Nr = tl.load(w2 + n.to(tl.int64)[:, None] * RANK + i[None, :], mask=ok_N[:, None] & ok_r[None, :], other=0.0)
    if not FIRST:  # the step in front has waited for the kernel that wrote all levels' own logits, and then triggered
        own_CN = tl.load(own, mask=ok_CN, other=0.0, cache_modifier=".cg")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if FIRST:
        own_CN = tl.load(own, mask=ok_CN, other=0.0)
        token_C = tl.load(before + c, mask=ok_C, other=0)
    elif ALONE:
        one = tl.arange(0, 1)
        token_C = _best(before, one, one == 0, slices, offsets, PADDED_M, HAS_OFFSETS)
        token_C = tl.broadcast_to(token_C, (ROWS,))
    else:
        token_C = _best(before, c, ok_C, slices, offsets, PADDED_M, HAS_OFFSETS)
    w1_Cr = tl.load(w1 + token_C[:, None] * RANK + i[None, :], mask=ok_C[:, None] & ok_r[None, :], other=0.0)
    logits_CN = _added(w2_Nr, w1_Cr, own_CN).to(tl.float32)
    key_CN = tl.where(ok_N[None, :], make_key(logits_CN, tl.broadcast_to(n[None, :], (ROWS, SLICE))), LOWEST_64)
    tl.store(keys + c * slices + tl.program_id(0), tl.max(key_CN, 1), mask=ok_C)


@triton.jit(do_not_specialize=["rows", "levels", "slices"])
def finish_chain_kernel(
    keys,  # [S, B, M] int64
    root,  # [B] int64
    offsets,  # [W] int64
    tokens,  # [B, 1 + S] int64
    rows,  # B
    levels,  # S
    slices,  # M
    PADDED_M: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PDL: tl.constexpr,
):
    b, place = tl.program_id(0), tl.program_id(1)  # the root is place 0
    row_C = (place - 1) * rows + b + tl.arange(0, 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if place == 0:
        tl.store(tokens + b * (levels + 1), tl.load(root + b))
    else:
        token_C = _best(keys, row_C, row_C >= 0, slices, offsets, PADDED_M, HAS_OFFSETS)
        tl.store(tokens + b * (levels + 1) + place + tl.arange(0, 1), token_C)


def launch_corrected_logits(own_BW: Tensor, before_R: Tensor, w1_Vr: Tensor, w2_Wr: Tensor) -> Tensor:
    """`correct.corrected_logits`: [R, W]."""
    (B, W), R = own_BW.shape, len(before_R)
    _check(own_BW, before_R, w1_Vr, w2_Wr)
    logits_RW = own_BW.new_empty(R, W)
    if R:
        corrected_logits_kernel[(triton.cdiv(W, SLICE), triton.cdiv(R, ROWS))](
            own_BW, before_R, w1_Vr, w2_Wr, logits_RW, R, R // B, W, own_BW.stride(0), **_sizes(w1_Vr),
            num_warps=WARPS, **chained(own_BW.device),
        )  # fmt: skip
    return logits_RW


def launch_greedy_chain(own_BSW: Tensor, root_B: Tensor, w1_Vr: Tensor, w2_Wr: Tensor, offsets_W: Tensor | None) -> Tensor:
    """`correct.greedy_chain`: [B, 1 + S] int64."""
    (B, S, W), M = own_BSW.shape, triton.cdiv(own_BSW.shape[2], SLICE)
    keys_SBM = torch.empty(S, B, M, dtype=torch.int64, device=own_BSW.device)
    tokens_BN = torch.empty(B, S + 1, dtype=torch.int64, device=own_BSW.device)
    ids = {"PADDED_M": triton.next_power_of_2(M), "HAS_OFFSETS": offsets_W is not None}
    offsets = root_B if offsets_W is None else offsets_W
    for level in range(S):
        own_BW, before = own_BSW[:, level], keys_SBM[level - 1] if level else root_B
        _check(own_BW, root_B, w1_Vr, w2_Wr)
        chain_step_kernel[(M,)](
            own_BW, before, w1_Vr, w2_Wr, offsets, keys_SBM[level], B, M, W, own_BW.stride(0), FIRST=level == 0, ALONE=B == 1,
            **ids, **_sizes(w1_Vr), num_warps=WARPS, **chained(own_BSW.device),
        )  # fmt: skip
    finish_chain_kernel[(B, S + 1)](
        keys_SBM, root_B, offsets, tokens_BN, B, S, M, **ids, num_warps=1, **chained(own_BSW.device)
    )
    return tokens_BN


def _check(own_BW: Tensor, before_R: Tensor, w1_Vr: Tensor, w2_Wr: Tensor) -> None:
    assert own_BW.stride(1) == 1 and before_R.is_contiguous() and before_R.dtype == torch.int64
    assert w1_Vr.is_contiguous() and w2_Wr.is_contiguous() and w2_Wr.shape == (own_BW.shape[1], w1_Vr.shape[1])
    assert own_BW.dtype == w1_Vr.dtype == w2_Wr.dtype and len(before_R) % len(own_BW) == 0


def _sizes(w1_Vr: Tensor) -> dict[str, int]:
    rank = w1_Vr.shape[1]
    return {"RANK": rank, "PADDED": max(16, triton.next_power_of_2(rank)), "ROWS": ROWS, "SLICE": SLICE}
