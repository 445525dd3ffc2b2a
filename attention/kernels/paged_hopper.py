"""paged_attention_kernel written in Gluon for Hopper GPUs: 16-bit keys and values, read by TMA.

The kernel is warp-specialised: one producer warp issues TMA loads, and the consumer warps compute.  Most keys of a row were
stored in earlier passes, so the producer loads the first pages of its split before gdc_wait (specdec/ops/launch.py).  After it,
the producer loads the queries, and the pages with keys that this layer may have just stored; the builder of a segment says
which keys those are (`Segment.fresh`).

A tile of queries x heads of a group is the first operand of wgmma, 64 rows for each warpgroup, so a row's softmax needs no
other warp.  A group is padded to a power of two: TMA then brings heads of the next one, whose rows are not stored.  TMA brings
panels of 64 columns, the widest row that wgmma reads from swizzled shared memory.  There are two ways of loading and
multiplying pages:
- One TMA load brings all panels of a page's keys and values of a head, and each page has a wgmma of its own.
- Each panel has a TMA load of its own, and a block's pages lie side by side (JOINED), so that fewer and larger wgmmas do.

This module knows pages, not what the keys are, and chooses no tiles.

Shapes: T queries, H heads, K kv heads, D head dim of keys and E of values (equal), P pages; M rows of a tile (queries x heads
of a padded group), N keys of one wgmma: a page's, or a block's if JOINED.  Of pages that are larger than a block, "page" means
a part of BLOCK_N keys.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels.paged_triton import LN2, LOG2E
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment
from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait, next_stage, tma_layout, tma_load
from specdec.ops.launch import chained

PRODUCER_REGISTERS = 40  # of a thread of the producer warp
PANEL = 64  # columns of a panel: 128 bytes, the widest swizzle of shared memory


@gluon.jit
def slots_of_pages(pages, start, high, PAGE_SIZE: gl.constexpr, PAGE_KEYS: gl.constexpr, PAGES: gl.constexpr):
    """The first slots of the pages of a block.  A page past the end repeats the last page; a block past the end has page 0."""
    slots = ()  # grows while the compiler unrolls the loop; the type checker takes it for a tuple of one length, here and below
    for p in gl.static_range(PAGES):
        key = gl.minimum(start + p * PAGE_KEYS, high - 1)
        page = gl.load(pages + gl.maximum(key, 0) // PAGE_SIZE, mask=start < high, other=0, cache_modifier=".cg")
        slots = slots + (page * PAGE_SIZE + (start % PAGE_SIZE if PAGES == 1 else 0),)  # type: ignore[assignment]
    return slots


@gluon.jit
def _load_page(
    kv_tiles, kv_smem, bar, first_slot, kv_head, stage, i, pred,
    JOINED: gl.constexpr, PAGES: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """Issues the TMA loads of the keys and values of page i of a block: one load, or one for each panel."""
    if JOINED:
        for part in gl.static_range(2):
            for d in gl.static_range(PANELS):
                to = kv_smem.index(((stage * 2 + part) * PANELS + d) * PAGES + i)
                tma_load(kv_tiles, [part, kv_head * PANELS + d, first_slot, 0], bar, to, pred=pred)
    else:
        tma_load(kv_tiles, [0, kv_head * PANELS, first_slot, 0], bar, kv_smem.index(stage * PAGES + i), pred=pred)


@gluon.jit
def _load_first(
    kv_tiles, full, kv_smem, slots, low, blocks, settled, kv_head, AFTER_WAIT: gl.constexpr, STAGES: gl.constexpr,
    JOINED: gl.constexpr, PAGES: gl.constexpr, PAGE_KEYS: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """Issues the TMA loads of the first blocks' pages: those with keys from `settled` on if AFTER_WAIT, else the others."""
    for s in gl.static_range(STAGES):
        for i in gl.static_range(PAGES):
            is_fresh = low + (s * PAGES + i + 1) * PAGE_KEYS > settled
            wanted = (s < blocks) & (is_fresh == AFTER_WAIT)
            _load_page(kv_tiles, kv_smem, full.index(s), slots[s * PAGES + i], kv_head, s, i, wanted, JOINED, PAGES, PANELS)


