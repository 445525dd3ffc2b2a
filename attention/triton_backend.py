"""The `triton` backend: launches our kernels, and decides tile sizes and how far to split a row's keys over the GPU.

Plans of one segment take one launch (two if the keys are split); prefix + one-query suffix rows, the shape of draft
steps and verification trees, take two; anything else is run segment by segment and merged.  Knows no kernel's inside.
Reads nothing from the device: every decision rests on shapes, so a captured graph stays right when the lengths change.

Shapes: T queries, H heads, K kv heads, G = H/K, D head dim, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.kv_cache import MHAView as KVView
from specdec.attention.paged_triton import paged_attention_kernel
from specdec.attention.rope_store_triton import launch_rope_store
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_states
from specdec.attention.suffix_triton import suffix_merge_kernel
from specdec.ops.launch import chained
from specdec.ops.rope import HeadPrep


class Tiles(NamedTuple):
    """What one program of the paged kernel works on: packed queries x heads, keys a step; and its warps and stages.

    least: keys of a split, or merging costs more than splitting gains.  registers: the most a thread may use, so that two
    programs fit an SM; None leaves it to the compiler.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    least: int = 128
    registers: int | None = None


@dataclass(frozen=True)
class TritonPlan:
    """A plan, and the scratch memory its layers share: made by the first that comes, since only layers know heads."""

    segments: tuple[Segment, ...]
    _scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def scratch(self, T: int, H: int, S: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Partial out [T, H, S, D] and lse [T, H, S], float32."""
        if (T, H, S, D) not in self._scratch:
            self._scratch[T, H, S, D] = new_state((T, H, S, D), torch.float32, device)
        return self._scratch[T, H, S, D]


class TritonBackend(Backend):
    """Split-KV paged attention, fused suffix + merge.  programs: how many the GPU runs at once (default: one an SM)."""

    name = "triton"
    reads_no_lengths = True

    def __init__(self, programs: int | None = None) -> None:
        self.programs = programs

    def store(self, view: KVView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        return launch_rope_store(qkv_TXD, view.kv, slots_T, prep)

    def prepare(self, plan: AttentionPlan) -> TritonPlan:
        return TritonPlan(plan.segments)

    def attend(self, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring = PLAIN) -> Tensor:
        prefix, *rest = prepared.segments
        if not rest:
            return self._launch(q_THD, view, prefix, None, prepared, q_THD.dtype).out_THD
        if len(rest) == 1 and is_suffix(rest[0], q_THD.shape[0]):
            return self._launch(q_THD, view, prefix, rest[0], prepared, q_THD.dtype).out_THD
        plans = [TritonPlan((segment,)) for segment in prepared.segments]
        states = [self._launch(q_THD, view, plan.segments[0], None, plan, torch.float32) for plan in plans]
        merged = states[0]
        for state in states[1:]:
            merged = merge_states(merged, state)
        return merged.out_THD.to(q_THD.dtype)

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        return self._launch(q_THD, view, segment, None, TritonPlan((segment,)), q_THD.dtype)

    def _launch(
        self,
        q_THD: Tensor,
        view: KVView,
        prefix: Segment,
        suffix: Segment | None,
        plan: TritonPlan,
        dtype: torch.dtype,
    ) -> AttentionState:
        """prefix through the paged kernel, then suffix and merge where there is anything of either to do."""
        q_THD = _dense_rows(q_THD)
        T, H, D = q_THD.shape
        K = view.kv.shape[2]
        assert q_THD.dtype == view.kv.dtype, f"queries are {q_THD.dtype}, the cache is {view.kv.dtype}"
        assert view.kv.shape[3] == D and H % K == 0 and view.kv.stride(3) == 1
        programs, packed = self.programs or programs_at_once(q_THD.device), prefix.max_seqlen_q * (H // K)
        tiles = tiles_for(packed, D, q_THD.element_size(), prefix.causal, prefix.rows * K / programs)
        num_tiles = triton.cdiv(packed, tiles.block_m)
        splits = splits_for(prefix.rows * K * num_tiles, prefix.max_keys, tiles.least, programs)
        state = AttentionState(*new_state((T, H, D), dtype, q_THD.device))
        if not T:
            return state
        if suffix is None and splits == 1:
            launch_paged(q_THD, view.kv, prefix, state, tiles, splits)
            return state
        partial = AttentionState(*plan.scratch(T, H, splits, D, q_THD.device))
        launch_paged(q_THD, view.kv, prefix, partial, tiles, splits)
        launch_suffix_merge(q_THD, view.kv, suffix, partial, state, splits)
        return state


def launch_paged(q_THD: Tensor, kv: Tensor, segment: Segment, state: AttentionState, tiles: Tiles, splits: int) -> None:
    _, H, D = q_THD.shape
    K = kv.shape[2]
    num_tiles = triton.cdiv(segment.max_seqlen_q * (H // K), tiles.block_m)
    assert segment.page_table.stride(1) == 1
    paged_attention_kernel[(segment.rows * K * num_tiles, splits)](
        q_THD, kv, segment.page_table, segment.cache_seqlens, segment.cu_seqlens_q, state.out_THD, state.lse_TH,
        D**-0.5, *q_THD.stride()[:2], *kv.stride()[:3], segment.page_table.stride(0), num_tiles,
        KV_HEADS=K, GROUP=H // K, HEAD_DIM=D, PADDED_DIM=padded(D), PAGE_SIZE=segment.page_size,
        CAUSAL=segment.causal and segment.max_seqlen_q > 1, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        LEAST=tiles.least, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers,
        **chained(q_THD.device),
    )  # fmt: skip


def launch_suffix_merge(
    q_THD: Tensor, kv: Tensor, suffix: Segment | None, partial: AttentionState, state: AttentionState, splits: int
) -> None:
    T, H, D = q_THD.shape
    K = kv.shape[2]
    groups = K if suffix else H  # a merge alone shares no keys: a program a head
    padded_group = triton.next_power_of_2(H // groups)
    table, lens = (suffix.page_table, suffix.cache_seqlens) if suffix else (partial.lse_TH, partial.lse_TH)
    # One warp: its few numbers need no barrier, and many programs fit an SM.
    suffix_merge_kernel[(T, groups)](
        q_THD, kv, table, lens, partial.out_THD, partial.lse_TH, state.out_THD, state.lse_TH,
        D**-0.5, *q_THD.stride()[:2], *kv.stride()[:3], table.stride(0), splits,
        KV_HEADS=groups, GROUP=H // groups, PADDED_GROUP=padded_group, HEAD_DIM=D, PADDED_DIM=padded(D),
        BLOCK_N=16, CHUNK=chunk_for(splits, padded_group * padded(D)), HAS_SUFFIX=suffix is not None,
        num_warps=1, num_stages=1, **chained(q_THD.device),
    )  # fmt: skip


def is_suffix(segment: Segment, T: int) -> bool:
    """Whether row r holds just query r and lists slots: with as many rows as queries, at most one each, it must."""
    return segment.page_size == 1 and segment.max_seqlen_q == 1 and segment.rows == T


def new_state(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape[:-1], dtype=torch.float32, device=device)


def _dense_rows(x: Tensor) -> Tensor:
    """The kernels take any stride but the last: a slice of a fused qkv tensor comes as it is."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded(D: int) -> int:
    """Tiles have power-of-two sides, and a tensor-core product needs 16."""
    return max(16, triton.next_power_of_2(D))


@lru_cache
def tiles_for(packed_queries: int, D: int, itemsize: int, causal: bool, waves: float) -> Tiles:
    """Measured on an H100 with heads of 128; other dims keep a stage's bytes.  waves: of the GPU, at one tile a row and head.

    Up to 64 packed queries the keys decide: large blocks where a row is split over SMs that hold one program each, small
    ones where rows are many and SMs hold two.  A lone token has so little to merge that it is split further.  Beyond 64,
    the arithmetic decides.  Long prompts have enough tiles for two programs an SM, one of which computes while the other
    waits.  float32 has no tensor cores to fill, and spills beyond its tiles.
    """

    def keys(most: int) -> int:
        return max(16, min(most, most * 256 // (padded(D) * itemsize)))

    wanted = max(16, triton.next_power_of_2(packed_queries))
    if itemsize == 4:
        return Tiles(min(wanted, 32), keys(64), 8, 2)
    if wanted == 16:
        return Tiles(16, keys(128), 4, 3) if waves > 0.1 else Tiles(16, keys(64), 4, 3, least=64)
    if wanted == 32:
        return Tiles(32, keys(128), 4, 3) if waves < 0.8 else Tiles(32, keys(64), 4, 3)
    if wanted == 64 or D > 128:
        return Tiles(64, keys(64), 4, 4 if waves < 0.8 else 3)
    if causal and wanted > 128:
        return Tiles(128, 64, 8, 2, registers=128) if waves * wanted > 1024 else Tiles(64, 64, 4, 3)
    return Tiles(128, 64, 8, 3)


@lru_cache
def splits_for(programs_per_split: int, max_keys: int, least: int, programs: int) -> int:
    """As many splits as fill the GPU, none of fewer than `least` keys.  Of those that fill its waves about equally, the fewest.

    max_keys is the table's capacity, not the rows' length, which only the device knows: a split finds its own range there,
    so a short row in a large table merely leaves splits idle.
    """
    most = max(1, min(triton.cdiv(max_keys, least), 128))
    if programs_per_split * most <= programs:
        return most
    if programs_per_split >= 0.8 * programs:
        return 1

    def fill(splits: int) -> float:
        waves = programs_per_split * splits / programs
        return waves / -(-waves // 1)

    candidates = range(1, min(most, triton.cdiv(2 * programs, programs_per_split)) + 1)
    best = max(map(fill, candidates))
    return next(splits for splits in candidates if fill(splits) >= 0.95 * best)


def chunk_for(splits: int, group_elements: int) -> int:
    """Split states the merge reads at once: as many as fit in one warp's registers, or the one there is."""
    return 1 if splits == 1 else max(1, min(8, 4096 // group_elements))


@lru_cache
def programs_at_once(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
