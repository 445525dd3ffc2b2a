"""Launches the kernels of latents_triton.py: absorbed queries over a cache of latents, in one order of sums.

Shapes: T queries, H heads, C latent rank, L latent width, R = L - C rotated dim, D columns of a piece of a value, S states.
"""

from __future__ import annotations

import triton
from torch import Tensor

from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.invariant.latents_triton import latent_kv_blocks_kernel, latent_path_kernel
from specdec.attention.invariant.plan import BLOCK_M, KVBlockPlan, column_parts, doublings_of
from specdec.attention.invariant.states_triton import merge_kv_blocks_kernel
from specdec.attention.kernels.tiles_triton import padded
from specdec.attention.kinds import Scoring
from specdec.attention.latent.keys import LatentKeys
from specdec.attention.state import AttentionState
from specdec.ops.launch import chained

BLOCK_N, WARPS, STAGES = 64, 8, 2  # the first two of every product, as in backend.py


def attend_latents(q_THL: Tensor, view: LatentView, plan: KVBlockPlan, scoring: Scoring, programs: int) -> AttentionState:
    """The state [T, H, C] of absorbed queries."""
    (T, H, L), C, paged, suffix, device = q_THL.shape, view.rank, plan.paged, plan.suffix, q_THL.device
    assert isinstance(view, MLAView) and view.latent.dtype == q_THL.dtype and view.width == L
    scale = scoring.latent_factor()
    assert scale > 0 and paged.starts_T is None and q_THL.stride(2) == 1
    parts, nodes = column_parts(C, plan.blocks.columns), paged.max_seqlen_q
    D = C // parts
    state = AttentionState.empty((T, H * parts, D), q_THL.dtype, device)  # of as many heads as there are parts
    if T:
        work = plan.split_work(T, H * parts, D, paged.rows * parts, H, programs)
        in_scratch = suffix is not None or not work.unsplit
        values, sums = plan.scratch(T, H * parts, work.states, D, device) if in_scratch else state
        min_keys = plan.blocks.min_keys
        order = {"BLOCK_N": BLOCK_N, "MIN_KV_BLOCK": min_keys, "DOUBLINGS": doublings_of(None, min_keys)}
        stored = LatentKeys.of(view)
        strides = {name: stored.options[name] for name in ("LATENT_STRIDE", "ROPE_STRIDE")}
        shapes = {"HEADS": H, "PARTS": parts, "DIM": D, "PADDED_DIM": padded(D), "ROPE": L - C, "PADDED_ROPE": padded(L - C),
                  "PAGE_SIZE": paged.pages.page_size, "UNSPLIT": work.unsplit, "BLOCK_M": BLOCK_M,
                  **order, **strides}  # fmt: skip
        keys, numbers = stored.pointers[:2], (scale, *q_THL.stride()[:2], paged.pages.table.stride(0))
        latent_kv_blocks_kernel[(work.programs, work.blocks)](
            q_THL, *keys, paged.pages.table, paged.cache_seqlens, paged.cu_seqlens_q, *state, values, sums, *numbers,
            work.states, work.tiles, CAUSAL=paged.causal and nodes > 1, TREE=suffix is not None, STAGES=STAGES,
            **shapes, num_warps=WARPS, num_stages=STAGES, **chained(device),
        )  # fmt: skip
        if not work.unsplit:
            merge_kv_blocks_kernel[(T * H * parts,)](
                values, sums, paged.cache_seqlens, paged.cache_seqlens, *state, work.states, nodes, HEADS=H * parts,
                HEAD_DIM=D, PADDED_DIM=padded(D), HAS_STARTS=False, TREE=suffix is not None, CHUNK=plan.blocks.merged, **order,
                num_warps=1, **chained(device),
            )  # fmt: skip
        if suffix is not None:
            assert suffix.rows == T == paged.rows * nodes and not paged.causal and not paged.ragged
            latent_path_kernel[(T, parts, triton.cdiv(H, BLOCK_M))](
                q_THL, *keys, paged.pages.table, paged.cache_seqlens, suffix.pages.table, suffix.cache_seqlens, values, sums,
                *state, *numbers, suffix.pages.table.stride(0), work.states, nodes,
                **shapes, num_warps=WARPS, num_stages=1, **chained(device),
            )  # fmt: skip
    return AttentionState(state.out_THD.view(T, H, C), state.lse_TH[:, ::parts])