@gluon.jit
def _logits(q_MD, kv_PND, stage, scale_log2, softcap, zeros_MN, PAGES: gl.constexpr, SOFTCAP: gl.constexpr):
    """The logits of the queries and the keys of each page of a block, times log2(e)."""
    products = ()
    for i in gl.static_range(PAGES):
        keys_DN = kv_PND.index((stage * PAGES + i) * 2).permute((1, 0))
        products = products + (warpgroup_mma(q_MD, keys_DN, zeros_MN, use_acc=False, is_async=True),)  # type: ignore[assignment]
    logits = ()
    for i in gl.static_range(PAGES):
        s_MN = warpgroup_mma_wait(PAGES - 1 - i, deps=(products[i],)) * scale_log2
        if SOFTCAP:
            s_MN = (softcap - 2 * softcap / (1 + gl.exp2(s_MN * (2 * LOG2E / softcap)))) * LOG2E
        logits = logits + (s_MN,)  # type: ignore[assignment]
    return logits


@gluon.jit
def keys_of_split(
    starts, first, queries, length, tile, split, splits,
    CAUSAL: gl.constexpr, HAS_STARTS: gl.constexpr, WINDOW_RIGHT: gl.constexpr, FRESH: gl.constexpr,
    PADDED_GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_KEYS: gl.constexpr,
    MIN_SPLIT_KEYS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Which keys of its row a program reads: (low, high, whole, begin, from_first, settled).

    It reads those from low, a page's first, to high.  Each of the tile's queries reads all keys from from_first to whole: there
    no mask is needed.  No query reads any before begin.  Keys before settled are of earlier passes.
    """
    end = length  # of the keys that any query of the tile reads
    # All the tile's queries read the keys from `from_first`, the last of their first keys, to `whole`: there no mask is needed.
    whole = length
    if CAUSAL:
        end = length - gl.maximum(queries - 1 - WINDOW_RIGHT - (tile * BLOCK_M + BLOCK_M - 1) // PADDED_GROUP, 0)
        whole = length - (queries - 1 - WINDOW_RIGHT - tile * BLOCK_M // PADDED_GROUP)
    end = gl.maximum(gl.where(tile * BLOCK_M < queries * PADDED_GROUP, end, 0), 0)
    begin = 0  # the first key that any query of the tile reads
    from_first = 0
    if HAS_STARTS:
        query_M = (tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [WARPS], [0]))) // PADDED_GROUP
        ok_M = query_M < queries
        start_M = gl.load(starts + first + query_M, mask=ok_M, other=2147483647, cache_modifier=".cg")
        begin = gl.minimum(gl.maximum(gl.min(start_M, 0), 0), end)
        from_first = gl.max(gl.where(ok_M, start_M, 0), 0)
    aligned_begin = begin // PAGE_KEYS * PAGE_KEYS  # pages are read from their first key on
    per_split = gl.cdiv(gl.maximum(gl.cdiv(end - aligned_begin, splits), MIN_SPLIT_KEYS), BLOCK_N) * BLOCK_N
    low = aligned_begin + split * per_split
    high = gl.minimum(low + per_split, end)
    whole = gl.minimum(whole, high)
    settled = 0 if FRESH == "all" else length - (queries if FRESH == "queries" else 0)  # keys before this one are old
    return low, high, whole, begin, from_first, settled


@gluon.jit(
    do_not_specialize=["stride_row", "states", "tiles"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "starts", "lse"],
)
def paged_hopper_kernel(
    q_tiles,  # tiles [BLOCK_M / PADDED_GROUP, PADDED_GROUP, 64] of [T, H, D]
    kv_tiles,  # tiles [2, PANELS, PAGE_KEYS, 64] of keys and values as [2, K * PANELS, slots, 64]
    page_table, cache_seqlens, cu_seqlens_q, starts, out, lse,  # as in paged_attention_kernel
    scale, softcap, stride_row, states, tiles,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_STARTS: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, FRESH: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MIN_SPLIT_KEYS: gl.constexpr, STAGES: gl.constexpr, JOINED: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """states: splits for which out and lse have memory.  tiles: of a row's queries and heads of a group.

    FRESH: which keys of a row this layer may just have stored: "none", those of the row's "queries", or "all".  JOINED: whether
    a block's pages are multiplied together.  PRODUCER_REGISTERS: of a thread of the producer warp.
    """
    dtype: gl.constexpr = kv_tiles.dtype
    PAGE_KEYS: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK_N else BLOCK_N
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    PANELS: gl.constexpr = DIM // 64
    tile = gl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    kv_head = (gl.program_id(0) // tiles) % KV_HEADS
    row = gl.program_id(0) // tiles // KV_HEADS
    split, splits = gl.program_id(1), gl.num_programs(1)

    first = gl.load(cu_seqlens_q + row, cache_modifier=".cg")
    queries = gl.load(cu_seqlens_q + row + 1, cache_modifier=".cg") - first
    length = gl.load(cache_seqlens + row, cache_modifier=".cg")
    low, high, whole, begin, from_first, settled = keys_of_split(
        starts, first, queries, length, tile, split, splits,
        CAUSAL, HAS_STARTS, WINDOW_RIGHT, FRESH, PADDED_GROUP, BLOCK_M, BLOCK_N, PAGE_KEYS, MIN_SPLIT_KEYS, num_warps,
    )  # fmt: skip

    q_smem = gl.allocate_shared_memory(dtype, [PANELS, BLOCK_M // PADDED_GROUP, PADDED_GROUP, 64], q_tiles.layout)
    if JOINED:
        kv_smem = gl.allocate_shared_memory(dtype, [STAGES * 2 * PANELS * PAGES, 1, 1, PAGE_KEYS, 64], kv_tiles.layout)
    else:
        kv_smem = gl.allocate_shared_memory(dtype, [STAGES * PAGES, 2, PANELS, PAGE_KEYS, 64], kv_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())  # the last mbarrier is the queries'
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(full.index(STAGES), count=1)
    barrier()
    memory = q_smem, kv_smem, full, empty
    shared = starts, out, lse, scale, softcap, states, first, queries, length, tile, kv_head, split, splits
    keys = low, high, whole, begin, from_first
    loads = q_tiles, kv_tiles, page_table + row.to(gl.int64) * stride_row, first + tile * (BLOCK_M // PADDED_GROUP), kv_head
    gl.warp_specialize(
        [
            (consumer, (
                memory, shared, keys, KV_HEADS, GROUP, PADDED_GROUP, DIM, CAUSAL, HAS_STARTS, WINDOW_RIGHT, SOFTCAP, BLOCK_M,
                BLOCK_N, BLOCK_N if JOINED else PAGE_KEYS, STAGES, PDL, num_warps,
            )),
            (producer, (
                memory, loads, low, high, settled, GROUP, DIM, PAGE_SIZE, FRESH, BLOCK_M, BLOCK_N, PAGE_KEYS, JOINED, STAGES,
                PDL,
            )),
        ],
        [1], [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def producer(
    memory, loads, low, high, settled,
    GROUP: gl.constexpr, DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, FRESH: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, PAGE_KEYS: gl.constexpr, JOINED: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp fills all stages with old pages and, after gdc_wait, with the queries and fresh pages; then stage by
    stage.
    """
    q_smem, kv_smem, full, empty = memory
    q_tiles, kv_tiles, pages, first_query, kv_head = loads
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    PANELS: gl.constexpr = DIM // 64
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_N)
    slots = ()
    for s in gl.static_range(STAGES):
        slots = slots + slots_of_pages(pages, low + s * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        mbarrier.expect(full.index(s), 4 * BLOCK_N * DIM, pred=s < blocks)
    if FRESH != "all":
        _load_first(
            kv_tiles, full, kv_smem, slots, low, blocks, settled, kv_head, False, STAGES, JOINED, PAGES, PAGE_KEYS, PANELS
        )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mbarrier.expect(full.index(STAGES), 2 * BLOCK_M * DIM, pred=blocks > 0)
    for d in gl.static_range(PANELS):
        tma_load(q_tiles, [first_query, kv_head * GROUP, d * 64], full.index(STAGES), q_smem.index(d), pred=blocks > 0)
    if low + STAGES * BLOCK_N > settled:
        _load_first(
            kv_tiles, full, kv_smem, slots, low, blocks, settled, kv_head, True, STAGES, JOINED, PAGES, PAGE_KEYS, PANELS
        )
    slots = slots_of_pages(pages, low + STAGES * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
    stage = 0
    phase = 0
    for k in range(STAGES, blocks):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 4 * BLOCK_N * DIM)
        for i in gl.static_range(PAGES):
            _load_page(kv_tiles, kv_smem, full.index(stage), slots[i], kv_head, stage, i, True, JOINED, PAGES, PANELS)
        slots = slots_of_pages(pages, low + (k + 1) * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def consumer(
    memory, shared, keys,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, DIM: gl.constexpr, CAUSAL: gl.constexpr,
    HAS_STARTS: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    MMA_KEYS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer warps.  MMA_KEYS: keys of one wgmma, a page's or a block's.

    top_M, total_M and decay_M are flash-attn's m_i, l_i and alpha: a query's largest logit so far, the sum of its weights, and
    the factor by which a larger logit makes what was summed before smaller.
    """
    q_smem, kv_smem, full, empty = memory
    starts, out, lse, scale, softcap, states, first, queries, length, tile, kv_head, split, splits = shared
    low, high, whole, begin, from_first = keys
    dtype: gl.constexpr = kv_smem.dtype
    PAGES: gl.constexpr = BLOCK_N // MMA_KEYS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, MMA_KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    gqa_M = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, S))
    query_M, head_M = gqa_M // PADDED_GROUP, gqa_M % PADDED_GROUP
    ok_M = (query_M < queries) & (head_M < GROUP)
    start_M = query_M
    if HAS_STARTS:
        start_M = gl.load(starts + first + query_M, mask=ok_M, other=2147483647, cache_modifier=".cg")
    last_M = high + query_M * 0
    if CAUSAL:
        last_M = gl.minimum(last_M, length - (queries - 1 - WINDOW_RIGHT - query_M))
    state_M = ((first + query_M).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head_M) * states + split
    e = gl.arange(0, DIM, layout=gl.SliceLayout(0, A))
    at_ME = out + gl.convert_layout(state_M, gl.SliceLayout(1, A))[:, None] * DIM + e[None, :]
    ok_ME = gl.convert_layout(ok_M, gl.SliceLayout(1, A))[:, None] & (e < DIM)[None, :]
    q_MD = q_smem._reinterpret(dtype, [BLOCK_M, DIM], SHARED)
    kv_PND = kv_smem._reinterpret(dtype, [STAGES * PAGES * 2, MMA_KEYS, DIM], SHARED)  # each page's keys, then its values
    top_M = gl.full([BLOCK_M], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total_M = gl.zeros([BLOCK_M], gl.float32, layout=gl.SliceLayout(1, S))
    acc_ME = gl.zeros([BLOCK_M, DIM], gl.float32, layout=A)
    zeros_MN = gl.zeros([BLOCK_M, MMA_KEYS], gl.float32, layout=S)
    n = gl.arange(0, MMA_KEYS, layout=gl.SliceLayout(0, S))
    scale_log2 = scale if SOFTCAP else scale * LOG2E
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_N)
    if PDL:
        gdc_wait()
    stage = 0
    phase = 0
    mbarrier.wait(full.index(STAGES), 0, pred=blocks > 0)
    for k in range(blocks):
        start = low + k * BLOCK_N
        # Loaded for every block: where a head has 64 dims and a block one page, ptxas 12.8, which Triton 3.6 bundles, gave the
        # registers of queries that stay in registers to the softmax's weights as well.
        queries_MD = q_MD.load(gl.DotOperandLayout(0, S, 2))
        mbarrier.wait(full.index(stage), phase)
        logits = _logits(queries_MD, kv_PND, stage, scale_log2, softcap, zeros_MN, PAGES, SOFTCAP)
        if (start + BLOCK_N > whole) | (start < from_first):
            visible = ()
            for i in gl.static_range(PAGES):
                visible = visible + (masked(logits[i], start + i * MMA_KEYS + n, start_M, last_M, HAS_STARTS),)  # type: ignore[assignment]
            logits = visible
        max_MN = logits[0]
        for i in gl.static_range(1, PAGES):
            max_MN = gl.maximum(max_MN, logits[i])
        new_M = gl.maximum(top_M, gl.max(max_MN, 1))
        shift_M = gl.where(new_M == -float("inf"), 0.0, new_M)  # -inf: the query has read no key yet
        decay_M = gl.exp2(top_M - shift_M)
        top_M = new_M
        if (start + BLOCK_N > high) | (start < begin):
            for i in gl.static_range(PAGES):
                _drop_values(kv_PND.index((stage * PAGES + i) * 2 + 1), begin, start + i * MMA_KEYS, high, MMA_KEYS, DIM, WARPS)
            fence_async_shared()
            barrier()
        acc_ME *= gl.convert_layout(decay_M, gl.SliceLayout(1, A))[:, None]
        sum_MN = zeros_MN
        acc = acc_ME
        for i in gl.static_range(PAGES):
            p_MN = gl.exp2(logits[i] - shift_M[:, None])
            sum_MN += p_MN
            weights = gl.convert_layout(p_MN.to(dtype), gl.DotOperandLayout(0, A, 2))
            acc = warpgroup_mma(weights, kv_PND.index((stage * PAGES + i) * 2 + 1), acc, is_async=True)
        total_M = total_M * decay_M + gl.sum(sum_MN, 1)
        acc_ME = warpgroup_mma_wait(0, deps=(acc,))
        if k + STAGES < blocks:
            barrier()  # all consumer warps have read the stage
            mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)

    some_M = total_M > 0
    safe_M = gl.where(some_M, total_M, 1.0)
    gl.store(lse + state_M, gl.where(some_M, (top_M + gl.log2(safe_M)) * LN2, -float("inf")), mask=ok_M)
    inverse_M = gl.convert_layout(1.0 / safe_M, gl.SliceLayout(1, A))
    if (low < high) | (splits == 1):  # the merge does not read the output of an idle split
        gl.store(at_ME, (acc_ME * inverse_M[:, None]).to(out.dtype.element_ty), mask=ok_ME)


@gluon.jit
def masked(s_MN, key_N, start_M, last_M, HAS_STARTS: gl.constexpr):
    """The logits, and -inf for keys before a query's first key or from its end on."""
    visible_MN = key_N[None, :] < last_M[:, None]
    if HAS_STARTS:
        visible_MN = visible_MN & (key_N[None, :] >= start_M[:, None])
    return gl.where(visible_MN, s_MN, -float("inf"))


@gluon.jit
def _drop_values(v_ND, begin, start, high, MMA_KEYS: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr):
    """Sets values that no query reads to 0: an unwritten slot may hold NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    key_N = start + gl.arange(0, MMA_KEYS, layout=gl.SliceLayout(1, layout))
    v = v_ND.load(layout)
    v_ND.store(gl.where(((key_N >= begin) & (key_N < high))[:, None], v, gl.zeros_like(v)))


def launch_paged_hopper(
    q_THD: Tensor, view: MHAView, segment: Segment, scoring: Scoring, out_THSD: Tensor, lse_THS: Tensor, tiles: PagedTiles
) -> None:
    """Launches the kernel for one segment, with as many splits as out_THSD has."""
    (T, H, D), (N, _, K, _), splits = q_THD.shape, view.kv.shape, out_THSD.shape[2]
    P = segment.pages.page_size
    G, states = H // K, lse_THS.stride(1)
    padded_group = triton.next_power_of_2(G)
    num_tiles = triton.cdiv(segment.max_seqlen_q * padded_group, tiles.block_m)
    starts_T = segment.starts_T
    rows = min(P, tiles.block_n)
    assert segment.pages.table.stride(1) == 1 and out_THSD.stride() == (H * states * D, states * D, D, 1)
    assert lse_THS.stride(0) == H * states and (splits == 1 or lse_THS.stride(2) == 1)
    assert starts_T is None or (starts_T.shape[0] >= T and starts_T.is_contiguous())
    panels = D // PANEL
    q_block = [tiles.block_m // padded_group, padded_group, PANEL]
    kv_block = [1, 1, rows, PANEL] if tiles.joined else [2, panels, rows, PANEL]
    causal = segment.causal and segment.max_seqlen_q > 1
    paged_hopper_kernel[(segment.rows * K * num_tiles, splits)](
        TensorDescriptor(q_THD, list(q_THD.shape), list(q_THD.stride()), q_block, tma_layout(3)),
        TensorDescriptor(view.kv, [2, K * panels, N, PANEL], [K * D, PANEL, view.kv.stride(0), 1], kv_block, tma_layout(4)),
        segment.pages.table, segment.cache_seqlens, segment.cu_seqlens_q,
        segment.cu_seqlens_q if starts_T is None else starts_T, out_THSD, lse_THS,
        scoring.factor(D), 1.0 if scoring.softcap is None else scoring.softcap,
        segment.pages.table.stride(0), states, num_tiles,
        KV_HEADS=K, GROUP=G, PADDED_GROUP=padded_group, DIM=D, PAGE_SIZE=P, CAUSAL=causal, HAS_STARTS=starts_T is not None,
        WINDOW_RIGHT=segment.window_right, SOFTCAP=scoring.softcap is not None, FRESH=segment.fresh, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, MIN_SPLIT_KEYS=tiles.min_split_keys, STAGES=tiles.stages, JOINED=tiles.joined,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=tiles.warps, maxnreg=tiles.registers, **chained(q_THD.device),
    )  # fmt: skip
