"""What kernels written in Gluon for Hopper GPUs have in common, under NVIDIA's names.

TMA, the GPU's copy engine, loads and stores tiles that a descriptor names; an mbarrier says when they have arrived.  `wgmma`,
the tensor cores' instruction for a warpgroup (four warps), reads them from shared memory in the layout that `tma_layout` gives.
A pipeline has stages: pieces of shared memory that producer warps fill by TMA and consumer warps read, each with mbarriers.
`gdc_wait` and `gdc_launch_dependents` are those of Triton's kernels (specdec/ops/launch.py).

This module knows no kernel.

Shapes: R rows that are copied.
"""

from __future__ import annotations

from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# Gluon renamed these functions between Triton 3.6 and 3.9.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def gdc_wait():
    """Waits until the kernel in front is complete and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def gdc_launch_dependents():
    """Lets the next kernel start."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_rows(to, base_R, ok_R, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Copies rows of COLUMNS values that start at base_R.  Rows that are not ok become zeros: what lies there may be NaN."""
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    copy_to_shared(to, base_R[:, None] + c[None, :], mask=ok_R[:, None] & (c < COLUMNS)[None, :])


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """(the stage after this one, the phase of its mbarriers, which changes each time all stages have been used)."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@cache
def tma_layout(rank: int, columns: int = 64) -> gl.NVMMASharedLayout:
    """How tiles of 16 bits lie in shared memory: rows of at most 128 bytes, swizzled so that 8 of them are read at once."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=rank)
