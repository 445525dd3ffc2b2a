"""latent_attention_kernel written in Gluon for Hopper GPUs: the same states at DeepSeek's dims, where Triton's code is slow.

Triton's compiler distributes the product of queries and keys over warps by rows.  A tile of 64 rows occupies four of eight
warps, and the other four repeat their work; larger tiles do not fit the registers.  Here each of two warpgroups takes half of
the keys, then half of the values' columns.  A block of 64 latents is loaded by TMA if it lies within one page, and by
cp.async otherwise; the next block is loaded while the current one is computed.

Latents in 8 bits (caches/fp8_latent.py) are loaded as they are into registers, two blocks ahead.  They are dequantised group by
group, 128 columns each: while a wgmma multiplies queries with one group of a block, the same group of the next block is
multiplied with its scales and written to shared memory in 16 bits.

Shapes: M = 64 rows of a tile (queries x heads), N = 64 keys of a block, C = 512 latent rank, R = 64 rotated dim, G = 4 scales
of a latent.
"""

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.attention.kernels.paged_triton import LN2, LOG2E
from specdec.ops.hopper import barrier, copy_rows, tma_load

# Two of e4m3 are exact in float16.  A product with the scale is rounded once, to bfloat16.
FOUR_VALUES = gl.constexpr("""{
    .reg .b16 a, b, c, d;
    .reg .b32 ab, cd;
    .reg .f32 x, y, z, w;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 ab, a;
    cvt.rn.f16x2.e4m3x2 cd, b;
    mov.b32 {a, b}, ab;
    mov.b32 {c, d}, cd;
    cvt.f32.f16 x, a;
    cvt.f32.f16 y, b;
    cvt.f32.f16 z, c;
    cvt.f32.f16 w, d;
    mul.f32 x, x, $3;
    mul.f32 y, y, $3;
    mul.f32 z, z, $3;
    mul.f32 w, w, $3;
    cvt.rn.bf16x2.f32 $0, y, x;
    cvt.rn.bf16x2.f32 $1, w, z;
    }""")
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # the layout of shared memory that wgmma reads


