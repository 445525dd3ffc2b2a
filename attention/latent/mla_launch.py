"""Launches the latent kernels: chooses tiles and splits, and merges the states.  The `triton` attention backend uses it for
MLA.

Every paged segment of a plan leaves its splits' states in a common scratch; one more launch reads the suffix (a tree's rows of
one query) and merges all states.  A single segment that is not split takes one launch.  Nothing is read from the device.

Shapes: T queries, H heads, C latent rank, L latent width, S states of a query.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.kernels.tiles_triton import padded
from specdec.attention.kernels.triton_plan import TritonPlan
from specdec.attention.kinds import Scoring
from specdec.attention.latent.keys import LatentKeys
from specdec.attention.latent.limits import latent_splits
from specdec.attention.latent.mla_merge_triton import latent_combine_kernel, latent_merge_kernel
from specdec.attention.latent.mla_triton import latent_attention_kernel
from specdec.attention.segment import Segment
from specdec.attention.sparse.rows_launch import attend_rows, takes_rows
from specdec.attention.state import AttentionState
from specdec.ops.launch import chained, has_gluon

# Rows of at most SHORT keys are split down to SHORT_MIN_SPLIT_KEYS keys.  Measured: benchmarks/latent/README.md, "Why the tiles
# and rules are what they are".
SHORT, SHORT_MIN_SPLIT_KEYS = 4096, 64
# A program of the merge loads COMBINED states at once.  It takes 128 columns of a head where queries x heads are at most
# SPREAD, to spread over the GPU, and else 512.
COMBINED, SPREAD = 16, 512


class LatentTiles(NamedTuple):
    """What one program works on.

    block_m: rows, each a query and a head.
    block_n: keys of a step.
    warps, stages: Triton's.
    min_split_keys: the fewest keys of a split.
    hopper: True if the kernel in mla_hopper.py runs, whose tiles these then are.
    swap_ab: whether keys are the rows of the products, and queries the columns.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    min_split_keys: int
    hopper: bool = False
    swap_ab: bool = False


def attend_latent(
    q_THL: Tensor, view: LatentView, plan: TritonPlan, scoring: Scoring, programs: int, tiles: LatentTiles | None = None
) -> AttentionState:  # fmt: skip
    """The state [T, H, C] of absorbed queries over a plan's parts.

    programs: how many programs the GPU runs at once.  tiles: other ones than `latent_tiles` chooses.
    """
    assert q_THL.stride(2) == 1 and q_THL.shape[2] == view.width
    stored, scale = view.parts, scoring.latent_factor()
    assert stored.scales_NG is not None or stored.latent_NC.dtype == q_THL.dtype
    (T, H, _), C, device = q_THL.shape, view.rank, q_THL.device
    if isinstance(view, MLAView) and gpu_generation(device) == 9 and has_gluon() and takes_rows(q_THL, view, plan):
        return attend_rows(q_THL, view, plan, scale, programs)
    paged, suffix = plan.segments, plan.suffix
    assert suffix is None or suffix.rows == T, "a suffix has a row for each query"
    shapes = [_tiles_and_splits(q_THL, view, segment, programs, tiles) for segment in paged]
    states = sum(splits for _, splits in shapes)
    result = AttentionState.empty((T, H, C), q_THL.dtype, device)
    if not T:
        return result
    if states == 1 and suffix is None:
        _launch_paged(q_THL, view, paged[0], scale, result, shapes[0], 0, 1)
        return result
    partial = plan.scratch(T, H, states, C, device)
    first = 0
    for segment, shape in zip(paged, shapes):
        _launch_paged(q_THL, view, segment, scale, partial, shape, first, states)
        first += shape[1]
    if suffix is None:
        _launch_combine(partial, result)
    else:
        _launch_merge(q_THL, view, suffix, scale, partial, result, states)
    return result


def merge_suffix(q_THL: Tensor, view: LatentView, suffix: Segment, scale: float, prefix: AttentionState) -> AttentionState:
    """The state over a suffix and a prefix, whose state is given: contiguous, in any float type."""
    assert suffix.rows == q_THL.shape[0], "a suffix has a row for each query"
    assert prefix.out_THD.is_contiguous() and prefix.lse_TH.is_contiguous()
    result = AttentionState.empty(tuple(prefix.out_THD.shape), q_THL.dtype, q_THL.device)
    _launch_merge(q_THL, view, suffix, scale, prefix, result, 1)
    return result


def _launch_paged(
    q_THL: Tensor, view: LatentView, segment: Segment, scale: float, state: AttentionState,
    shape: tuple[LatentTiles, int], first: int, states: int,
) -> None:  # fmt: skip
    (_, H, L), C = q_THL.shape, view.rank
    (tiles, splits), keys = shape, LatentKeys.of(view)
    num_tiles = triton.cdiv(segment.max_seqlen_q * H, tiles.block_m)
    starts_T = segment.starts_T
    assert segment.pages.table.stride(1) == 1
    grid = (segment.rows * num_tiles, splits)
    tables = (segment.pages.table, segment.cache_seqlens, segment.cu_seqlens_q)
    numbers = (
        scale, *q_THL.stride()[:2], segment.pages.table.stride(0), num_tiles, first, states,
    )  # fmt: skip
    shared = {
        "HEADS": H, "PAGE_SIZE": segment.pages.page_size, "CAUSAL": segment.causal and segment.max_seqlen_q > 1,
        "MIN_SPLIT_KEYS": tiles.min_split_keys, "num_warps": tiles.warps, **keys.options, **chained(q_THL.device),
    }  # fmt: skip
    if tiles.hopper:
        from specdec.attention.latent.mla_hopper import blocks_of, latent_hopper_kernel

        by_tma = segment.pages.page_size % tiles.block_n == 0 and not keys.options["SCALED"]
        blocks = blocks_of(*keys.pointers[:2]) if by_tma else keys.pointers[:2]
        latent_hopper_kernel[grid](q_THL, *keys.pointers, *blocks, *tables, *state, *numbers, TMA=by_tma, **shared)
        return
    latent_attention_kernel[grid](
        q_THL, *keys.pointers, *tables, segment.cu_seqlens_q if starts_T is None else starts_T, *state, *numbers,
        RANK=C, PADDED_RANK=padded(C), ROPE=L - C, PADDED_ROPE=padded(L - C), HAS_STARTS=starts_T is not None,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.stages, SWAP_AB=tiles.swap_ab,
        num_stages=tiles.stages, **shared,
    )  # fmt: skip


