"""Latent attention over rows of slots on Hopper GPUs, in Gluon: one query reads one row, as sparse attention's queries do.

A program takes 64 heads of a query and a part (split) of its row.  cp.async gathers the row's latents, in blocks of 64 keys,
into two stages.  Slots are read from the table one block before the copies need them, so that no copy waits for a slot.  Each
of two warpgroups takes half of a block's keys, then half of the values' columns, as in latent/mla_hopper.py.

The state of a split is kept in groups of 8 columns, [C / 8, 64 heads, 8]: so the registers of a wgmma's result go to
memory in whole sectors.  `merge_rows_kernel` in rows_merge_triton.py reads that form.

Shapes: M = 64 heads of a tile, N = 64 keys of a block, C = 512 latent rank, R = 64 rotated dim.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specdec.attention.kernels.paged_triton import LN2, LOG2E
from specdec.attention.latent.mla_hopper import absorb
from specdec.ops.hopper import barrier, copy_rows


@gluon.jit
def _slots(table, start, high, layout: gl.constexpr):
    """The slots of the 64 keys from `start` on."""
    key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    return gl.load(table + key_N, mask=key_N < high, other=0)


@gluon.jit
def _gather(to_c, to_r, latent, wide_N, narrow_N, start, high, stride, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """Starts the copies of 64 latents.  Keys from `high` on become zeros, and are not read."""
    key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    copy_rows(to_c, latent + wide_N.to(gl.int64) * stride, key_N < high, 512, WIDE)
    key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW))
    copy_rows(to_r, latent + 512 + narrow_N.to(gl.int64) * stride, key_N < high, 64, NARROW)


@gluon.jit(
    do_not_specialize=["stride_row"],
    do_not_specialize_on_alignment=["slots", "counts"],
)
def rows_hopper_kernel(
    q,  # [T, H, C + R]
    latent,  # [slots, C + R]
    slots,  # [T, I] int32
    counts,  # [T] int32
    out,  # [T, H / 64, S, C / 8, 64, 8] float32; [T, H, C] if there is one split
    lse,  # [T, H, S] float32, natural log
    scale,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_row,
    HEADS: gl.constexpr,
    MIN_SPLIT_KEYS: gl.constexpr,
    SPLIT: gl.constexpr,
    PDL: gl.constexpr,
):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    KEPT: gl.constexpr = 128  # columns of the queries that stay in registers
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    TILES: gl.constexpr = HEADS // 64
    tile = gl.program_id(0) % TILES  # neighbouring programs read the same keys, one of them from L2
    token = (gl.program_id(0) // TILES).to(gl.int64)
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    length = gl.load(counts + token, cache_modifier=".cg")
    per_split = gl.cdiv(gl.maximum(gl.cdiv(length, splits), MIN_SPLIT_KEYS), MIN_SPLIT_KEYS) * MIN_SPLIT_KEYS
    low = split * per_split
    high = gl.minimum(low + per_split, length)
    table = slots + token * stride_row
    q_c = gl.allocate_shared_memory(q.dtype.element_ty, [64, 512], SHARED)
    q_r = gl.allocate_shared_memory(q.dtype.element_ty, [64, 64], SHARED)
    p_s = gl.allocate_shared_memory(q.dtype.element_ty, [64, 64], SHARED)
    c_s = gl.allocate_shared_memory(q.dtype.element_ty, [2, 64, 512], SHARED)
    r_s = gl.allocate_shared_memory(q.dtype.element_ty, [2, 64, 64], SHARED)
    m = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    state_M = (token * HEADS + tile * 64 + m) * splits + split
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SPLIT:
        if low >= high:  # an idle split: the merge does not read its state
            return
    wide_N, narrow_N = _slots(table, low, high, WIDE), _slots(table, low, high, NARROW)
    wide2_N, narrow2_N = _slots(table, low + 64, high, WIDE), _slots(table, low + 64, high, NARROW)
    blocks = gl.maximum(gl.cdiv(high - low, 64), 1)  # at least 1: into a loop that may not run the compiler puts a wait
    q += token * stride_qt + tile * 64 * stride_qh
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    copy_rows(q_c, q + head * stride_qh, head < 64, 512, WIDE)
    head = gl.arange(0, 64, layout=gl.SliceLayout(1, NARROW))
    copy_rows(q_r, q + 512 + head * stride_qh, head < 64, 64, NARROW)
    _gather(c_s.index(0), r_s.index(0), latent, wide_N, narrow_N, low, high, stride_slot, WIDE, NARROW)
    async_copy.commit_group()
    if blocks > 1:
        _gather(c_s.index(1), r_s.index(1), latent, wide2_N, narrow2_N, low + 64, high, stride_slot, WIDE, NARROW)
    async_copy.commit_group()
    wide_N, narrow_N = _slots(table, low + 128, high, WIDE), _slots(table, low + 128, high, NARROW)
    async_copy.wait_group(1)
    fence_async_shared()
    barrier()
    Q: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    kept_MK = q_c.slice(512 - KEPT, KEPT, dim=1).load(Q)

    top_M = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total_M = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S))
    acc_MC = gl.zeros([64, 512], gl.float32, layout=A)
    nothing = gl.zeros([64, 64], gl.float32, layout=S)
    scale_log2 = scale * LOG2E
    for block in range(blocks):
        start = low + block * 64
        c_NC, r_NR = c_s.index(block % 2), r_s.index(block % 2)
        async_copy.wait_group(1)
        fence_async_shared()
        barrier()
        s = warpgroup_mma(q_r, r_NR.permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(kept_MK, c_NC.slice(512 - KEPT, KEPT, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_c.slice(0, 256, dim=1), c_NC.slice(0, 256, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_c.slice(256, 128, dim=1), c_NC.slice(256, 128, dim=1).permute((1, 0)), s, is_async=True)
        s_MN = warpgroup_mma_wait(0, deps=(s,)) * scale_log2
        if start + 64 > high:
            key_N = start + gl.arange(0, 64, layout=gl.SliceLayout(0, S))
            s_MN = gl.where((key_N < high)[None, :], s_MN, -float("inf"))
        top_M, total_M, acc_MC = absorb(s_MN, c_NC, p_s, top_M, total_M, acc_MC, A)
        barrier()  # all warps are done with this block, so its stage may be overwritten
        # The copies of the next block may still be in flight: two blocks are, so that no copy waits for another's end.
        if block + 2 < blocks:
            _gather(c_NC, r_NR, latent, wide_N, narrow_N, start + 128, high, stride_slot, WIDE, NARROW)
            wide_N, narrow_N = _slots(table, start + 192, high, WIDE), _slots(table, start + 192, high, NARROW)
        async_copy.commit_group()

    some_M = total_M > 0
    safe_M = gl.where(some_M, total_M, 1.0)
    gl.store(lse + state_M, gl.where(some_M, (top_M + gl.log2(safe_M)) * LN2, -float("inf")))
    acc_MC = acc_MC / gl.convert_layout(safe_M, gl.SliceLayout(1, A))[:, None]
    c = gl.arange(0, 512, layout=gl.SliceLayout(0, A))
    h = gl.arange(0, 64, layout=gl.SliceLayout(1, A))
    if SPLIT:
        out += ((token * TILES + tile) * splits + split) * 64 * 512
        gl.store(out + h[:, None] * 8 + (c // 8 * 512 + c % 8)[None, :], acc_MC)
    else:
        out += (token * HEADS + tile * 64) * 512
        gl.store(out + h[:, None] * 512 + c[None, :], acc_MC.to(out.dtype.element_ty))