@gluon.jit
def _copy_queries(
    to, q, tile, first, queries, stride_qt, stride_qh, HEADS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):
    """Copies a tile's 64 rows (queries x heads)."""
    gqa = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    base = q + (first + gqa // HEADS).to(gl.int64) * stride_qt + (gqa % HEADS) * stride_qh
    copy_rows(to, base, gqa // HEADS < queries, COLUMNS, layout)


@gluon.jit
def _pages_of(pages, start, high, PAGE_SIZE: gl.constexpr, layout: gl.constexpr):
    """The page numbers of the 64 keys from `start` on; one number if they always share a page."""
    if PAGE_SIZE % 64 == 0:
        page_N = gl.load(pages + start // PAGE_SIZE, mask=start < high, other=0)
    else:
        key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        page_N = gl.load(pages + key_N // PAGE_SIZE, mask=key_N < high, other=0)
    return page_N


@gluon.jit
def _copy_keys(
    to, keys, page_N, start, high, STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr
):
    """Copies the 64 keys from `start` on, from pages of any size."""
    key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    base_N = keys + (page_N.to(gl.int64) * PAGE_SIZE + key_N % PAGE_SIZE) * STRIDE
    copy_rows(to, base_N, key_N < high, COLUMNS, layout)


@gluon.jit
def _load_keys_by_tma(to_c, to_r, bar, tiles_c, tiles_r, pages, start, PAGE_SIZE: gl.constexpr):
    """Issues the TMA loads of 64 keys of one page."""
    slot = gl.load(pages + start // PAGE_SIZE) * PAGE_SIZE + start % PAGE_SIZE
    mbarrier.expect(bar, 64 * 576 * 2)
    tma_load(tiles_c, [slot, 0], bar, to_c)
    tma_load(tiles_r, [slot, 0], bar, to_r)


@gluon.jit
def _start_loading(
    to_c, to_r, bar, latent, rope, tiles_c, tiles_r, pages, wide_N, narrow_N, start, high,
    LATENT_STRIDE: gl.constexpr, ROPE_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr, TMA: gl.constexpr,
    WIDE: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Starts to load a block of keys into its stage.  With TMA, all blocks but a row's last one come by TMA.

    wide_N, narrow_N: the keys' page numbers, read before: without TMA each key may lie in a page of its own.
    """
    if TMA:
        if start + 64 <= high:
            _load_keys_by_tma(to_c, to_r, bar, tiles_c, tiles_r, pages, start, PAGE_SIZE)
        else:
            last_wide_N = _pages_of(pages, start, high, PAGE_SIZE, WIDE)
            last_narrow_N = _pages_of(pages, start, high, PAGE_SIZE, NARROW)
            _copy_keys(to_c, latent, last_wide_N, start, high, LATENT_STRIDE, PAGE_SIZE, 512, WIDE)
            _copy_keys(to_r, rope, last_narrow_N, start, high, ROPE_STRIDE, PAGE_SIZE, 64, NARROW)
    else:
        _copy_keys(to_c, latent, wide_N, start, high, LATENT_STRIDE, PAGE_SIZE, 512, WIDE)
        _copy_keys(to_r, rope, narrow_N, start, high, ROPE_STRIDE, PAGE_SIZE, 64, NARROW)
    async_copy.commit_group()


@gluon.jit
def _wait_for_keys(bar, phase, by_tma):
    """Waits until a block's keys have arrived, in the way in which `_start_loading` loads them."""
    if by_tma:
        mbarrier.wait(bar, phase)
    else:
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()


@gluon.jit
def _load_quantised(
    latent, scales, page_N, start, high, STRIDE: gl.constexpr, SCALES_STRIDE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    fours: gl.constexpr,
):  # fmt: skip
    """The quantised values of the 64 keys from `start` on, [N, 32] for each group, four in an int32, and their scales [N];
    zeros from `high` on.
    """
    key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(1, fours))
    slot_N, ok_N = page_N.to(gl.int64) * PAGE_SIZE + key_N % PAGE_SIZE, key_N < high
    e = gl.arange(0, 32, layout=gl.SliceLayout(0, fours))
    ok_NE = ok_N[:, None] & (e < 32)[None, :]
    at_NE = latent.to(gl.pointer_type(gl.int32)) + (slot_N * (STRIDE // 4))[:, None] + e[None, :]
    scales_N = scales + slot_N * SCALES_STRIDE
    quantised = (
        gl.load(at_NE, mask=ok_NE, other=0), gl.load(at_NE + 32, mask=ok_NE, other=0),
        gl.load(at_NE + 64, mask=ok_NE, other=0), gl.load(at_NE + 96, mask=ok_NE, other=0),
    )  # fmt: skip
    scales = (
        gl.load(scales_N, mask=ok_N, other=0.0), gl.load(scales_N + 1, mask=ok_N, other=0.0),
        gl.load(scales_N + 2, mask=ok_N, other=0.0), gl.load(scales_N + 3, mask=ok_N, other=0.0),
    )  # fmt: skip
    return quantised, scales


@gluon.jit
def _store_dequantised(to, quantised_NE, scale_N):
    """Writes a group's quantised values, multiplied with their scales in float32 and rounded to bfloat16, to `to`, [N, 128]."""
    two_NE, more_NE = gl.inline_asm_elementwise(
        FOUR_VALUES, "=r,=r,r,r", [quantised_NE, scale_N[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    to._reinterpret(gl.int32, [64, 64], PAIRS).store(gl.join(two_NE, more_NE).reshape([64, 64]))


@gluon.jit
def absorb(s_MN, c_NC, p_s, top_M, total_M, acc_MC, A: gl.constexpr):
    """mla_triton.absorb for two warpgroups.  p_s: shared memory for the weights.  The caller waits before c_NC changes."""
    new_M = gl.maximum(top_M, gl.max(s_MN, 1))
    shift_M = gl.where(new_M == -float("inf"), 0.0, new_M)
    p_MN = gl.exp2(s_MN - shift_M[:, None])
    decay_M = gl.exp2(top_M - shift_M)
    p_s.store(p_MN.to(p_s.dtype))
    fence_async_shared()
    barrier()
    acc_MC *= gl.convert_layout(decay_M, gl.SliceLayout(1, A))[:, None]
    acc = warpgroup_mma(p_s, c_NC, acc_MC, is_async=True)
    total_M = total_M * decay_M + gl.sum(p_MN, 1)
    return new_M, total_M, warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit(
    do_not_specialize=["stride_row", "tiles", "first_state", "states"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q"],
)
def latent_hopper_kernel(
    q, latent, rope, scales, latent_tiles, rope_tiles, page_table, cache_seqlens, cu_seqlens_q, out, lse, scale,
    stride_qt, stride_qh, stride_row, tiles, first_state, states,
    LATENT_STRIDE: gl.constexpr, ROPE_STRIDE: gl.constexpr, SCALES_STRIDE: gl.constexpr, SCALED: gl.constexpr,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, CAUSAL: gl.constexpr, MIN_SPLIT_KEYS: gl.constexpr,
    TMA: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The arguments are those of latent_attention_kernel, without first keys.  TMA: only without scales."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    FOURS: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [8, 1], [1, 0])  # quantised values, four in an int32
    PLACES: gl.constexpr = FOURS if SCALED else WIDE
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    LATENTS_AHEAD: gl.constexpr = 128 if SCALED else 64
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    tile = gl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    row = gl.program_id(0) // tiles
    split, splits = gl.program_id(1), gl.num_programs(1)
    first = gl.load(cu_seqlens_q + row, cache_modifier=".cg")
    queries = gl.load(cu_seqlens_q + row + 1, cache_modifier=".cg") - first
    length = gl.load(cache_seqlens + row, cache_modifier=".cg")
    gqa_M = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    query_M, end = gqa_M // HEADS, length
    if CAUSAL:
        end = length - gl.maximum(queries - 1 - (tile * 64 + 63) // HEADS, 0)
    end = gl.where(tile * 64 < queries * HEADS, end, 0)
    per_split = gl.cdiv(gl.maximum(gl.cdiv(gl.maximum(end, 0), splits), MIN_SPLIT_KEYS), 64) * 64
    low = split * per_split
    high = gl.minimum(low + per_split, end)
    whole = high  # every query of the tile reads all keys before this one, so blocks up to here need no mask
    if CAUSAL:
        whole = gl.minimum(high, length - queries + 1)
    pages = page_table + row.to(gl.int64) * stride_row
    tma_end = high if TMA else low  # the full blocks that end at or before this key come by TMA

    q_c = gl.allocate_shared_memory(q.dtype.element_ty, [64, 512], SHARED)
    q_r = gl.allocate_shared_memory(q.dtype.element_ty, [64, 64], SHARED)
    p_s = gl.allocate_shared_memory(q.dtype.element_ty, [64, 64], SHARED)
    c_s = gl.allocate_shared_memory(q.dtype.element_ty, [2, 64, 512], SHARED)
    q_g = q_c._reinterpret(q.dtype.element_ty, [4, 64, 128], SHARED)  # the same by groups, which lie one after the other
    c_g = c_s._reinterpret(q.dtype.element_ty, [8, 64, 128], SHARED)
    r_s = gl.allocate_shared_memory(q.dtype.element_ty, [2, 64, 64], SHARED)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(2):
        mbarrier.init(bars.index(b), count=1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    state_M = ((first + query_M).to(gl.int64) * HEADS + gqa_M % HEADS) * states + first_state + split
    ok_M = query_M < queries
    if (low >= high) & (states > 1):  # an idle split: the merge does not read its output
        gl.store(lse + state_M, gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S)), mask=ok_M)
        return
    blocks = gl.maximum(gl.cdiv(high - low, 64), 1)  # at least 1: into a loop that may not run the compiler puts a wait
    wide_N = _pages_of(pages, low, low if TMA else high, PAGE_SIZE, PLACES)
    narrow_N = _pages_of(pages, low, low if TMA else high, PAGE_SIZE, NARROW)
    _copy_queries(q_c, q, tile, first, queries, stride_qt, stride_qh, HEADS, 512, WIDE)
    _copy_queries(q_r, q + 512, tile, first, queries, stride_qt, stride_qh, HEADS, 64, NARROW)
    async_copy.commit_group()
    if SCALED:
        quantised, scale_NG = _load_quantised(latent, scales, wide_N, low, high, LATENT_STRIDE, SCALES_STRIDE, PAGE_SIZE, FOURS)
        _copy_keys(r_s.index(0), rope, narrow_N, low, high, ROPE_STRIDE, PAGE_SIZE, 64, NARROW)
        async_copy.commit_group()
        for g in gl.static_range(4):
            _store_dequantised(c_g.index(g), quantised[g], scale_NG[g])
        wide_N = _pages_of(pages, low + 64, high, PAGE_SIZE, PLACES)
        quantised, scale_NG = _load_quantised(
            latent, scales, wide_N, low + 64, high, LATENT_STRIDE, SCALES_STRIDE, PAGE_SIZE, FOURS
        )
    else:
        _start_loading(
            c_s.index(0), r_s.index(0), bars.index(0), latent, rope, latent_tiles, rope_tiles, pages, wide_N, narrow_N, low,
            high, LATENT_STRIDE, ROPE_STRIDE, PAGE_SIZE, TMA, WIDE, NARROW,
        )  # fmt: skip
    if not TMA:  # page numbers are read one block ahead, so that the copies of the block can start at once
        wide_N = _pages_of(pages, low + LATENTS_AHEAD, high, PAGE_SIZE, PLACES)
        narrow_N = _pages_of(pages, low + 64, high, PAGE_SIZE, NARROW)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()

    top_M = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total_M = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S))
    acc_MC = gl.zeros([64, 512], gl.float32, layout=A)
    nothing = gl.zeros([64, 64], gl.float32, layout=S)
    scale_log2 = scale * LOG2E
    for block in range(blocks):
        start = low + block * 64
        c_NC, r_NR = c_s.index(block % 2), r_s.index(block % 2)
        to_c, to_r, bar = c_s.index((block + 1) % 2), r_s.index((block + 1) % 2), bars.index((block + 1) % 2)
        if not SCALED:
            _wait_for_keys(bars.index(block % 2), (block // 2) % 2, start + 64 <= tma_end)
        if SCALED:  # each group's wgmma runs while the next block's quantised values of the group are converted
            s = warpgroup_mma(q_r, r_NR.permute((1, 0)), nothing, use_acc=False, is_async=True)
            _copy_keys(to_r, rope, narrow_N, start + 64, high, ROPE_STRIDE, PAGE_SIZE, 64, NARROW)
            async_copy.commit_group()
            for g in gl.static_range(4):
                s = warpgroup_mma(q_g.index(g), c_g.index(block % 2 * 4 + g).permute((1, 0)), s, is_async=True)
                _store_dequantised(c_g.index((block + 1) % 2 * 4 + g), quantised[g], scale_NG[g])
            quantised, scale_NG = _load_quantised(
                latent, scales, wide_N, start + 128, high, LATENT_STRIDE, SCALES_STRIDE, PAGE_SIZE, FOURS
            )  # fmt: skip
        else:
            s = warpgroup_mma(q_c, c_NC.permute((1, 0)), nothing, use_acc=False, is_async=True)
            s = warpgroup_mma(q_r, r_NR.permute((1, 0)), s, is_async=True)
        if not SCALED and block + 1 < blocks:
            _start_loading(
                to_c, to_r, bar, latent, rope, latent_tiles, rope_tiles, pages, wide_N, narrow_N, start + 64, high,
                LATENT_STRIDE, ROPE_STRIDE, PAGE_SIZE, TMA, WIDE, NARROW,
            )  # fmt: skip
        if not TMA:
            wide_N = _pages_of(pages, start + 64 + LATENTS_AHEAD, high, PAGE_SIZE, PLACES)
            narrow_N = _pages_of(pages, start + 128, high, PAGE_SIZE, NARROW)
        s_MN = warpgroup_mma_wait(0, deps=(s,)) * scale_log2
        if start + 64 > whole:
            key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(0, S))
            last_M = high + query_M * 0
            if CAUSAL:
                last_M = gl.minimum(last_M, length - (queries - 1 - query_M))
            s_MN = gl.where(key_N[None, :] < last_M[:, None], s_MN, -float("inf"))
        top_M, total_M, acc_MC = absorb(s_MN, c_NC, p_s, top_M, total_M, acc_MC, A)
        if SCALED:
            async_copy.wait_group(0)
            fence_async_shared()
        barrier()  # all warps are done with this block, so its stage may be overwritten

    some_M = total_M > 0
    safe_M = gl.where(some_M, total_M, 1.0)
    inverse_M = gl.convert_layout(1.0 / safe_M, gl.SliceLayout(1, A))
    gl.store(lse + state_M, gl.where(some_M, (top_M + gl.log2(safe_M)) * LN2, -float("inf")), mask=ok_M)
    at_M = gl.convert_layout(state_M * 512, gl.SliceLayout(1, A))
    c = gl.arange(0, 512, layout=gl.SliceLayout(0, A))
    gl.store(
        out + at_M[:, None] + c[None, :],
        (acc_MC * inverse_M[:, None]).to(out.dtype.element_ty),
        mask=gl.convert_layout(ok_M, gl.SliceLayout(1, A))[:, None] & (c < 512)[None, :],
    )


def blocks_of(latent: Tensor, rope: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """The TMA descriptors of a block's latents and of their rotated part."""
    wide, narrow = (TensorDescriptor(x, list(x.shape), list(x.stride()), [64, x.shape[1]], TILE) for x in (latent, rope))
    return wide, narrow