def _launch_merge(
    q_THL: Tensor, view: LatentView, suffix: Segment, scale: float,
    partial: AttentionState, state: AttentionState, states: int,
) -> None:  # fmt: skip
    (T, H, L), C, keys = q_THL.shape, view.rank, LatentKeys.of(view)
    table, lens, starts_T = suffix.pages.table, suffix.cache_seqlens, suffix.starts_T
    block_h, padded_states = 16, triton.next_power_of_2(states)  # products need 16 rows
    latent_merge_kernel[(T, triton.cdiv(H, block_h))](
        q_THL, *keys.pointers, table, lens, lens if starts_T is None else starts_T, *partial, *state, scale,
        *q_THL.stride()[:2], table.stride(0), states,
        HEADS=H, RANK=C, PADDED_RANK=padded(C), ROPE=L - C, PADDED_ROPE=padded(L - C), BLOCK_H=block_h,
        BLOCK_N=16, PADDED_STATES=padded_states, UNROLL=min(4, padded_states), HAS_STARTS=starts_T is not None, num_warps=8,
        num_stages=1, **keys.options, **chained(q_THL.device),
    )  # fmt: skip


def _launch_combine(partial: AttentionState, state: AttentionState) -> None:
    """The state of queries that have no suffix, from their partial ones."""
    T, H, states, C = partial.out_THD.shape
    block_c = min(padded(C), 128 if T * H <= SPREAD else 512)
    latent_combine_kernel[(T * H, triton.cdiv(C, block_c))](
        *partial, *state, states, RANK=C, PADDED_STATES=max(triton.next_power_of_2(states), COMBINED), BLOCK_C=block_c,
        BLOCK_P=COMBINED, num_warps=4, **chained(state.out_THD.device),
    )  # fmt: skip


def _tiles_and_splits(
    q_THL: Tensor, view: LatentView, segment: Segment, programs: int, given: LatentTiles | None
) -> tuple[LatentTiles, int]:
    """The tiles for a paged segment, and the number of splits."""
    seqlen_q_packgqa = segment.max_seqlen_q * q_THL.shape[1]
    dims, local = (view.rank, q_THL.shape[2]), segment.starts_T is not None
    scaled = view.parts.scales_NG is not None
    of_gpu = gpu_generation(q_THL.device), has_gluon()
    tiles = given or latent_tiles(seqlen_q_packgqa, dims, q_THL.dtype, local, scaled, *of_gpu)
    if segment.max_keys <= SHORT:
        tiles = tiles._replace(min_split_keys=min(tiles.min_split_keys, SHORT_MIN_SPLIT_KEYS))
    num_tiles = segment.rows * triton.cdiv(seqlen_q_packgqa, tiles.block_m)
    return tiles, latent_splits(num_tiles, segment.max_keys, tiles.min_split_keys, programs)


@lru_cache
def latent_tiles(
    seqlen_q_packgqa: int, dims: tuple[int, int], dtype: torch.dtype, local: bool, scaled: bool, generation: int, gluon: bool
) -> LatentTiles:
    """The tiles for seqlen_q_packgqa queries x heads a row.

    dims: rank, and width of a latent.
    dtype: the queries'.
    local: whether queries have first keys.
    scaled: whether the cache holds quantised latents with scales.
    generation: the major number of the GPU's compute capability; 0 without a GPU.
    gluon: whether kernels for Hopper can be compiled.
    Measured at DeepSeek's dims: benchmarks/latent/README.md, "Why the tiles and rules are what they are".
    """
    wanted = max(16, triton.next_power_of_2(seqlen_q_packgqa))
    if scaled and generation in (9, 10):  # they are dequantised on the way into shared memory, which feeds only such tiles
        wanted = max(wanted, 64)
    if dtype.itemsize == 4 or dims[1] <= 128:  # float32 uses no tensor cores; latents of small models fit small tiles
        return LatentTiles(min(wanted, 16), 32, 4, 2, 64)
    large = generation in (9, 10)  # 227 KB of shared memory; other GPUs may have 99
    if wanted < 64 and generation == 9 and not scaled and dims[1] <= 576 and dims[0] >= 64:
        return LatentTiles(wanted, 64, 8, 2, 64, swap_ab=True)  # as wgmma multiplies: 64 rows at least are keys
    if wanted < 64 or not large:
        ample = large and dims[1] <= 576
        max_m = 16 if scaled and not large else 32  # quantised latents lie there besides dequantised ones
        return LatentTiles(wanted, 64, 4, 3, 256) if ample else LatentTiles(min(wanted, max_m), 32, 4, 2, 256)
    # An 8-bit latent's rotated part is bfloat16, and the Hopper kernel copies it as it is.
    hopper = generation == 9 and dims == (512, 576) and not local and (not scaled or dtype == torch.bfloat16) and gluon
    return LatentTiles(64, 64 if generation == 9 else 32, 8, 2, 256, hopper)


@cache
def gpu_generation(device: torch.device) -> int:
    """The major number of the device's compute capability; 0 without a GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
