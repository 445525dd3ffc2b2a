"""Paged attention in Gluon for Hopper GPUs, over keys and values of two widths, or so wide that two warpgroups share a tile.

paged_hopper.py's kernel keeps a tile's weighted values in the registers of one warpgroup, which hold 256 columns of 64 rows.
Here values of more than 256 columns are shared by two warpgroups.  Each multiplies the queries with half of a block's keys,
puts its softmax weights into shared memory, and multiplies all weights with its half of the values' columns.  Keys and values
have stages and mbarriers of their own: a block's keys make room for later ones while its values are still to be multiplied.

Every panel of 64 columns of a page comes by a TMA load of its own, so that a block's pages lie side by side and one wgmma
reads them all.  A token's keys and values are one row, keys first; in panels a row has the same order for heads of any width.

This module knows pages, not what the keys are, and chooses no tiles.

Shapes: T queries, H heads, K kv heads, D width of a key and E of a value, both of whole panels; M rows of a tile (queries x
heads of a padded group), N keys of a block.
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

from specdec.attention.caches.layout import CachedHeads
from specdec.attention.kernels.paged_hopper import PANEL, PRODUCER_REGISTERS, keys_of_split, masked, slots_of_pages
from specdec.attention.kernels.paged_triton import LN2, LOG2E
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment
from specdec.ops.hopper import barrier, gdc_launch_dependents, gdc_wait, next_stage, tma_layout, tma_load
from specdec.ops.launch import chained


@gluon.jit
def load_block(
    kv_tiles, smem, bar, slots, first_panel, to_panel, panels, PAGES: gl.constexpr, FIRST_PAGE: gl.constexpr, pred=True
):
    """Issues the TMA loads of a block's keys, or of its values: some panels of each page from first_panel on, to those of
    shared memory from to_panel on.

    slots: of all pages of several blocks; this block's are those from FIRST_PAGE on.  The loop over panels stays a loop: the
    producer has no registers for so many addresses.
    """
    for d in range(panels):
        for i in gl.static_range(PAGES):
            to = smem.index((to_panel + d) * PAGES + i)
            tma_load(kv_tiles, [first_panel + d, slots[FIRST_PAGE + i], 0], bar, to, pred=pred)


@gluon.jit(
    do_not_specialize=["stride_row", "states", "tiles"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "starts", "lse"],
)
def wide_hopper_kernel(
    q_tiles,  # tiles [BLOCK_M / PADDED_GROUP, PADDED_GROUP, 64] of [T, H, D]
    kv_tiles,  # tiles [1, PAGE_KEYS, 64] of keys and values as [K * (KEY_PANELS + VALUE_PANELS), slots, 64]
    page_table, cache_seqlens, cu_seqlens_q, starts, out, lse,  # as in paged_attention_kernel
    scale, softcap, stride_row, states, tiles,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, HAS_STARTS: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, FRESH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MIN_SPLIT_KEYS: gl.constexpr,
    STAGES: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The arguments are those of paged_hopper_kernel, with a width of values."""
    dtype: gl.constexpr = kv_tiles.dtype
    PAGE_KEYS: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK_N else BLOCK_N
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    KEY_PANELS: gl.constexpr = DIM // 64
    VALUE_PANELS: gl.constexpr = VALUE_DIM // 64
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

    q_smem = gl.allocate_shared_memory(dtype, [KEY_PANELS, BLOCK_M // PADDED_GROUP, PADDED_GROUP, 64], q_tiles.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * KEY_PANELS * PAGES, 1, PAGE_KEYS, 64], kv_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * VALUE_PANELS * PAGES, 1, PAGE_KEYS, 64], kv_tiles.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_N, element_bitwidth=16, rank=2)
    p_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], WEIGHTS)
    # mbarriers: of each stage, keys' and values'; the last one of those that say what is there is the queries'
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(full.index(2 * STAGES), count=1)
    barrier()
    memory = q_smem, k_smem, v_smem, p_smem, full, empty
    shared = starts, out, lse, scale, softcap, states, first, queries, length, tile, kv_head, split, splits
    keys = low, high, whole, begin, from_first
    loads = q_tiles, kv_tiles, page_table + row.to(gl.int64) * stride_row, first + tile * (BLOCK_M // PADDED_GROUP), kv_head
    gl.warp_specialize(
        [
            (wide_consumer, (
                memory, shared, keys, KV_HEADS, GROUP, PADDED_GROUP, DIM, VALUE_DIM, CAUSAL, HAS_STARTS, WINDOW_RIGHT, SOFTCAP,
                BLOCK_M, BLOCK_N, STAGES, PDL, num_warps,
            )),
            (wide_producer, (
                memory, loads, low, high, settled, KV_HEADS, GROUP, DIM, VALUE_DIM, PAGE_SIZE, FRESH, BLOCK_M, BLOCK_N,
                PAGE_KEYS, STAGES, PDL,
            )),
        ],
        [1], [PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load_first(
    kv_tiles, full, k_smem, v_smem, slots, low, blocks, settled, key_panel, value_panel, AFTER_WAIT: gl.constexpr,
    STAGES: gl.constexpr, PAGES: gl.constexpr, BLOCK_N: gl.constexpr, KEY_PANELS: gl.constexpr, VALUE_PANELS: gl.constexpr,
):  # fmt: skip
    """Issues the TMA loads of the first blocks: those with keys from `settled` on if AFTER_WAIT, else the others."""
    for s in gl.static_range(STAGES):
        wanted = (s < blocks) & ((low + (s + 1) * BLOCK_N > settled) == AFTER_WAIT)
        load_block(kv_tiles, k_smem, full.index(2 * s), slots, key_panel, s * KEY_PANELS, KEY_PANELS, PAGES, s * PAGES, wanted)
        at = s * VALUE_PANELS
        load_block(kv_tiles, v_smem, full.index(2 * s + 1), slots, value_panel, at, VALUE_PANELS, PAGES, s * PAGES, wanted)


@gluon.jit
def wide_producer(
    memory, loads, low, high, settled,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    FRESH: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_KEYS: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp fills all stages with old blocks and, after gdc_wait, with the queries and blocks with fresh keys; then
    stage by stage, keys and values each as soon as there is room.
    """
    q_smem, k_smem, v_smem, _, full, empty = memory
    q_tiles, kv_tiles, pages, first_query, kv_head = loads
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    KEY_PANELS: gl.constexpr = DIM // 64
    VALUE_PANELS: gl.constexpr = VALUE_DIM // 64
    key_panel, value_panel = kv_head * KEY_PANELS, KV_HEADS * KEY_PANELS + kv_head * VALUE_PANELS
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_N)
    slots = ()
    for s in gl.static_range(STAGES):
        slots = slots + slots_of_pages(pages, low + s * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        mbarrier.expect(full.index(2 * s), 2 * BLOCK_N * DIM, pred=s < blocks)
        mbarrier.expect(full.index(2 * s + 1), 2 * BLOCK_N * VALUE_DIM, pred=s < blocks)
    if FRESH != "all":
        _load_first(
            kv_tiles, full, k_smem, v_smem, slots, low, blocks, settled, key_panel, value_panel, False,
            STAGES, PAGES, BLOCK_N, KEY_PANELS, VALUE_PANELS,
        )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mbarrier.expect(full.index(2 * STAGES), 2 * BLOCK_M * DIM, pred=blocks > 0)
    for d in gl.static_range(KEY_PANELS):
        tma_load(q_tiles, [first_query, kv_head * GROUP, d * 64], full.index(2 * STAGES), q_smem.index(d), pred=blocks > 0)
    if low + STAGES * BLOCK_N > settled:
        _load_first(
            kv_tiles, full, k_smem, v_smem, slots, low, blocks, settled, key_panel, value_panel, True,
            STAGES, PAGES, BLOCK_N, KEY_PANELS, VALUE_PANELS,
        )  # fmt: skip
    slots = slots_of_pages(pages, low + STAGES * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
    stage = 0
    phase = 0
    for k in range(STAGES, blocks):
        mbarrier.wait(empty.index(2 * stage), phase)
        mbarrier.expect(full.index(2 * stage), 2 * BLOCK_N * DIM)
        load_block(kv_tiles, k_smem, full.index(2 * stage), slots, key_panel, stage * KEY_PANELS, KEY_PANELS, PAGES, 0)
        mbarrier.wait(empty.index(2 * stage + 1), phase)
        mbarrier.expect(full.index(2 * stage + 1), 2 * BLOCK_N * VALUE_DIM)
        at = stage * VALUE_PANELS
        load_block(kv_tiles, v_smem, full.index(2 * stage + 1), slots, value_panel, at, VALUE_PANELS, PAGES, 0)
        slots = slots_of_pages(pages, low + (k + 1) * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def wide_consumer(
    memory, shared, keys,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    CAUSAL: gl.constexpr, HAS_STARTS: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumer warps: four for 64 rows, or eight, of which the second four take the other half of the columns.

    top_M and decay_M: as in paged_hopper.py.
    """
    q_smem, k_smem, v_smem, p_smem, full, empty = memory
    starts, out, lse, scale, softcap, states, first, queries, length, tile, kv_head, split, splits = shared
    low, high, whole, begin, from_first = keys
    dtype: gl.constexpr = k_smem.dtype
    KEY_PANELS: gl.constexpr = DIM // 64
    HALVES: gl.constexpr = WARPS * 16 // BLOCK_M  # warpgroups that share a tile's columns
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // HALVES, HALVES], [16, BLOCK_N // HALVES, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // HALVES, HALVES], [16, VALUE_DIM // HALVES, 16])
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
    q_PMD = q_smem._reinterpret(dtype, [KEY_PANELS, BLOCK_M, 64], SHARED)  # P: panels
    k_PND = k_smem._reinterpret(dtype, [STAGES * KEY_PANELS, BLOCK_N, 64], SHARED)
    v_SNE = v_smem._reinterpret(dtype, [STAGES, BLOCK_N, VALUE_DIM], SHARED)
    top_M = gl.full([BLOCK_M], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total_MN = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S)  # added up at the end: two warpgroups have to meet for that
    acc_ME = gl.zeros([BLOCK_M, VALUE_DIM], gl.float32, layout=A)
    zeros_MN = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S)
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
    scale_log2 = scale if SOFTCAP else scale * LOG2E
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_N)
    if PDL:
        gdc_wait()
    stage = 0
    phase = 0
    mbarrier.wait(full.index(2 * STAGES), 0, pred=blocks > 0)
    for k in range(blocks):
        start = low + k * BLOCK_N
        mbarrier.wait(full.index(2 * stage), phase)
        keys_DN = k_PND.index(stage * KEY_PANELS).permute((1, 0))
        products = warpgroup_mma(q_PMD.index(0), keys_DN, zeros_MN, use_acc=False, is_async=True)
        for d in gl.static_range(1, KEY_PANELS):
            keys_DN = k_PND.index(stage * KEY_PANELS + d).permute((1, 0))
            products = warpgroup_mma(q_PMD.index(d), keys_DN, products, is_async=True)
        s_MN = warpgroup_mma_wait(0, deps=(products,)) * scale_log2
        if SOFTCAP:
            s_MN = (softcap - 2 * softcap / (1 + gl.exp2(s_MN * (2 * LOG2E / softcap)))) * LOG2E
        if (start + BLOCK_N > whole) | (start < from_first):
            s_MN = masked(s_MN, start + n, start_M, last_M, HAS_STARTS)
        new_M = gl.maximum(top_M, gl.max(s_MN, 1))
        shift_M = gl.where(new_M == -float("inf"), 0.0, new_M)  # -inf: the query has read no key yet
        decay_M = gl.exp2(top_M - shift_M)
        top_M = new_M
        p_MN = gl.exp2(s_MN - shift_M[:, None])
        p_smem.store(p_MN.to(dtype))
        mbarrier.wait(full.index(2 * stage + 1), phase)
        if (start + BLOCK_N > high) | (start < begin):
            drop_values(v_SNE.index(stage), begin, start, high, BLOCK_N, VALUE_DIM, WARPS)
        fence_async_shared()
        barrier()  # all weights are there, and all consumer warps have read the keys
        mbarrier.arrive(empty.index(2 * stage), count=1, pred=k + STAGES < blocks)
        acc_ME *= gl.convert_layout(decay_M, gl.SliceLayout(1, A))[:, None]
        acc = warpgroup_mma(p_smem, v_SNE.index(stage), acc_ME, is_async=True)
        total_MN = total_MN * decay_M[:, None] + p_MN
        acc_ME = warpgroup_mma_wait(0, deps=(acc,))
        barrier()  # all consumer warps have read the values and the weights
        mbarrier.arrive(empty.index(2 * stage + 1), count=1, pred=k + STAGES < blocks)
        stage, phase = next_stage(stage, phase, STAGES)

    total_M = gl.sum(total_MN, 1)
    some_M = total_M > 0
    safe_M = gl.where(some_M, total_M, 1.0)
    gl.store(lse + state_M, gl.where(some_M, (top_M + gl.log2(safe_M)) * LN2, -float("inf")), mask=ok_M)
    inverse_M = gl.convert_layout(1.0 / safe_M, gl.SliceLayout(1, A))
    e = gl.arange(0, VALUE_DIM, layout=gl.SliceLayout(0, A))
    at_ME = out + gl.convert_layout(state_M, gl.SliceLayout(1, A))[:, None] * VALUE_DIM + e[None, :]
    ok_ME = gl.convert_layout(ok_M, gl.SliceLayout(1, A))[:, None] & (e < VALUE_DIM)[None, :]
    if (low < high) | (splits == 1):  # the merge does not read the output of an idle split
        gl.store(at_ME, (acc_ME * inverse_M[:, None]).to(out.dtype.element_ty), mask=ok_ME)


@gluon.jit
def drop_values(v_NE, begin, start, high, BLOCK_N: gl.constexpr, VALUE_DIM: gl.constexpr, WARPS: gl.constexpr):
    """Sets values that no query reads to 0: an unwritten slot may hold NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    key_N = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    v = v_NE.load(layout)
    v_NE.store(gl.where(((key_N >= begin) & (key_N < high))[:, None], v, gl.zeros_like(v)))


def launch_wide_hopper(
    q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring, out_THSE: Tensor, lse_THS: Tensor, tiles: PagedTiles
) -> None:
    """Launches the kernel for one segment, with as many splits as out_THSE has."""
    (T, H, D), (k, v), splits = q_THD.shape, view.heads, out_THSE.shape[2]
    (N, K, _), E, P = k.shape, v.shape[2], segment.pages.page_size
    G, states, starts_T = H // K, lse_THS.stride(1), segment.starts_T
    padded_group = triton.next_power_of_2(G)
    num_tiles = triton.cdiv(segment.max_seqlen_q * padded_group, tiles.block_m)
    assert segment.pages.table.stride(1) == 1 and out_THSE.stride() == (H * states * E, states * E, E, 1)
    assert lse_THS.stride(0) == H * states and (splits == 1 or lse_THS.stride(2) == 1)
    assert starts_T is None or (starts_T.shape[0] >= T and starts_T.is_contiguous())
    assert k.stride()[1:] == (D, 1) and v.stride()[1:] == (E, 1) and v.data_ptr() - k.data_ptr() == K * D * k.itemsize
    rows = k.as_strided((K * (D + E) // PANEL, N, PANEL), (PANEL, k.stride(0), 1))
    kv_block, q_block = [1, min(P, tiles.block_n), PANEL], [tiles.block_m // padded_group, padded_group, PANEL]
    wide_hopper_kernel[(segment.rows * K * num_tiles, splits)](
        TensorDescriptor(q_THD, list(q_THD.shape), list(q_THD.stride()), q_block, tma_layout(3)),
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), kv_block, tma_layout(3)),
        segment.pages.table, segment.cache_seqlens, segment.cu_seqlens_q,
        segment.cu_seqlens_q if starts_T is None else starts_T, out_THSE, lse_THS,
        scoring.factor(D), 1.0 if scoring.softcap is None else scoring.softcap,
        segment.pages.table.stride(0), states, num_tiles,
        KV_HEADS=K, GROUP=G, PADDED_GROUP=padded_group, DIM=D, VALUE_DIM=E, PAGE_SIZE=P,
        CAUSAL=segment.causal and segment.max_seqlen_q > 1, HAS_STARTS=starts_T is not None, WINDOW_RIGHT=segment.window_right,
        SOFTCAP=scoring.softcap is not None, FRESH=segment.fresh, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        MIN_SPLIT_KEYS=tiles.min_split_keys, STAGES=tiles.stages, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=tiles.warps, maxnreg=tiles.registers, **chained(q_THD.device),
    )  # fmt: skip
