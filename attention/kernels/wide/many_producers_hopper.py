"""The producer warps of wide_many_hopper.py: each loads slices of blocks' keys, or the values, by TMA.

One warp issues a load about every hundred cycles, in which an SM could take more than a page's panel.  So each slice of the
keys has a warp of its own, and a page's values come at once.  Loops over loads have bounds that the compiler does not
know (`some` is 1), so that they stay loops: a producer has no registers for so many addresses.

This module knows pages and mbarriers, and no softmax.

Shapes: as in wide_many_hopper.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from specdec.attention.kernels.paged_hopper import slots_of_pages
from specdec.attention.kernels.wide.wide_hopper import load_block
from specdec.ops.hopper import gdc_launch_dependents, gdc_wait, next_stage, tma_load


@gluon.jit
def _load_keys(
    k_tiles, k_smem, full, empty, slots, first_panel, k, stage, phase, some,
    SLICE: gl.constexpr, SLICES: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, PAGES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Issues the TMA loads of a slice of block k's keys, as soon as there is room."""
    KEY_PANELS: gl.constexpr = DIM // 64
    PANELS: gl.constexpr = KEY_PANELS // SLICES
    at = stage * (SLICES + 1) + SLICE
    mbarrier.wait(empty.index(at), phase, pred=k >= STAGES)
    mbarrier.expect(full.index(at), 2 * BLOCK_N * DIM // SLICES)
    load_block(
        k_tiles, k_smem, full.index(at), slots, first_panel, stage * KEY_PANELS + SLICE * PANELS, some * PANELS, PAGES, 0
    )


@gluon.jit
def _load_values(
    v_tiles, v_smem, full, empty, slots, first_panel, k, stage, phase,
    SLICES: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_N: gl.constexpr, PAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same for its values, all panels of a page at once: a page's wgmma reads no other one."""
    at = stage * (SLICES + 1) + SLICES
    mbarrier.wait(empty.index(at), phase, pred=k >= STAGES)
    mbarrier.expect(full.index(at), 2 * BLOCK_N * COLUMNS)
    for i in gl.static_range(PAGES):
        tma_load(v_tiles, [first_panel, slots[i], 0], full.index(at), v_smem.index(stage * PAGES + i))


@gluon.jit
def _old_blocks(low, high, settled, FRESH: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """(blocks, how many of them are loaded before the wait): the first ones of earlier passes, one a stage."""
    blocks = gl.cdiv(gl.maximum(high - low, 0), BLOCK_N)
    settled_blocks = 0 if FRESH == "all" else gl.maximum(settled - low, 0) // BLOCK_N
    return blocks, gl.minimum(gl.minimum(blocks, STAGES), settled_blocks)


@gluon.jit
def key_producer(
    memory, loads, low, high, settled, SLICE: gl.constexpr,
    DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, FRESH: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_KEYS: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp that loads a slice of each block's keys: while there are free stages of old blocks, after gdc_wait of others."""
    _, k_smem, _, full, empty, _ = memory
    _, k_tiles, _, pages, _, _, key_panel, _, some = loads
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    first_panel = key_panel + SLICE * (DIM // 64 // SLICES)
    blocks, old = _old_blocks(low, high, settled, FRESH, BLOCK_N, STAGES)
    stage = 0
    phase = 1
    slots = slots_of_pages(pages, low, high, PAGE_SIZE, PAGE_KEYS, PAGES)
    for k in range(0, old):
        _load_keys(
            k_tiles, k_smem, full, empty, slots, first_panel, k, stage, phase, some, SLICE, SLICES, DIM, BLOCK_N, PAGES, STAGES
        )
        slots = slots_of_pages(pages, low + (k + 1) * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        stage, phase = next_stage(stage, phase, STAGES)
    if PDL:
        gdc_wait()
    for k in range(old, blocks):
        _load_keys(
            k_tiles, k_smem, full, empty, slots, first_panel, k, stage, phase, some, SLICE, SLICES, DIM, BLOCK_N, PAGES, STAGES
        )
        slots = slots_of_pages(pages, low + (k + 1) * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def value_producer(
    memory, loads, low, high, settled,
    PADDED_GROUP: gl.constexpr, DIM: gl.constexpr, COLUMNS: gl.constexpr, PAGE_SIZE: gl.constexpr, FRESH: gl.constexpr,
    BLOCK_N: gl.constexpr, PAGE_KEYS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A warp that loads the values in the same way, and after gdc_wait the queries first."""
    q_smem, _, v_smem, full, empty, _ = memory
    q_tiles, _, v_tiles, pages, first_query, first_head, _, value_panel, some = loads
    PAGES: gl.constexpr = BLOCK_N // PAGE_KEYS
    KEY_PANELS: gl.constexpr = DIM // 64
    blocks, old = _old_blocks(low, high, settled, FRESH, BLOCK_N, STAGES)
    stage = 0
    phase = 1
    slots = slots_of_pages(pages, low, high, PAGE_SIZE, PAGE_KEYS, PAGES)
    for k in range(0, old):
        _load_values(v_tiles, v_smem, full, empty, slots, value_panel, k, stage, phase, SLICES, COLUMNS, BLOCK_N, PAGES, STAGES)
        slots = slots_of_pages(pages, low + (k + 1) * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        stage, phase = next_stage(stage, phase, STAGES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    asked = full.index((SLICES + 1) * STAGES)
    mbarrier.expect(asked, 2 * 128 * DIM, pred=blocks > 0)
    for i in range(gl.minimum(blocks, some) * 2 * KEY_PANELS):
        query = first_query + i // KEY_PANELS * (64 // PADDED_GROUP)
        tma_load(q_tiles, [query, first_head, i % KEY_PANELS * 64], asked, q_smem.index(i))
    for k in range(old, blocks):
        _load_values(v_tiles, v_smem, full, empty, slots, value_panel, k, stage, phase, SLICES, COLUMNS, BLOCK_N, PAGES, STAGES)
        slots = slots_of_pages(pages, low + (k + 1) * BLOCK_N, high, PAGE_SIZE, PAGE_KEYS, PAGES)
        stage, phase = next_stage(stage, phase, STAGES)
