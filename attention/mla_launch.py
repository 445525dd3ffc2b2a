"""Launches the latent kernels: decides tiles and splits, and merges what they leave.  The `triton` backend's way to MLA.

Every paged segment of a plan leaves its splits' states in one scratch; one more launch reads the suffix (a tree's rows of
one query) and merges.  One segment that is not split takes one launch.  Reads nothing from the device.

Shapes: T queries, H heads, C latent rank, L latent width, S states of a query.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.attention.kinds import Scoring
from specdec.attention.mla_cache import MLAView
from specdec.attention.mla_triton import latent_attention_kernel, latent_merge_kernel
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState
from specdec.attention.tiles_triton import splits_for
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.attention.triton_backend import TritonPlan


class LatentTiles(NamedTuple):
    """What one program works on: packed queries x heads, keys a step; its warps and stages; the fewest keys of a split.

    tma: whether blocks come by the GPU's copy engine: each must lie in one page.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    least: int
    tma: bool = False


def attend_latent(q_THL: Tensor, view: MLAView, plan: TritonPlan, scoring: Scoring, programs: int) -> AttentionState:
    """The state [T, H, C] of absorbed queries over a plan's segments.  programs: how many the GPU runs at once."""
    assert scoring.scale is not None, "the dims of absorbed queries do not tell the scale"
    assert scoring.softcap is None and scoring.sinks_H is None, "no model of latent attention has softcap or sinks"
    assert q_THL.dtype == view.latent.dtype and q_THL.shape[2] == view.latent.shape[1]
    assert q_THL.stride(2) == view.latent.stride(1) == 1
    (T, H, _), C, device = q_THL.shape, view.rank, q_THL.device
    paged, suffix = _paged_and_suffix(plan.segments, T)
    shapes = [_tiles_and_splits(q_THL, segment, programs) for segment in paged]
    states = sum(splits for _, splits in shapes)
    result = _new_state((T, H, C), q_THL.dtype, device)
    if not T:
        return result
    if states == 1 and suffix is None:
        _launch_paged(q_THL, view, paged[0], scoring.scale, result, shapes[0], 0, 1)
        return result
    partial = plan.scratch(T, H, states, C, device)
    first = 0
    for segment, shape in zip(paged, shapes):
        _launch_paged(q_THL, view, segment, scoring.scale, partial, shape, first, states)
        first += shape[1]
    _launch_merge(q_THL, view, suffix, scoring.scale, partial, result, states)
    return result


def _launch_paged(
    q_THL: Tensor, view: MLAView, segment: Segment, scale: float, state: AttentionState,
    shape: tuple[LatentTiles, int], first: int, states: int,
) -> None:  # fmt: skip
    (_, H, L), C = q_THL.shape, view.rank
    tiles, splits = shape
    num_tiles = triton.cdiv(segment.max_seqlen_q * H, tiles.block_m)
    starts_T = segment.starts_T
    assert segment.page_table.stride(1) == 1
    latent_attention_kernel[(segment.rows * num_tiles, splits)](
        q_THL, view.latent, *_tiles_of(view, tiles), segment.page_table, segment.cache_seqlens, segment.cu_seqlens_q,
        segment.cu_seqlens_q if starts_T is None else starts_T, state.out_THD, state.lse_TH, scale, *q_THL.stride()[:2],
        view.latent.stride(0), segment.page_table.stride(0), num_tiles, first, states,
        HEADS=H, RANK=C, PADDED_RANK=_padded(C), ROPE=L - C, PADDED_ROPE=_padded(L - C), PAGE_SIZE=segment.page_size,
        CAUSAL=segment.causal and segment.max_seqlen_q > 1, HAS_STARTS=starts_T is not None,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, LEAST=tiles.least, STAGES=tiles.stages,
        TMA=tiles.tma, num_warps=tiles.warps,
        num_stages=tiles.stages, **chained(q_THL.device),
    )  # fmt: skip


def _tiles_of(view: MLAView, tiles: LatentTiles) -> tuple[object, object]:
    """What the GPU's copy engine reads a block of latents by."""
    if not tiles.tma:
        return view.latent, view.latent
    shape, stride = list(view.latent.shape), list(view.latent.stride())
    sizes = (view.rank, shape[1] - view.rank)
    return tuple(TensorDescriptor(view.latent, shape, stride, [tiles.block_n, size]) for size in sizes)


def _launch_merge(
    q_THL: Tensor,
    view: MLAView,
    suffix: Segment | None,
    scale: float,
    partial: AttentionState,
    state: AttentionState,
    states: int,
) -> None:
    (T, H, L), C = q_THL.shape, view.rank
    table, lens, starts_T = (suffix.page_table, suffix.cache_seqlens, suffix.starts_T) if suffix else (partial.lse_TH,) * 3
    if starts_T is None:
        starts_T = lens
    block_h = 16 if suffix else 4  # a product needs 16 rows; a merge alone is spread wider
    latent_merge_kernel[(T, triton.cdiv(H, block_h))](
        q_THL, view.latent, table, lens, starts_T, partial.out_THD, partial.lse_TH, state.out_THD, state.lse_TH, scale,
        *q_THL.stride()[:2], view.latent.stride(0), table.stride(0), states,
        HEADS=H, RANK=C, PADDED_RANK=_padded(C), ROPE=L - C, PADDED_ROPE=_padded(L - C), BLOCK_H=block_h, BLOCK_N=16,
        PADDED_STATES=triton.next_power_of_2(states), UNROLL=min(4, states), HAS_SUFFIX=suffix is not None,
        HAS_STARTS=suffix is not None and suffix.starts_T is not None, num_warps=8 if suffix else 4, num_stages=1,
        **chained(q_THL.device),
    )  # fmt: skip


def _paged_and_suffix(segments: tuple[Segment, ...], T: int) -> tuple[tuple[Segment, ...], Segment | None]:
    """A suffix is a last segment, behind others, whose row r holds just query r and lists slots."""
    last = segments[-1]
    is_suffix = len(segments) > 1 and last.page_size == 1 and last.max_seqlen_q == 1 and last.rows == T
    return (segments[:-1], last) if is_suffix else (segments, None)


def _tiles_and_splits(q_THL: Tensor, segment: Segment, programs: int) -> tuple[LatentTiles, int]:
    packed = segment.max_seqlen_q * q_THL.shape[1]
    tiles = latent_tiles(packed, q_THL.shape[2], q_THL.element_size())
    return tiles, splits_for(segment.rows * triton.cdiv(packed, tiles.block_m), segment.max_keys, tiles.least, programs)


@lru_cache
def latent_tiles(packed: int, width: int, itemsize: int) -> LatentTiles:
    """packed: queries x heads of a row."""
    wanted = max(16, triton.next_power_of_2(packed))
    if itemsize == 4 or width <= 128:  # no tensor cores to fill; small models
        return LatentTiles(min(wanted, 16), 32, 4, 2, 64)
    return LatentTiles(min(wanted, 64), 64 if wanted >= 64 else 32, 8 if wanted >= 64 else 4, 2, 128)


def _padded(size: int) -> int:
    """Tiles have power-of-two sides, and a tensor-core product needs 16."""
    return max(16, triton.next_power_of_2(size))


def _new_state(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> AttentionState:
    return AttentionState(
        torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:-1], dtype=torch.float32, device=device)
    )
