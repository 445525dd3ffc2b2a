"""wide_hopper.py's attention for many rows: trees, long chains, and prompts.

There a tile has 64 rows: every 64 rows ask the L2 cache for the same keys and values, and two warpgroups share each product.
Here two warpgroups have 64 rows each and read what producer warps load.  None waits for the other one, so that the softmax of
one runs beside the products of the other.  A warpgroup's registers hold 256 columns of weighted values: of wider
values each program has some of the columns, and its queries meet all keys.

Keys come in slices, each with mbarriers of its own, whose memory is free as soon as all warpgroups have multiplied them.

This module knows pages, not what the keys are, and chooses no tiles.

Shapes: T queries, H heads, K kv heads, D width of a key and E of a value, both of whole panels; M rows of a warpgroup (queries
x heads of a padded group), N keys of a block, C columns of the values that a program has.
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
from specdec.attention.kernels.paged_hopper import PANEL, PRODUCER_REGISTERS, keys_of_split, masked
from specdec.attention.kernels.paged_triton import LN2, LOG2E
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kernels.wide.many_producers_hopper import key_producer, value_producer
from specdec.attention.kernels.wide.wide_hopper import drop_values
from specdec.attention.kernels.wide.wide_tiles import lies_on_pages
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment
from specdec.ops.hopper import barrier, gdc_wait, next_stage, tma_layout
from specdec.ops.launch import chained

ROWS = 64  # of a warpgroup
SLICE_PANELS = 4  # of keys, at most
CONSUMER_REGISTERS = 232  # of a thread


@gluon.jit(
    do_not_specialize=["stride_row", "states", "tiles", "some"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "starts", "lse"],
)
def wide_many_hopper_kernel(
    q_tiles,  # tiles [64 / PADDED_GROUP, PADDED_GROUP, 64] of [T, H, D]
    k_tiles,  # tiles [1, PAGE_KEYS, 64] of keys as [K * KEY_PANELS, slots, 64]
    v_tiles,  # tiles [COLUMNS / 64, PAGE_KEYS, 64] of values as [K * VALUE_PANELS, slots, 64]
    page_table, cache_seqlens, cu_seqlens_q, starts, out, lse,  # as in paged_attention_kernel
    scale, softcap, stride_row, states, tiles, some,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, HAS_STARTS: gl.constexpr, WINDOW_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr, FRESH: gl.constexpr, BLOCK_N: gl.constexpr, MIN_SPLIT_KEYS: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The arguments are those of wide_hopper_kernel.

    some: 1; see many_producers_hopper.py.  COLUMNS: of the values that a program has.
    SLICES: of a block's keys, along their columns.
    CONSUMER_REGISTERS: of a thread of the second warpgroup; the first one has what is left.
    """
    dtype: gl.constexpr = k_tiles.dtype
    BLOCK_M: gl.constexpr = 128
    PAGE_KEYS: gl.constexpr = PAGE_SIZE if PAGE_SIZE < BLOCK_N else BLOCK_N
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    KEY_PANELS: gl.constexpr = DIM // 64
    PIECES: gl.constexpr = SLICES + 1
    PARTS: gl.constexpr = VALUE_DIM // COLUMNS
    part = gl.program_id(0) % PARTS
    tile = gl.program_id(0) // PARTS % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    kv_head = (gl.program_id(0) // PARTS // tiles) % KV_HEADS
    row = gl.program_id(0) // PARTS // tiles // KV_HEADS
    split, splits = gl.program_id(1), gl.num_programs(1)

    first = gl.load(cu_seqlens_q + row, cache_modifier=".cg")
    queries = gl.load(cu_seqlens_q + row + 1, cache_modifier=".cg") - first
    length = gl.load(cache_seqlens + row, cache_modifier=".cg")
    low, high, whole, begin, from_first, settled = keys_of_split(
        starts, first, queries, length, tile, split, splits,
        CAUSAL, HAS_STARTS, WINDOW_RIGHT, FRESH, PADDED_GROUP, BLOCK_M, BLOCK_N, PAGE_KEYS, MIN_SPLIT_KEYS, num_warps,
    )  # fmt: skip

    q_smem = gl.allocate_shared_memory(dtype, [2 * KEY_PANELS, 64 // PADDED_GROUP, PADDED_GROUP, 64], q_tiles.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * KEY_PANELS * PAGES, 1, PAGE_KEYS, 64], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * PAGES, COLUMNS // 64, PAGE_KEYS, 64], v_tiles.layout)
    # mbarriers: of each stage, those of the slices of keys and then the values'; the last one of `full` is the queries'.
    # `clean`: values that no query reads are 0.
    full = gl.allocate_shared_memory(gl.int64, [PIECES * STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PIECES * STAGES, 1], mbarrier.MBarrierLayout())
    clean = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(PIECES * STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(clean.index(s), count=1)
    mbarrier.init(full.index(PIECES * STAGES), count=1)
    barrier()
    memory = q_smem, k_smem, v_smem, full, empty, clean
    shared = starts, out, lse, scale, softcap, states, first, queries, length, tile, kv_head, part, split, splits
    keys = low, high, whole, begin, from_first
    first_query = first + tile * (BLOCK_M // PADDED_GROUP)
    key_panel, value_panel = kv_head * KEY_PANELS, kv_head * (VALUE_DIM // 64) + part * (COLUMNS // 64)
    pages = page_table + row.to(gl.int64) * stride_row
    loads = q_tiles, k_tiles, v_tiles, pages, first_query, kv_head * GROUP, key_panel, value_panel, some
    if SLICES == 2:
        gl.warp_specialize(
            [
                (many_consumer, (
                    memory, shared, keys, 0, KV_HEADS, GROUP, PADDED_GROUP, DIM, VALUE_DIM, COLUMNS, CAUSAL, HAS_STARTS,
                    WINDOW_RIGHT, SOFTCAP, BLOCK_N, PAGE_KEYS, STAGES, SLICES, PDL,
                )),
                (many_consumer, (
                    memory, shared, keys, 1, KV_HEADS, GROUP, PADDED_GROUP, DIM, VALUE_DIM, COLUMNS, CAUSAL, HAS_STARTS,
                    WINDOW_RIGHT, SOFTCAP, BLOCK_N, PAGE_KEYS, STAGES, SLICES, PDL,
                )),
                (key_producer, (
                    memory, loads, low, high, settled, 0, DIM, PAGE_SIZE, FRESH, BLOCK_N, PAGE_KEYS, STAGES, SLICES, PDL,
                )),
                (key_producer, (
                    memory, loads, low, high, settled, 1, DIM, PAGE_SIZE, FRESH, BLOCK_N, PAGE_KEYS, STAGES, SLICES, PDL,
                )),
                (value_producer, (
                    memory, loads, low, high, settled, PADDED_GROUP, DIM, COLUMNS, PAGE_SIZE, FRESH, BLOCK_N, PAGE_KEYS,
                    STAGES, SLICES, PDL,
                )),
            ],
            [4, 1, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (many_consumer, (
                    memory, shared, keys, 0, KV_HEADS, GROUP, PADDED_GROUP, DIM, VALUE_DIM, COLUMNS, CAUSAL, HAS_STARTS,
                    WINDOW_RIGHT, SOFTCAP, BLOCK_N, PAGE_KEYS, STAGES, SLICES, PDL,
                )),
                (many_consumer, (
                    memory, shared, keys, 1, KV_HEADS, GROUP, PADDED_GROUP, DIM, VALUE_DIM, COLUMNS, CAUSAL, HAS_STARTS,
                    WINDOW_RIGHT, SOFTCAP, BLOCK_N, PAGE_KEYS, STAGES, SLICES, PDL,
                )),
                (key_producer, (
                    memory, loads, low, high, settled, 0, DIM, PAGE_SIZE, FRESH, BLOCK_N, PAGE_KEYS, STAGES, SLICES, PDL,
                )),
                (value_producer, (
                    memory, loads, low, high, settled, PADDED_GROUP, DIM, COLUMNS, PAGE_SIZE, FRESH, BLOCK_N, PAGE_KEYS,
                    STAGES, SLICES, PDL,
                )),
            ],
            [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _halves(x_MN, COLUMNS: gl.constexpr):
    """The first COLUMNS columns and as many others."""
    return gl.split(gl.permute(gl.reshape(x_MN, [64, 2, COLUMNS]), (0, 2, 1)))


@gluon.jit
def _pieces(x_MN, PIECES: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile in 1, 2, 4 or 8 pieces of so many columns.  It costs nothing: a thread's columns are of all pieces."""
    if PIECES == 1:
        return (x_MN,)
    elif PIECES == 2:
        return _halves(x_MN, COLUMNS)
    else:
        first, second = _halves(x_MN, PIECES // 2 * COLUMNS)
        return _pieces_of_half(first, PIECES // 2, COLUMNS) + _pieces_of_half(second, PIECES // 2, COLUMNS)


@gluon.jit
def _pieces_of_half(x_MN, PIECES: gl.constexpr, COLUMNS: gl.constexpr):
    """The same of a half of at most 4 pieces: no function calls itself."""
    if PIECES == 2:
        return _halves(x_MN, COLUMNS)
    else:
        first, second = _halves(x_MN, 2 * COLUMNS)
        return _halves(first, COLUMNS) + _halves(second, COLUMNS)


@gluon.jit
def many_consumer(
    memory, shared, keys, WARPGROUP: gl.constexpr,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    COLUMNS: gl.constexpr, CAUSAL: gl.constexpr, HAS_STARTS: gl.constexpr, WINDOW_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr, PAGE_KEYS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warpgroup's 64 rows.  top_M, total_M and decay_M: as in paged_hopper.py."""
    q_smem, k_smem, v_smem, full, empty, clean = memory
    starts, out, lse, scale, softcap, states, first, queries, length, tile, kv_head, part, split, splits = shared
    low, high, whole, begin, from_first = keys
    dtype: gl.constexpr = k_smem.dtype
    PIECES: gl.constexpr = SLICES + 1
    KEY_PANELS: gl.constexpr = DIM // 64
    PANELS: gl.constexpr = KEY_PANELS // SLICES
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    gqa_M = tile * 128 + WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    query_M, head_M = gqa_M // PADDED_GROUP, gqa_M % PADDED_GROUP
    ok_M = (query_M < queries) & (head_M < GROUP)
    start_M = query_M
    if HAS_STARTS:
        start_M = gl.load(starts + first + query_M, mask=ok_M, other=2147483647, cache_modifier=".cg")
    last_M = high + query_M * 0
    if CAUSAL:
        last_M = gl.minimum(last_M, length - (queries - 1 - WINDOW_RIGHT - query_M))
    state_M = ((first + query_M).to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + head_M) * states + split
    q_PMD = q_smem._reinterpret(dtype, [2 * KEY_PANELS, 64, 64], SHARED)  # P: panels
    k_PND = k_smem._reinterpret(dtype, [STAGES * KEY_PANELS, BLOCK_N, 64], SHARED)
    v_PNC = v_smem._reinterpret(dtype, [STAGES * PAGES, PAGE_KEYS, COLUMNS], SHARED)  # P: pages
    top_M = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total_M = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S))
    acc_MC = gl.zeros([64, COLUMNS], gl.float32, layout=A)
    zeros_MN = gl.zeros([64, BLOCK_N], gl.float32, layout=S)
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
    scale_log2 = scale if SOFTCAP else scale * LOG2E
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_N)
    if PDL:
        gdc_wait()
    stage = 0
    phase = 0
    cleaned = 0  # whether the first stage's values had to be set to 0 before
    mbarrier.wait(full.index(PIECES * STAGES), 0, pred=blocks > 0)
    for k in range(blocks):
        start = low + k * BLOCK_N
        at = stage * PIECES
        products = zeros_MN
        for p in gl.static_range(KEY_PANELS):
            if p % PANELS == 0:
                mbarrier.wait(full.index(at + p // PANELS), phase)
            keys_DN = k_PND.index(stage * KEY_PANELS + p).permute((1, 0))
            products = warpgroup_mma(q_PMD.index(WARPGROUP * KEY_PANELS + p), keys_DN, products, use_acc=p > 0, is_async=True)
        for p in gl.static_range(SLICES):
            products = warpgroup_mma_wait((SLICES - 1 - p) * PANELS, deps=(products,))
            barrier()  # the warpgroup has read the slice
            mbarrier.arrive(empty.index(at + p), count=1, pred=k + STAGES < blocks)
        s_MN = products * scale_log2
        if SOFTCAP:
            s_MN = (softcap - 2 * softcap / (1 + gl.exp2(s_MN * (2 * LOG2E / softcap)))) * LOG2E
        if (start + BLOCK_N > whole) | (start < from_first):
            s_MN = masked(s_MN, start + n, start_M, last_M, HAS_STARTS)
        new_M = gl.maximum(top_M, gl.max(s_MN, 1))
        shift_M = gl.where(new_M == -float("inf"), 0.0, new_M)  # -inf: the query has read no key yet
        decay_M = gl.exp2(top_M - shift_M)
        top_M = new_M
        p_MN = gl.exp2(s_MN - shift_M[:, None])
        total_M = total_M * decay_M + gl.sum(p_MN, 1)
        weights = _pieces(p_MN.to(dtype), PAGES, PAGE_KEYS)
        acc_MC *= gl.convert_layout(decay_M, gl.SliceLayout(1, A))[:, None]
        mbarrier.wait(full.index(at + SLICES), phase)
        if (start + BLOCK_N > high) | (start < begin):  # the first block and the last one alone
            if WARPGROUP == 0:
                for i in gl.static_range(PAGES):
                    drop_values(v_PNC.index(stage * PAGES + i), begin, start + i * PAGE_KEYS, high, PAGE_KEYS, COLUMNS, 4)
                fence_async_shared()
                barrier()
                mbarrier.arrive(clean.index(stage), count=1)
            else:
                mbarrier.wait(clean.index(stage), cleaned if stage == 0 else 0)
            if k == 0:
                cleaned += 1
        acc = acc_MC
        for i in gl.static_range(PAGES):
            weights_MN = gl.convert_layout(weights[i], gl.DotOperandLayout(0, A, 2))
            acc = warpgroup_mma(weights_MN, v_PNC.index(stage * PAGES + i), acc, is_async=True)
        acc_MC = warpgroup_mma_wait(0, deps=(acc,))
        barrier()  # the warpgroup has read the values
        mbarrier.arrive(empty.index(at + SLICES), count=1, pred=k + STAGES < blocks)
        stage, phase = next_stage(stage, phase, STAGES)

    some_M = total_M > 0
    safe_M = gl.where(some_M, total_M, 1.0)
    gl.store(lse + state_M, gl.where(some_M, (top_M + gl.log2(safe_M)) * LN2, -float("inf")), mask=ok_M & (part == 0))
    inverse_M = gl.convert_layout(1.0 / safe_M, gl.SliceLayout(1, A))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, A))
    at_MC = out + gl.convert_layout(state_M, gl.SliceLayout(1, A))[:, None] * VALUE_DIM + part * COLUMNS + c[None, :]
    ok_MC = gl.convert_layout(ok_M, gl.SliceLayout(1, A))[:, None] & (c < COLUMNS)[None, :]
    if (low < high) | (splits == 1):  # the merge does not read the output of an idle split
        gl.store(at_MC, (acc_MC * inverse_M[:, None]).to(out.dtype.element_ty), mask=ok_MC)


def launch_wide_many_hopper(
    q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring, out_THSE: Tensor, lse_THS: Tensor, tiles: PagedTiles
) -> None:
    """Launches the kernel for one segment, with as many splits as out_THSE has."""
    (T, H, D), (k, v), splits = q_THD.shape, view.heads, out_THSE.shape[2]
    (N, K, _), E, P = k.shape, v.shape[2], segment.pages.page_size
    G, states, starts_T = H // K, lse_THS.stride(1), segment.starts_T
    padded_group = triton.next_power_of_2(G)
    num_tiles = triton.cdiv(segment.max_seqlen_q * padded_group, tiles.block_m)
    assert tiles.block_m == 2 * ROWS and tiles.block_n // min(P, tiles.block_n) in (1, 2, 4, 8)
    assert lies_on_pages(tiles.block_n, P)
    assert segment.pages.table.stride(1) == 1 and out_THSE.stride() == (H * states * E, states * E, E, 1)
    assert lse_THS.stride(0) == H * states and (splits == 1 or lse_THS.stride(2) == 1)
    assert starts_T is None or (starts_T.shape[0] >= T and starts_T.is_contiguous())
    assert k.stride()[1:] == (D, 1) and v.stride()[1:] == (E, 1) and v.data_ptr() - k.data_ptr() == K * D * k.itemsize
    keys, values = (x.as_strided((K * x.shape[2] // PANEL, N, PANEL), (PANEL, x.stride(0), 1)) for x in (k, v))
    columns, keys_at_once, q_block = E // tiles.parts, min(P, tiles.block_n), [ROWS // padded_group, padded_group, PANEL]
    wide_many_hopper_kernel[(segment.rows * K * num_tiles * tiles.parts, splits)](
        TensorDescriptor(q_THD, list(q_THD.shape), list(q_THD.stride()), q_block, tma_layout(3)),
        TensorDescriptor(keys, list(keys.shape), list(keys.stride()), [1, keys_at_once, PANEL], tma_layout(3)),
        TensorDescriptor(
            values, list(values.shape), list(values.stride()), [columns // PANEL, keys_at_once, PANEL], tma_layout(3)
        ),
        segment.pages.table, segment.cache_seqlens, segment.cu_seqlens_q,
        segment.cu_seqlens_q if starts_T is None else starts_T, out_THSE, lse_THS,
        scoring.factor(D), 1.0 if scoring.softcap is None else scoring.softcap,
        segment.pages.table.stride(0), states, num_tiles, 1,
        KV_HEADS=K, GROUP=G, PADDED_GROUP=padded_group, DIM=D, VALUE_DIM=E, COLUMNS=columns, PAGE_SIZE=P,
        CAUSAL=segment.causal and segment.max_seqlen_q > 1, HAS_STARTS=starts_T is not None, WINDOW_RIGHT=segment.window_right,
        SOFTCAP=scoring.softcap is not None, FRESH=segment.fresh, BLOCK_N=tiles.block_n,
        MIN_SPLIT_KEYS=tiles.min_split_keys, STAGES=tiles.stages, SLICES=max(1, D // PANEL // SLICE_PANELS),
        CONSUMER_REGISTERS=CONSUMER_REGISTERS, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        num_warps=4, maxnreg=tiles.registers, **chained(q_THD.device),
    )  # fmt: skip
