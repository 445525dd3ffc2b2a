"""Candidate: many rows, persistent; two groups of four warps multiply on their own, one warp loads.  Gated or not."""
from __future__ import annotations
import torch, triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_put = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def _place(tile, of_m, of_n, TOGETHER: gl.constexpr):
    group = tile // (TOGETHER * of_n)
    members = gl.minimum(of_m - group * TOGETHER, TOGETHER)
    within = tile % (TOGETHER * of_n)
    return group * TOGETHER + within % members, within // members


@gluon.jit
def _loads(x_tiles, w_tiles, x_s, w_s, full, empty, of_m, of_n, steps, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
           BLOCK_I: gl.constexpr, PARTS: gl.constexpr, TOGETHER: gl.constexpr):
    BYTES: gl.constexpr = (128 + BLOCK_N) * BLOCK_I * 2
    slot = 0
    phase = 1
    for tile in range(gl.program_id(0), of_m * of_n, gl.num_programs(0)):
        m, n = _place(tile, of_m, of_n, TOGETHER)
        for k in range(steps):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), BYTES)
            _fetch(w_tiles, [0, n * (BLOCK_N // PARTS), k * BLOCK_I], full.index(slot), w_s.index(slot))
            _fetch(x_tiles, [m * 128, k * BLOCK_I], full.index(slot), x_s.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1


@gluon.jit
def _leave(out, y_s, y_tiles, m, n):
    tma.store_wait(0)
    _barrier()
    y_s.store(out)
    fence_async_shared()
    _barrier()
    _put(y_tiles, [m, n], y_s)


@gluon.jit
def _products(x_s, w_s, y_s, y_tiles, full, empty, of_m, of_n, steps, WHICH: gl.constexpr, STAGES: gl.constexpr,
              BLOCK_N: gl.constexpr, BLOCK_I: gl.constexpr, PARTS: gl.constexpr, TOGETHER: gl.constexpr):
    dtype: gl.constexpr = x_s.dtype
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    mine = y_s.index(WHICH)
    slot = 0
    phase = 0
    for tile in range(gl.program_id(0), of_m * of_n, gl.num_programs(0)):
        m, n = _place(tile, of_m, of_n, TOGETHER)
        acc = gl.zeros([64, BLOCK_N], gl.float32, acc_layout)
        for k in range(steps):
            mbarrier.wait(full.index(slot), phase)
            w = w_s.index(slot)._reinterpret(dtype, [BLOCK_N, BLOCK_I], flat)
            acc = warpgroup_mma(x_s.index(slot).slice(WHICH * 64, 64), w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES, slot) - 1), count=1, pred=k > 0)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES, slot) - 1), count=1)
        left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, BLOCK_N // 2]), (0, 2, 1)))
        if PARTS == 2:
            _leave((left / (1 + gl.exp(-left)) * right).to(dtype), mine, y_tiles, m * 128 + WHICH * 64, n * (BLOCK_N // 2))
        else:
            _leave(left.to(dtype), mine, y_tiles, m * 128 + WHICH * 64, n * BLOCK_N)
            _leave(right.to(dtype), mine, y_tiles, m * 128 + WHICH * 64, n * BLOCK_N + BLOCK_N // 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T"])
def many_kernel(x_tiles, w_tiles, y_tiles, T, O, I, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_I: gl.constexpr,
                PARTS: gl.constexpr, TOGETHER: gl.constexpr, LOADERS: gl.constexpr, num_warps: gl.constexpr):
    dtype: gl.constexpr = x_tiles.dtype
    x_s = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_I], x_tiles.layout)
    w_s = gl.allocate_shared_memory(dtype, [STAGES, PARTS, BLOCK_N // PARTS, BLOCK_I], w_tiles.layout)
    y_s = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_N // 2], y_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    of_m, of_n, steps = gl.cdiv(T, 128), gl.cdiv(O, BLOCK_N // PARTS), gl.cdiv(I, BLOCK_I)
    gl.warp_specialize([
        (_products, (x_s, w_s, y_s, y_tiles, full, empty, of_m, of_n, steps, 0, STAGES, BLOCK_N, BLOCK_I, PARTS, TOGETHER)),
        (_products, (x_s, w_s, y_s, y_tiles, full, empty, of_m, of_n, steps, 1, STAGES, BLOCK_N, BLOCK_I, PARTS, TOGETHER)),
        (_loads, (x_tiles, w_tiles, x_s, w_s, full, empty, of_m, of_n, steps, STAGES, BLOCK_N, BLOCK_I, PARTS, TOGETHER)),
    ], [4, LOADERS], [240, 24])


def layout(rank):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def many(x, w, gated, BN=256, BI=64, stages=4, together=8, sms=132, loaders=1):
    (T, I), rows = x.shape, w.shape[0]
    parts = 2 if gated else 1
    O = rows // parts
    y = x.new_empty(T, O)
    tiles = triton.cdiv(T, 128) * triton.cdiv(O, BN // parts)
    many_kernel[(min(sms, tiles),)](
        TensorDescriptor(x, [T, I], [x.stride(0), 1], [128, BI], layout(2)),
        TensorDescriptor(w, [parts, O, I], [O * I, I, 1], [parts, BN // parts, BI], layout(3)),
        TensorDescriptor(y, [T, O], [O, 1], [64, BN // 2], layout(2)),
        T, O, I, STAGES=stages, BLOCK_N=BN, BLOCK_I=BI, PARTS=parts, TOGETHER=together, LOADERS=loaders, num_warps=4)
    return y
