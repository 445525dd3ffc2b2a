"""The kernel for one query a row over few keys: it norms and rotates heads, stores the token's key and value, and attends.

Such a pass waits for launches and for memory, not for arithmetic.  So this kernel takes the place of two
(rope_store_triton.py, paged_triton.py), and loads the first block of keys of each split before its wait.  Only the row's last
key is of this pass: split 0 computes it, stores it, and begins its state with it, so that no program reads what another one
stores.  A query's empty states come after its other ones.

A head's two halves are tensors of their own, because a rotation mixes them.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernel reads the page table, lengths, first keys, slots
and positions, and the keys and values of earlier passes (`Segment.fresh`).  The qkv projection in front lets this kernel start
only after its own wait, so all of them are complete.

Shapes: M rows of a tile (heads of a group, padded), N keys of a block, E half a head, R rows, H heads, K kv heads, X = H + 2K,
D head dim, S splits, P positions, W pages of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels.paged_triton import LOG2E, capped, store_lse
from specdec.attention.kernels.tables_triton import slots_on
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment
from specdec.ops.launch import chained
from specdec.ops.rope import HeadPrep


@triton.jit
def _loaded(kv, pages, key_N, high, e, stride_slot, stride_v, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Keys and values of a row's places, in halves.  From L2 (.cg): an SM's L1 may hold what stood there before."""
    ok_N = key_N < high
    page_N = tl.load(pages + key_N // PAGE_SIZE, mask=ok_N, other=0, cache_modifier=".cg")
    at_NE = kv + (slots_on(page_N, key_N, PAGE_SIZE) * stride_slot)[:, None] + e[None, :]
    ok_NE = ok_N[:, None] & (e < HALF)[None, :]  # also for values: an unwritten slot may hold NaN, and 0 * NaN is NaN
    low_NE = tl.load(at_NE, mask=ok_NE, other=0.0, cache_modifier=".cg")
    high_NE = tl.load(at_NE + HALF, mask=ok_NE, other=0.0, cache_modifier=".cg")
    v_low_NE = tl.load(at_NE + stride_v, mask=ok_NE, other=0.0, cache_modifier=".cg")
    v_high_NE = tl.load(at_NE + stride_v + HALF, mask=ok_NE, other=0.0, cache_modifier=".cg")
    return low_NE, high_NE, v_low_NE, v_high_NE


@triton.jit
def _scales(norm, at_ME, ok_ME, HALF: tl.constexpr, HAS_NORM: tl.constexpr):
    """The norm's weights of heads, in halves."""
    low_ME, high_ME = at_ME, at_ME
    if HAS_NORM:
        low_ME = tl.load(norm + at_ME, mask=ok_ME, other=0.0).to(tl.float32)
        high_ME = tl.load(norm + at_ME + HALF, mask=ok_ME, other=0.0).to(tl.float32)
    return low_ME, high_ME


@triton.jit
def _prepared(at_ME, ok_ME, scales, turns, eps, HALF: tl.constexpr, HAS_NORM: tl.constexpr, ROTATES: tl.constexpr):
    """Heads, normed and rotated as rope_store_triton.py does it, in halves of their own type.

    scales: the norm's weights, in halves.  turns: cosines and sines, in halves.
    """
    scale_low_ME, scale_high_ME = scales
    cos_low_E, cos_high_E, sin_low_E, sin_high_E = turns
    low_ME, high_ME = tl.load(at_ME, mask=ok_ME, other=0.0), tl.load(at_ME + HALF, mask=ok_ME, other=0.0)
    a_ME, b_ME = low_ME.to(tl.float32), high_ME.to(tl.float32)
    if HAS_NORM:
        rms_M = tl.rsqrt((tl.sum(a_ME * a_ME, 1) + tl.sum(b_ME * b_ME, 1)) / (2 * HALF) + eps)
        a_ME, b_ME = a_ME * rms_M[:, None] * scale_low_ME, b_ME * rms_M[:, None] * scale_high_ME
    if ROTATES:
        rotated_ME = a_ME * cos_low_E[None, :] + b_ME * sin_low_E[None, :]
        b_ME = b_ME * cos_high_E[None, :] + a_ME * sin_high_E[None, :]
        a_ME = rotated_ME
    return a_ME.to(low_ME.dtype), b_ME.to(low_ME.dtype)


@triton.jit
def _read(state, q_low_ME, q_high_ME, block, key_N, high, scale_log2, softcap, SOFTCAP: tl.constexpr):
    """The state of a softmax (top, total, sums of values in halves) after one more block of keys."""
    top_M, total_M, low_ME, high_ME = state
    k_low_NE, k_high_NE, v_low_NE, v_high_NE = block
    s_MN = tl.dot(q_high_ME, tl.trans(k_high_NE), input_precision="ieee")
    s_MN = tl.dot(q_low_ME, tl.trans(k_low_NE), s_MN, input_precision="ieee") * scale_log2
    if SOFTCAP:
        s_MN = capped(s_MN, softcap) * LOG2E
    s_MN += tl.where(key_N < high, 0.0, -float("inf"))[None, :]
    new_M = tl.maximum(top_M, tl.max(s_MN, 1))
    shift_M = tl.where(new_M == -float("inf"), 0.0, new_M)  # -inf: no key has been read so far
    p_MN, decay_M = tl.exp2(s_MN - shift_M[:, None]), tl.exp2(top_M - shift_M)
    weight_MN = p_MN.to(v_low_NE.dtype)
    low_ME = tl.dot(weight_MN, v_low_NE, low_ME * decay_M[:, None], input_precision="ieee")
    high_ME = tl.dot(weight_MN, v_high_NE, high_ME * decay_M[:, None], input_precision="ieee")
    return new_M, total_M * decay_M + tl.sum(p_MN, 1), low_ME, high_ME


@triton.jit(
    do_not_specialize=["stride_row", "states"],
    do_not_specialize_on_alignment=["slots", "positions", "page_table", "cache_seqlens", "starts", "lse"],
)
def single_query_attention_kernel(
    qkv,  # [R, X, D]: raw projections
    kv,  # [slots, 2, K, D]
    slots,  # [R] int64
    positions,  # [R] int64
    table,  # [P, 2, D]
    norm,  # [H + K, D]
    page_table,  # [R, W] int32
    cache_seqlens,  # [R] int32
    starts,  # [R] int32
    out,  # [R, H, states, D], any float type
    lse,  # [R, H, states] float32, natural log
    scale, softcap, eps, stride_t, stride_slot, stride_v, stride_kv_head, stride_row, states,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, ROTATES: tl.constexpr, HAS_STARTS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = 2 * HALF
    HEADS: tl.constexpr = KV_HEADS * GROUP
    row, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    split, splits = tl.program_id(1), tl.num_programs(1)
    m, n, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, PADDED_HALF)
    ok_E = e < HALF
    length = tl.load(cache_seqlens + row, cache_modifier=".cg")
    slot = tl.load(slots + row, cache_modifier=".cg")
    first = 0
    if HAS_STARTS:
        first = tl.maximum(tl.load(starts + row, cache_modifier=".cg"), 0)
    old = tl.maximum(length - 1, 0)  # keys of earlier passes
    begin = tl.minimum(first, old)
    per_split = tl.cdiv(tl.maximum(tl.cdiv(old - begin, splits), MIN_SPLIT_KEYS), BLOCK_N) * BLOCK_N
    low = begin + split * per_split
    high = tl.minimum(low + per_split, old)
    pages = page_table + row * stride_row
    kv += kv_head.to(tl.int64) * stride_kv_head
    block = _loaded(kv, pages, low + n, high, e, stride_slot, stride_v, HALF, PAGE_SIZE)
    turns = e, e, e, e
    if ROTATES:
        cos_sin_E = table + tl.load(positions + row, cache_modifier=".cg") * (2 * DIM) + e
        turns = (
            tl.load(cos_sin_E, mask=ok_E, other=0.0).to(tl.float32),
            tl.load(cos_sin_E + HALF, mask=ok_E, other=0.0).to(tl.float32),
            tl.load(cos_sin_E + DIM, mask=ok_E, other=0.0).to(tl.float32),
            tl.load(cos_sin_E + DIM + HALF, mask=ok_E, other=0.0).to(tl.float32),
        )
    is_own = split == 0
    head_M, key_1 = kv_head * GROUP + m, HEADS + kv_head + tl.arange(0, 1)
    at_ME, ok_ME = head_M[:, None] * DIM + e[None, :], (m < GROUP)[:, None] & ok_E[None, :]
    at_1E, ok_1E = key_1[:, None] * DIM + e[None, :], (ok_E & is_own)[None, :]
    scales, key_scales = _scales(norm, at_ME, ok_ME, HALF, HAS_NORM), _scales(norm, at_1E, ok_1E, HALF, HAS_NORM)

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    qkv += row * stride_t
    q_low_ME, q_high_ME = _prepared(qkv + at_ME, ok_ME, scales, turns, eps, HALF, HAS_NORM, ROTATES)
    k_low_1E, k_high_1E = _prepared(qkv + at_1E, ok_1E, key_scales, turns, eps, HALF, HAS_NORM, ROTATES)
    value_1E = qkv + KV_HEADS * DIM + at_1E
    v_low_1E = tl.load(value_1E, mask=ok_1E, other=0.0)
    v_high_1E = tl.load(value_1E + HALF, mask=ok_1E, other=0.0)
    to_1E = kv + slot * stride_slot + e[None, :]
    tl.store(to_1E, k_low_1E, mask=ok_1E)
    tl.store(to_1E + HALF, k_high_1E, mask=ok_1E)
    tl.store(to_1E + stride_v, v_low_1E, mask=ok_1E)
    tl.store(to_1E + stride_v + HALF, v_high_1E, mask=ok_1E)

    scale_log2 = scale if SOFTCAP else scale * LOG2E
    # The token's own key comes first: its logit is the largest so far, and its weight 1.
    own_M = tl.sum(q_low_ME.to(tl.float32) * k_low_1E.to(tl.float32), 1)
    own_M = (own_M + tl.sum(q_high_ME.to(tl.float32) * k_high_1E.to(tl.float32), 1)) * scale_log2
    if SOFTCAP:
        own_M = capped(own_M, softcap) * LOG2E
    reads_own = is_own & (first < length)
    top_M = tl.where(reads_own, own_M, -float("inf"))
    total_M = tl.where(reads_own, 1.0, 0.0) + tl.zeros([BLOCK_M], tl.float32)
    low_ME = tl.where(reads_own, v_low_1E.to(tl.float32), 0.0) + tl.zeros([BLOCK_M, PADDED_HALF], tl.float32)
    high_ME = tl.where(reads_own, v_high_1E.to(tl.float32), 0.0) + tl.zeros([BLOCK_M, PADDED_HALF], tl.float32)
    top_M, total_M, low_ME, high_ME = _read(
        (top_M, total_M, low_ME, high_ME), q_low_ME, q_high_ME, block, low + n, high, scale_log2, softcap, SOFTCAP
    )
    for start in tl.range(low + BLOCK_N, high, BLOCK_N, num_stages=STAGES):
        block = _loaded(kv, pages, start + n, high, e, stride_slot, stride_v, HALF, PAGE_SIZE)
        top_M, total_M, low_ME, high_ME = _read(
            (top_M, total_M, low_ME, high_ME), q_low_ME, q_high_ME, block, start + n, high, scale_log2, softcap, SOFTCAP
        )
    state_M = (row * HEADS + head_M) * states + split
    safe_M = store_lse(lse, state_M, top_M, total_M, m < GROUP, 0.0)
    writes = (low < high) | is_own  # the merge ignores the output of an idle split
    at_ME, ok_ME = out + state_M[:, None] * DIM + e[None, :], ok_ME & writes
    tl.store(at_ME, (low_ME / safe_M[:, None]).to(out.dtype.element_ty), mask=ok_ME)
    tl.store(at_ME + HALF, (high_ME / safe_M[:, None]).to(out.dtype.element_ty), mask=ok_ME)


def reads_own_key_last(segment: Segment) -> bool:
    """Whether each row has one query, whose own key is the row's last one and the only one of this pass."""
    return segment.max_seqlen_q == 1 and segment.fresh == "queries" and not segment.ragged and segment.window_right == 0


def launch_single_query(
    qkv_RXD: Tensor, view: MHAView, slots_R: Tensor, prep: HeadPrep, segment: Segment, scoring: Scoring, out_RHSD: Tensor,
    lse_RHS: Tensor, tiles: PagedTiles,
) -> None:  # fmt: skip
    """Launches the kernel for a segment of one query a row, with as many splits as out has."""
    (R, X, D), (k, v), K = qkv_RXD.shape, view.heads, prep.num_kv_heads
    H, splits, states = X - 2 * K, out_RHSD.shape[2], lse_RHS.stride(1)
    assert reads_own_key_last(segment) and segment.rows == R and k.shape[1:] == (K, D)
    assert qkv_RXD.stride()[1:] == (D, 1) and D % 2 == 0 and slots_R.shape == (R,)
    assert segment.pages.table.stride(1) == 1 and out_RHSD.stride() == (H * states * D, states * D, D, 1)
    assert lse_RHS.stride(0) == H * states and (splits == 1 or lse_RHS.stride(2) == 1) and qkv_RXD.dtype == k.dtype
    rotation, norm, starts_R = prep.rotation, prep.norm_HD, segment.starts_T
    assert (rotation is None or rotation.table_P2D.is_contiguous()) and (starts_R is None or starts_R.is_contiguous())
    table, positions_R = (qkv_RXD, slots_R) if rotation is None else (rotation.table_P2D, rotation.positions_T.contiguous())
    single_query_attention_kernel[(R * K, splits)](
        qkv_RXD, k, slots_R.contiguous(), positions_R, table, table if norm is None else norm, segment.pages.table,
        segment.cache_seqlens, segment.cache_seqlens if starts_R is None else starts_R, out_RHSD, lse_RHS, scoring.factor(D),
        1.0 if scoring.softcap is None else scoring.softcap, prep.eps, qkv_RXD.stride(0), k.stride(0),
        (v.data_ptr() - k.data_ptr()) // k.itemsize, k.stride(1), segment.pages.table.stride(0), states,
        KV_HEADS=K, GROUP=H // K, HALF=D // 2, PADDED_HALF=max(16, triton.next_power_of_2(D // 2)),
        PAGE_SIZE=segment.pages.page_size, HAS_NORM=norm is not None, ROTATES=rotation is not None,
        HAS_STARTS=starts_R is not None, SOFTCAP=scoring.softcap is not None, BLOCK_M=max(16, triton.next_power_of_2(H // K)),
        BLOCK_N=tiles.block_n, MIN_SPLIT_KEYS=tiles.min_split_keys, STAGES=tiles.stages,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(qkv_RXD.device),
    )  # fmt: skip
