"""The `triton` attention backend: it launches specdec's kernels.  tiles_triton.py decides tile sizes and splits.

A plan has one or more paged segments and perhaps a suffix.  One paged segment alone takes a single launch if its keys are not
split.  Otherwise every paged segment leaves partial states in a common scratch, and one more launch reads the suffix and merges
all states.  This module knows nothing of the kernels' inner workings.  It reads nothing from the device: every decision depends
on shapes, so a captured graph stays right when lengths change.

Shapes: T queries, H heads, K kv heads, G = H/K, D key dim, E value dim, S splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.int8_keys import Int8KeysView
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.layout import CachedHeads, HeadsView, KVView
from specdec.attention.caches.split_cache import QuantSplitView, SplitView
from specdec.attention.kernels.hopper_tiles import hopper_tiles, is_measured
from specdec.attention.kernels.paged_triton import paged_attention_kernel
from specdec.attention.kernels.rope_store_triton import StoredView, launch_rope, launch_rope_store, launch_rows_store
from specdec.attention.kernels.single_query_triton import launch_single_query, reads_own_key_last
from specdec.attention.kernels.suffix_triton import suffix_merge_kernel
from specdec.attention.kernels.tiles_triton import (
    MergeTiles,
    PagedTiles,
    merge_tiles,
    padded,
    paged_tiles,
    programs_at_once,
    single_query_tiles,
    splits_for,
)
from specdec.attention.kernels.triton_plan import TritonPlan
from specdec.attention.kernels.wide.wide_tiles import WIDE, reads_widths, wide_hopper_tiles, wide_merge_tiles, wide_tiles
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.latent.mla_launch import attend_latent, merge_suffix
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_states, with_sinks
from specdec.ops.launch import chained, has_pdl, shared_memory
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.rope import PLAIN_VALUES, HeadPrep


class TritonBackend(Backend):
    """Split-KV paged attention, and a kernel that fuses suffix and merge.

    programs: how many programs the GPU is taken to run at once; None: one for each SM.
    hopper: whether the kernels for Hopper are taken wherever they can be; None: on GPUs on which they were measured.
    numerics: the policy that is asked about the store.  How keys are read belongs to the backend: attention/invariant/ has the
        other way.

    A backend that reads paged segments by a kernel of its own overrides `partial_splits` and `paged_partial`, and calls
    `super()` for the segments that it leaves to this class.  Suffixes and the merge of all states stay here.
    """

    name = "triton"
    reads_no_lengths = True

    def __init__(self, programs: int | None = None, numerics: Numerics = FAST, hopper: bool | None = None) -> None:
        self.programs, self.numerics, self.hopper = programs, numerics, hopper

    def store(self, view: HeadsView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        assert isinstance(view, StoredView)
        return launch_rope_store(qkv_TXD, view, slots_T, prep, self.numerics)

    def store_rows(self, view: SplitView | QuantSplitView, rows_TC: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        assert isinstance(view, SplitView), "the table of capabilities refuses such caches"
        return launch_rows_store(rows_TC, view, slots_T, prep, self.numerics)

    def store_and_attend(
        self, view: HeadsView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep, prepared: TritonPlan, scoring: Scoring = PLAIN
    ) -> AttentionState | None:
        (T, X, D), K, paged = qkv_TXD.shape, prep.num_kv_heads, prepared.segments
        if not T or prepared.suffix is not None or len(paged) != 1 or not isinstance(view, MHAView) or qkv_TXD.stride(2) != 1:
            return None
        if prep.values != PLAIN_VALUES:
            return None
        (segment,), q_THD, device = paged, qkv_TXD[:, : X - 2 * K], qkv_TXD.device
        measured = is_measured(device) if self.hopper is None else self.hopper
        if not (measured and reads_own_key_last(segment)) or scoring.slopes_H is not None:
            return None
        programs = self.programs or programs_at_once(device)
        tiles = single_query_tiles((X - 2 * K) // K, D, qkv_TXD.itemsize, T * K / programs, segment.max_keys)
        if tiles is None or not self.partial_splits(q_THD, view, segment, scoring):  # a library reads the segment
            return None
        splits = splits_for(T * K, segment.max_keys, tiles.min_split_keys, programs)
        state = AttentionState.empty(q_THD.shape, q_THD.dtype, device)
        partial = prepared.scratch(T, X - 2 * K, splits, D, device)
        launch_single_query(qkv_TXD, view, slots_T, prep, segment, scoring, *partial, tiles)
        launch_suffix_merge(q_THD, view, None, scoring, partial, None, state, True, scoring.sinks_H)
        return state

    def rotate(self, q_TQD: Tensor, prep: HeadPrep) -> Tensor:
        return launch_rope(q_TQD, prep, self.numerics)

    def prepare(self, plan: AttentionPlan) -> TritonPlan:
        return TritonPlan(plan.segments, plan.suffix)

    def attend(self, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring = PLAIN) -> AttentionState:
        if isinstance(view, LatentView):
            q_THD = _dense_rows(q_THD)
            return attend_latent(q_THD, view, prepared, scoring, self.programs or programs_at_once(q_THD.device))
        return self._attend_heads(q_THD, view, prepared, scoring, None)

    def attend_after(
        self, prefix: AttentionState, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring = PLAIN
    ) -> AttentionState:
        suffix = prepared.suffix
        if prepared.segments or suffix is None:
            return super().attend_after(prefix, q_THD, view, prepared, scoring)
        if isinstance(view, LatentView):
            return merge_suffix(_dense_rows(q_THD), view, suffix, scoring.latent_factor(), prefix)
        return self._suffix_after(prefix, q_THD, view, prepared, scoring, None)

    def attend_with_sinks(
        self, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring = PLAIN, prefix: AttentionState | None = None
    ) -> AttentionState:
        if isinstance(view, LatentView):
            return super().attend_with_sinks(q_THD, view, prepared, scoring, prefix)
        if prefix is None:
            return self._attend_heads(q_THD, view, prepared, scoring, scoring.sinks_H)
        if prepared.segments or prepared.suffix is None:
            return super().attend_with_sinks(q_THD, view, prepared, scoring, prefix)
        return self._suffix_after(prefix, q_THD, view, prepared, scoring, scoring.sinks_H)

    def _attend_heads(
        self, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring, sinks_H: Tensor | None
    ) -> AttentionState:
        """The state of a plan: one kernel for each paged segment, then suffix and merge if there is any.

        sinks_H: sinks to be added; the merge adds them where one is launched.
        """
        assert isinstance(view, CachedHeads)
        q_THD = _dense_rows(q_THD)
        check_view(q_THD, view)
        (T, H, _), E = q_THD.shape, view.heads[1].shape[2]
        state = AttentionState.empty((T, H, E), q_THD.dtype, q_THD.device)
        if not T:
            return state
        paged, suffix = prepared.segments, prepared.suffix
        assert suffix is None or suffix.rows == T, "a suffix has a row for each query"
        counts = [self.partial_splits(q_THD, view, segment, scoring) for segment in paged]
        if suffix is None and counts == [1]:
            whole_THSD, whole_THS = state.out_THD[:, :, None], state.lse_TH[:, :, None]
            self.paged_partial(q_THD, view, paged[0], scoring, whole_THSD, whole_THS, prepared.schedules)
            return with_sinks(state, sinks_H)
        partial = prepared.scratch(T, H, sum(counts), E, q_THD.device)
        outs, lses = partial.out_THD.split(counts, 2), partial.lse_TH.split(counts, 2)
        whole: AttentionState | None = None
        for segment, out_THSD, lse_THS in zip(paged, outs, lses, strict=True):
            answer = self.paged_partial(q_THD, view, segment, scoring, out_THSD, lse_THS, prepared.schedules)
            if answer is not None:
                whole = answer if whole is None else merge_states(whole, answer)
        if whole is not None and suffix is None and not any(counts):
            return with_sinks(whole, sinks_H)
        left_filled = len(paged) == 1 and paged[0].starts_T is None
        launch_suffix_merge(q_THD, view, suffix, scoring, partial, whole, state, left_filled, sinks_H)
        return state

    def _suffix_after(
        self, prefix: AttentionState, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring,
        sinks_H: Tensor | None,
    ) -> AttentionState:  # fmt: skip
        """The state of a suffix merged with a prefix's, and with sinks if there are any."""
        assert isinstance(view, CachedHeads)
        q_THD = _dense_rows(q_THD)
        check_view(q_THD, view)
        (T, H, _), E = q_THD.shape, view.heads[1].shape[2]
        state, none = AttentionState.empty((T, H, E), q_THD.dtype, q_THD.device), prepared.scratch(T, H, 0, E, q_THD.device)
        launch_suffix_merge(q_THD, view, prepared.suffix, scoring, none, prefix, state, True, sinks_H)
        return state

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        return self.attend(q_THD, view, TritonPlan((segment,)), scoring)

    def partial_splits(self, q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring) -> int:
        """How many partial states for each query and head `paged_partial` will leave in the scratch for this segment.

        0 means none: `paged_partial` returns its state instead.  The answer depends on shapes, dtypes and what `scoring` holds,
        all of which the host knows.
        """
        return self._tiles(q_THD, view, segment, scoring)[1]

    def paged_partial(
        self, q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring, out_THSD: Tensor, lse_THS: Tensor,
        schedules: dict[Any, Any],
    ) -> AttentionState | None:  # fmt: skip
        """Answers one paged segment, in one of two ways, depending on S = partial_splits(...).

        If S > 0, it writes S partial states to out_THSD and lse_THS and returns None.
        - It writes lse (natural log, float32) for every query of the segment, -inf where a split read no key, and out where lse
          is not -inf.  The rest of out may stay unwritten.
        - A query's empty states come after its other states, unless the segment has first keys.
        - Both tensors are slices of something larger; only their last dim, the values' width, is contiguous.
        - out_THSD is float32, or has the queries' dtype if it is the final output.  In that case S is 1, and all of out must
          be written.

        If S == 0, it returns a state in memory of its own: out [T, H, E] of any float type, contiguous along E; lse [T, H],
        float32, natural log, any strides; 0 and -inf where no key was read.

        schedules: the prepared plan's (TritonPlan), for what layers may share.
        """
        tiles, splits = self._tiles(q_THD, view, segment, scoring)
        assert out_THSD.shape[2] == splits
        if tiles.hopper and reads_widths(view) and tiles.block_m > 64:
            from specdec.attention.kernels.wide.wide_many_hopper import launch_wide_many_hopper

            launch_wide_many_hopper(q_THD, view, segment, scoring, out_THSD, lse_THS, tiles)
        elif tiles.hopper and reads_widths(view):
            from specdec.attention.kernels.wide.wide_hopper import launch_wide_hopper

            launch_wide_hopper(q_THD, view, segment, scoring, out_THSD, lse_THS, tiles)
        elif tiles.hopper:
            from specdec.attention.kernels.paged_hopper import launch_paged_hopper

            assert isinstance(view, MHAView)
            launch_paged_hopper(q_THD, view, segment, scoring, out_THSD, lse_THS, tiles)
        else:
            launch_paged(q_THD, view, segment, scoring, out_THSD, lse_THS, tiles)
        return None

    def _tiles(self, q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring) -> tuple[PagedTiles, int]:
        """The tiles of the kernel that reads this segment, and the number of splits."""
        H, (k, v) = q_THD.shape[1], view.heads
        K, widest = k.shape[1], max(k.shape[2], v.shape[2])
        seqlen_q_packgqa, programs = segment.max_seqlen_q * (H // K), self.programs or programs_at_once(q_THD.device)
        waves = segment.rows * K / programs
        wanted = seqlen_q_packgqa
        if v.shape[2] < k.shape[2] and not loads_ahead(k, v):
            # Shared memory then holds narrow values where wide keys were.  In larger tiles ptxas 12.8, which Triton 3.6
            # bundles, takes their address from a register that it has not set.
            wanted = min(seqlen_q_packgqa, 32)
        kept = view.quant, segment.causal, waves, segment.max_keys, view.int8_queries
        tiles = hopper_tiles(q_THD, view, segment, scoring, programs, self.hopper)
        tiles = tiles or wide_hopper_tiles(q_THD, view, segment, scoring, self.hopper)
        if tiles is None:
            key_bytes = padded(k.shape[2]) * k.itemsize + padded(v.shape[2]) * v.itemsize
            tiles = paged_tiles(wanted, widest, q_THD.itemsize, *kept)
            room = shared_memory(q_THD.device)
            if widest > WIDE:
                tiles = wide_tiles(wanted, q_THD.itemsize, view.quant, room)
            if (
                view.quant and k.shape[2] > q_THD.shape[2]
            ):  # halves with scales of their own pass through shared memory once more
                room -= tiles.block_n * padded(v.shape[2]) * q_THD.itemsize
            tiles = tiles.within(room, key_bytes, padded(k.shape[2]) * q_THD.itemsize)
        if tiles.hopper:
            seqlen_q_packgqa = segment.max_seqlen_q * triton.next_power_of_2(H // K)
        num_tiles = triton.cdiv(seqlen_q_packgqa, tiles.block_m) * tiles.parts
        return tiles, splits_for(
            segment.rows * K * num_tiles, segment.max_keys, tiles.min_split_keys, programs * tiles.ctas_per_sm
        )


def launch_paged(
    q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring, out_THSD: Tensor, lse_THS: Tensor, tiles: PagedTiles
) -> None:
    """Launches the paged kernel for one segment, with as many splits as out_THSD has."""
    (T, H, D), (k, v), splits = q_THD.shape, view.heads, out_THSD.shape[2]
    K, E = k.shape[1], v.shape[2]
    num_tiles = triton.cdiv(segment.max_seqlen_q * (H // K), tiles.block_m)
    states = lse_THS.stride(1)  # states of a query and head in the whole scratch
    assert segment.pages.table.stride(1) == 1 and out_THSD.stride() == (H * states * E, states * E, E, 1)
    assert lse_THS.stride(0) == H * states and (splits == 1 or lse_THS.stride(2) == 1)
    slopes_H, quant, int8_queries = scoring.slopes_H, view.quant, view.int8_queries
    many = tiles.block_m > 64 or tiles.block_m * k.shape[2] > 64 * WIDE
    q_in_memory = quant != "" and not int8_queries and q_THD.dtype == torch.bfloat16 and many
    starts_T, positions_T = segment.starts_T, positions_for(scoring, segment)
    for of_T in (starts_T, positions_T):
        assert of_T is None or (of_T.shape[0] >= T and of_T.is_contiguous())
    paged_attention_kernel[(segment.rows * K * num_tiles, splits)](
        q_THD, k, view.scales, segment.pages.table, segment.cache_seqlens, segment.cu_seqlens_q,
        *(segment.cu_seqlens_q if of_T is None else of_T for of_T in (starts_T, positions_T)),
        lse_THS if slopes_H is None else slopes_H, out_THSD, lse_THS,
        torch.empty((T, H, k.shape[2]), dtype=torch.float16, device=q_THD.device) if q_in_memory else q_THD,
        *factors(scoring, D), *q_THD.stride()[:2], *strides_of(k, v), segment.pages.table.stride(0), states,
        num_tiles, KV_HEADS=K, GROUP=H // K, HEAD_DIM=k.shape[2], PADDED_DIM=padded(k.shape[2], int8_queries), VALUE_DIM=E,
        PADDED_VALUE=padded(E, int8_queries), KEY_PARTS=k.shape[2] // D, PAGE_SIZE=segment.pages.page_size,
        CAUSAL=segment.causal and segment.max_seqlen_q > 1, HAS_STARTS=starts_T is not None,
        WINDOW_RIGHT=segment.window_right, ALIBI=alibi_of(scoring), SOFTCAP=scoring.softcap is not None, QUANT=quant,
        INT8_QUERIES=int8_queries, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, MIN_SPLIT_KEYS=tiles.min_split_keys,
        STAGES=tiles.stages, Q_IN_MEMORY=q_in_memory, ASM=has_pdl(q_THD.device),
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, **chained(q_THD.device),
    )  # fmt: skip


def launch_suffix_merge(
    q_THD: Tensor,
    view: CachedHeads,
    suffix: Segment | None,
    scoring: Scoring,
    partial: AttentionState,
    whole: AttentionState | None,
    state: AttentionState,
    left_filled: bool,
    sinks_H: Tensor | None = None,
    tiles: MergeTiles | None = None,
) -> None:
    """Launches the kernel that reads the suffix, if there is one, and merges all states into `state`.

    partial: states of the splits, [T, H, S, E].
    left_filled: True if a query's empty splits come last.
    whole: one more state, [T, H, E] with any strides, or None.
    sinks_H: sinks that `state` then holds, float32, or None.
    tiles: other ones than `merge_tiles`.
    """
    (T, H, D), (k, v), splits = q_THD.shape, view.heads, partial.lse_TH.shape[2]
    K, E = k.shape[1], v.shape[2]
    groups = K if suffix else H  # a merge alone shares no keys between heads: one program a head
    padded_group = triton.next_power_of_2(H // groups)
    is_wide = suffix is not None and k.shape[2] > WIDE
    columns, chunk = tiles or (
        wide_merge_tiles(splits, padded_group, E) if is_wide else merge_tiles(T * groups, splits, padded_group, E)
    )
    table, lens = (suffix.pages.table, suffix.cache_seqlens) if suffix else (partial.lse_TH, partial.lse_TH)
    starts_T, positions_T = (suffix.starts_T, positions_for(scoring, suffix)) if suffix else (None, None)
    out, lse = whole or state
    assert out.stride(2) == 1 and table.stride(-1) == 1 and (sinks_H is None or sinks_H.is_contiguous())
    # One warp a program: reductions then need no barrier, and many programs fit an SM.  It could not hold keys of 512.
    warps = 4 if is_wide else 1
    suffix_merge_kernel[(T, groups, padded(E) // columns)](
        q_THD, k, view.scales, table, lens, lens if starts_T is None else starts_T,
        *((lens, lse) if positions_T is None else (positions_T, scoring.slopes_H)), lse if sinks_H is None else sinks_H,
        partial.out_THD, partial.lse_TH, out, lse, state.out_THD, state.lse_TH,
        *factors(scoring, D), *q_THD.stride()[:2], *strides_of(k, v), table.stride(0), splits,
        *out.stride()[:2], *lse.stride(),
        KV_HEADS=groups, GROUP=H // groups, PADDED_GROUP=padded_group, HEAD_DIM=k.shape[2],
        PADDED_DIM=padded(k.shape[2]), VALUE_DIM=E, COLUMNS=columns,
        KEY_PARTS=k.shape[2] // D, BLOCK_N=16, CHUNK=chunk, HAS_SUFFIX=suffix is not None, HAS_SINKS=sinks_H is not None,
        HAS_STARTS=starts_T is not None, ALIBI=alibi_of(scoring) if suffix else "", SOFTCAP=scoring.softcap is not None,
        QUANT=view.quant if suffix else "", INT8_QUERIES=suffix is not None and view.int8_queries,
        HAS_WHOLE=whole is not None, LEFT_FILLED=left_filled,
        num_warps=warps, num_stages=1, **chained(q_THD.device),
    )  # fmt: skip


def positions_for(scoring: Scoring, segment: Segment) -> Tensor | None:
    """The queries' positions for ALiBi's distances; None for a layer without slopes."""
    slopes_H = scoring.slopes_H
    if slopes_H is None:
        return None
    assert slopes_H.dtype == torch.float32 and slopes_H.is_contiguous(), "slopes are float32"
    assert segment.alibi_positions_T is not None, "slopes need a plan for layers of a kind with alibi"
    return segment.alibi_positions_T


def alibi_of(scoring: Scoring) -> str:
    """What the kernels multiply slopes with: the distance, its root, or nothing."""
    return "" if scoring.slopes_H is None else "root" if scoring.sqrt_alibi else "distance"


def factors(scoring: Scoring, D: int) -> tuple[float, float]:
    """(scale, softcap) as the kernels take them.  Without a softcap the second number is arbitrary."""
    return scoring.factor(D), 1.0 if scoring.softcap is None else scoring.softcap


def check_view(q_THD: Tensor, view: CachedHeads) -> None:
    """Asserts that the kernels can read this view with these queries."""
    _, H, D = q_THD.shape
    k, v = view.heads
    assert k.shape[2] % D == 0 and H % (k.shape[1] * (k.shape[2] // D)) == 0 and k.stride(2) == v.stride(2) == 1
    assert k.stride(0) * k.itemsize == v.stride(0) * v.itemsize, "not of one row"
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr(), "not of one row"
    if view.quant:
        assert view.scales.is_contiguous() and view.scales.dtype == torch.float32
    if isinstance(view, Int8KeysView):
        assert q_THD.dtype == v.dtype, f"queries are {q_THD.dtype}, the cache's values are {v.dtype}"
    elif not view.quant:
        assert q_THD.dtype == k.dtype == v.dtype, f"queries are {q_THD.dtype}, the cache is {k.dtype}"


def strides_of(k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """A slot's stride, in keys; how far values begin after keys, in values; the strides of key heads and of value heads."""
    offset = v.storage_offset() - k.storage_offset() * k.itemsize // v.itemsize
    return k.stride(0), int(offset), k.stride(1), v.stride(1)


def loads_ahead(k: Tensor, v: Tensor) -> bool:
    """Whether the compiler knows that rows are aligned, so that it loads keys and values a block ahead."""
    return all(number % 16 == 0 for number in (k.data_ptr(), *strides_of(k, v)))


def _dense_rows(x: Tensor) -> Tensor:
    """x, copied only if its last dim is not contiguous.  The kernels take any other stride, so slices of a fused qkv tensor
    pass.
    """
    return x if x.stride(-1) == 1 else x.contiguous()
