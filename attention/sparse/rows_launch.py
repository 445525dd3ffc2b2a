"""Launches latent attention over rows of slots on Hopper GPUs: one query a row, each with slots of its own.

Attention's `triton` backend asks `takes_rows` first, and leaves everything else to latent/mla_launch.py.

Shapes: T queries, H heads, C latent rank, L latent width, I slots of a row, S states of a query.
"""

from __future__ import annotations

import triton
from torch import Tensor

from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.kernels.triton_plan import TritonPlan
from specdec.attention.latent.limits import latent_splits
from specdec.attention.sparse.rows_merge_triton import merge_rows_kernel
from specdec.attention.state import AttentionState
from specdec.ops.launch import chained

BLOCK = 64  # keys of a step, and the fewest of a split
MAX_SPLITS = 32
# The columns of 8 and the heads that a program of the merge takes, and the states that it reads at once.
MERGED_GROUPS, MERGED_HEADS, MERGED_STATES = 16, 4, 16


def takes_rows(q_THL: Tensor, view: LatentView, plan: TritonPlan) -> bool:
    """Whether the plan is rows of slots with one query each, at dims that the kernel for Hopper GPUs knows.  The caller knows
    that there is such a GPU.
    """
    if len(plan.segments) > 1 or plan.suffix is not None or not isinstance(view, MLAView):
        return False
    rows, (_, H, L) = plan.segments[0], q_THL.shape
    one_each = rows.pages.page_size == rows.max_seqlen_q == 1 and not rows.ragged and rows.rows == q_THL.shape[0]
    return one_each and rows.starts_T is None and H % 64 == 0 and (view.rank, L) == (512, 576) and q_THL.element_size() == 2


def attend_rows(q_THL: Tensor, view: LatentView, plan: TritonPlan, scale: float, programs: int) -> AttentionState:
    """The state [T, H, C] of queries that `takes_rows` accepts.  programs: how many programs the GPU runs at once."""
    assert isinstance(view, MLAView), "takes_rows refuses other caches"
    (T, H, _), C, device, latent = q_THL.shape, view.rank, q_THL.device, view.latent
    slots_TI, counts_T = plan.segments[0].pages.table, plan.segments[0].cache_seqlens
    assert latent.dtype == q_THL.dtype and latent.stride(1) == q_THL.stride(2) == slots_TI.stride(1) == 1
    result = AttentionState.empty((T, H, C), q_THL.dtype, device)
    if not T:
        return result
    splits = latent_splits(T * (H // 64), slots_TI.shape[1], BLOCK, programs, MAX_SPLITS)
    state = result if splits == 1 else plan.scratch(T, H, splits, C, device)
    launch_rows(q_THL, latent, slots_TI, counts_T, state, scale, splits)
    if splits > 1:
        launch_merge(state, result, counts_T, splits)
    return result


def launch_rows(
    q_THL: Tensor, latent: Tensor, slots_TI: Tensor, counts_T: Tensor, state: AttentionState, scale: float, splits: int
) -> None:  # fmt: skip
    """Attends to each split of the rows."""
    from specdec.attention.sparse.rows_hopper import rows_hopper_kernel

    T, H, _ = q_THL.shape
    rows_hopper_kernel[(T * (H // 64), splits)](
        q_THL, latent, slots_TI, counts_T, *state, scale, *q_THL.stride()[:2], latent.stride(0), slots_TI.stride(0),
        HEADS=H, MIN_SPLIT_KEYS=BLOCK, SPLIT=splits > 1, num_warps=8, **chained(q_THL.device),
    )  # fmt: skip


def launch_merge(partial: AttentionState, state: AttentionState, counts_T: Tensor, splits: int) -> None:
    """Merges the splits' states."""
    T, H, C = state.out_THD.shape
    padded_states = triton.next_power_of_2(splits)
    merge_rows_kernel[(T, H // MERGED_HEADS, C // (8 * MERGED_GROUPS))](
        *partial, *state, counts_T, splits, HEADS=H, RANK=C, BLOCK_P=MERGED_HEADS, BLOCK_G=MERGED_GROUPS,
        PADDED_STATES=padded_states, UNROLL=min(MERGED_STATES, padded_states), MIN_SPLIT_KEYS=BLOCK, num_warps=4,
        **chained(state.out_THD.device),
    )  # fmt: skip
