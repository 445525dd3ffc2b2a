"""The `triton` backend: launches our kernels; `tiles_triton.py` decides tile sizes and how far to split a row's keys.

A plan is any number of paged segments and, last, perhaps a suffix: one query a row, slots.  One paged segment alone takes one
launch if its keys are not split; otherwise every paged segment leaves partial states in one scratch, and one launch reads the
suffix and merges all.  Knows no kernel's inside.  Reads nothing from the device: every decision rests on shapes, so a captured
graph stays right when the lengths change.

Shapes: T queries, H heads, K kv heads, G = H/K, D head dim, S splits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVView, MHAView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.kernels.paged_triton import paged_attention_kernel
from specdec.attention.kernels.rope_store_triton import launch_rope_store
from specdec.attention.kernels.suffix_triton import suffix_merge_kernel
from specdec.attention.kernels.tiles_triton import PagedTiles, chunk_for, padded, paged_tiles, programs_at_once, splits_for
from specdec.attention.kernels.triton_plan import TritonPlan
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.latent.mla_launch import attend_latent
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_states
from specdec.ops.launch import chained, has_pdl
from specdec.ops.rope import HeadPrep

PlannedView = MHAView | QuantView


class TritonBackend(Backend):
    """Split-KV paged attention, fused suffix + merge.  programs: how many the GPU runs at once (default: one an SM).

    A backend that reads paged segments by a kernel of its own overrides `partial_splits` and `paged_partial`, and calls ours
    (`super()`) for the segments it leaves to us.  Suffixes, sinks and the merge of all states stay here.
    """

    name = "triton"
    reads_no_lengths = True

    def __init__(self, programs: int | None = None) -> None:
        self.programs = programs

    def store(self, view: KVView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        assert isinstance(view, MHAView | QuantView)
        return launch_rope_store(qkv_TXD, view, slots_T, prep)

    def prepare(self, plan: AttentionPlan) -> TritonPlan:
        return TritonPlan(plan.segments, plan.suffix)

    def attend(self, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring = PLAIN) -> Tensor:
        return self._state(q_THD, view, prepared, scoring).out_THD

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        return self._state(q_THD, view, TritonPlan((segment,)), replace(scoring, sinks_H=None))

    def partial_splits(self, q_THD: Tensor, view: PlannedView, segment: Segment, scoring: Scoring) -> int:
        """How many partial states a query and head `paged_partial` will leave in the scratch for this segment.

        0: none, it returns its state instead.  Decided on the host, by shapes, dtypes and what `scoring` holds.
        """
        return self._tiles(q_THD, view, segment)[1]

    def paged_partial(
        self, q_THD: Tensor, view: PlannedView, segment: Segment, scoring: Scoring, out_THSD: Tensor, lse_THS: Tensor
    ) -> AttentionState | None:
        """Answers one paged segment, in one of two ways.

        S = partial_splits(...) > 0: writes S partial states and returns None.  lse_THS of every query of the segment (natural
        log, float32; -inf where it read no key), and out_THSD where lse is not -inf; the rest may stay as it is.  A query's
        empty states come behind its others, unless the segment has first keys.  Both are slices, dense along D only.
        out_THSD is float32, or the queries' dtype where it is the final output: then S is 1, all of it must be written, and if
        scoring.sinks_H is set they are merged here.  It is None in every other call.

        S == 0: returns a state in memory of its own.  out [T, H, D] of any float type, dense along D; lse [T, H], float32, any
        strides, natural log; 0 and -inf where no key was read.  Without sinks: they are merged by us.
        """
        tiles, splits = self._tiles(q_THD, view, segment)
        assert out_THSD.shape[2] == splits
        launch_paged(q_THD, view, segment, scoring, out_THSD, lse_THS, tiles)
        return None

    def _tiles(self, q_THD: Tensor, view: PlannedView, segment: Segment) -> tuple[PagedTiles, int]:
        """Tiles of the paged kernel, and splits."""
        (_, H, D), K = q_THD.shape, view.kv.shape[2]
        packed, programs = segment.max_seqlen_q * (H // K), self.programs or programs_at_once(q_THD.device)
        waves = segment.rows * K / programs
        tiles = paged_tiles(packed, D, q_THD.element_size(), quant_of(view), segment.causal, waves)
        num_tiles = triton.cdiv(packed, tiles.block_m)
        return tiles, splits_for(segment.rows * K * num_tiles, segment.max_keys, tiles.least, programs * tiles.an_sm)

    def _state(self, q_THD: Tensor, view: KVView, plan: TritonPlan, scoring: Scoring) -> AttentionState:
        """Every paged segment through its kernel, then suffix and merge where there is anything of either to do."""
        q_THD = _dense_rows(q_THD)
        T, H, D = q_THD.shape
        if isinstance(view, MLAView):
            return attend_latent(q_THD, view, plan, scoring, self.programs or programs_at_once(q_THD.device))
        assert isinstance(view, MHAView | QuantView)
        check_view(q_THD, view)
        state = AttentionState.empty((T, H, D), q_THD.dtype, q_THD.device)
        if not T:
            return state
        paged, suffix = plan.segments, plan.suffix
        assert suffix is None or suffix.rows == T, "a suffix has a row for each query"
        counts = [self.partial_splits(q_THD, view, segment, scoring) for segment in paged]
        if suffix is None and counts == [1]:
            self.paged_partial(q_THD, view, paged[0], scoring, state.out_THD[:, :, None], state.lse_TH[:, :, None])
            return state
        partial, within = plan.scratch(T, H, sum(counts), D, q_THD.device), replace(scoring, sinks_H=None)
        outs, lses = partial.out_THD.split(counts, 2), partial.lse_TH.split(counts, 2)
        whole: AttentionState | None = None
        for segment, out_THSD, lse_THS in zip(paged, outs, lses, strict=True):
            answer = self.paged_partial(q_THD, view, segment, within, out_THSD, lse_THS)
            if answer is not None:
                whole = answer if whole is None else merge_states(whole, answer)
        if whole is not None and suffix is None and scoring.sinks_H is None and not any(counts):
            return whole
        left_filled = len(paged) == 1 and paged[0].starts_T is None
        launch_suffix_merge(q_THD, view, suffix, scoring, partial, whole, state, left_filled)
        return state


def launch_paged(
    q_THD: Tensor, view: PlannedView, segment: Segment, scoring: Scoring, out_THSD: Tensor, lse_THS: Tensor, tiles: PagedTiles
) -> None:
    (T, H, D), K, splits = q_THD.shape, view.kv.shape[2], out_THSD.shape[2]
    num_tiles = triton.cdiv(segment.max_seqlen_q * (H // K), tiles.block_m)
    states = lse_THS.stride(1)  # of a query and head, in a row
    assert segment.page_table.stride(1) == 1 and out_THSD.stride() == (H * states * D, states * D, D, 1)
    assert lse_THS.stride(0) == H * states and (splits == 1 or lse_THS.stride(2) == 1)
    starts_T, sinks_H, quant = segment.starts_T, scoring.sinks_H, quant_of(view)
    in_memory = quant != "" and q_THD.dtype == torch.bfloat16 and tiles.block_m > 64
    assert starts_T is None or (starts_T.shape[0] >= T and starts_T.is_contiguous())
    paged_attention_kernel[(segment.rows * K * num_tiles, splits)](
        q_THD, view.kv, scales_of(view), segment.page_table, segment.cache_seqlens, segment.cu_seqlens_q,
        segment.cu_seqlens_q if starts_T is None else starts_T, lse_THS if sinks_H is None else sinks_H, out_THSD, lse_THS,
        torch.empty((T, H, D), dtype=torch.float16, device=q_THD.device) if in_memory else q_THD,
        *factors(scoring, D), *q_THD.stride()[:2], *view.kv.stride()[:3], segment.page_table.stride(0), states, num_tiles,
        KV_HEADS=K, GROUP=H // K, HEAD_DIM=D, PADDED_DIM=padded(D), PAGE_SIZE=segment.page_size,
        CAUSAL=segment.causal and segment.max_seqlen_q > 1, HAS_STARTS=starts_T is not None,
        SOFTCAP=scoring.softcap is not None, HAS_SINKS=sinks_H is not None, QUANT=quant,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, LEAST=tiles.least, STAGES=tiles.stages,
        STAGED=in_memory, ASM=has_pdl(q_THD.device),
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, **chained(q_THD.device),
    )  # fmt: skip


def launch_suffix_merge(
    q_THD: Tensor,
    view: PlannedView,
    suffix: Segment | None,
    scoring: Scoring,
    partial: AttentionState,
    whole: AttentionState | None,
    state: AttentionState,
    left_filled: bool,
) -> None:
    """partial: split states [T, H, S, D]; left_filled: empty ones come last.  whole: one more, [T, H, D], any strides."""
    (T, H, D), K, splits = q_THD.shape, view.kv.shape[2], partial.lse_TH.shape[2]
    groups = K if suffix else H  # a merge alone shares no keys: a program a head
    padded_group = triton.next_power_of_2(H // groups)
    table, lens = (suffix.page_table, suffix.cache_seqlens) if suffix else (partial.lse_TH, partial.lse_TH)
    starts_T, sinks_H = suffix.starts_T if suffix else None, scoring.sinks_H
    out, lse = whole or state
    assert out.stride(2) == 1 and table.stride(-1) == 1
    # One warp: its few numbers need no barrier, and many programs fit an SM.
    suffix_merge_kernel[(T, groups)](
        q_THD, view.kv, scales_of(view), table, lens, lens if starts_T is None else starts_T,
        lse if sinks_H is None else sinks_H, partial.out_THD, partial.lse_TH, out, lse, state.out_THD, state.lse_TH,
        *factors(scoring, D), *q_THD.stride()[:2], *view.kv.stride()[:3], table.stride(0), splits,
        *out.stride()[:2], *lse.stride(),
        KV_HEADS=groups, GROUP=H // groups, PADDED_GROUP=padded_group, HEAD_DIM=D, PADDED_DIM=padded(D),
        BLOCK_N=16, CHUNK=chunk_for(splits, padded_group * padded(D)), HAS_SUFFIX=suffix is not None,
        HAS_STARTS=starts_T is not None, SOFTCAP=scoring.softcap is not None, HAS_SINKS=sinks_H is not None,
        QUANT=quant_of(view) if suffix else "", HAS_WHOLE=whole is not None, LEFT_FILLED=left_filled,
        num_warps=1, num_stages=1, **chained(q_THD.device),
    )  # fmt: skip


def factors(scoring: Scoring, D: int) -> tuple[float, float]:
    """(scale, softcap) as the kernels take them: without a softcap, any number."""
    return scoring.factor(D), 1.0 if scoring.softcap is None else scoring.softcap


def check_view(q_THD: Tensor, view: PlannedView) -> None:
    _, H, D = q_THD.shape
    kv = view.kv
    assert kv.shape[3] == D and H % kv.shape[2] == 0 and kv.stride(3) == 1
    if isinstance(view, QuantView):
        assert scales_of(view).is_contiguous() and scales_of(view).dtype == torch.float32
    else:
        assert q_THD.dtype == kv.dtype, f"queries are {q_THD.dtype}, the cache is {kv.dtype}"


def quant_of(view: PlannedView) -> str:
    """What the kernels call its scales: "head" (fp8), "token" (int8), or "" where there are none."""
    return "" if not isinstance(view, QuantView) else "head" if view.scales_N2K is None else "token"


def scales_of(view: PlannedView) -> Tensor:
    """The scales; without any, a tensor that stands in."""
    if not isinstance(view, QuantView):
        return view.kv
    scales = view.scale_2K if view.scales_N2K is None else view.scales_N2K
    assert scales is not None
    return scales


def _dense_rows(x: Tensor) -> Tensor:
    """The kernels take any stride but the last: a slice of a fused qkv tensor comes as it is."""
    return x if x.stride(-1) == 1 else x.contiguous()
