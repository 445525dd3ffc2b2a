"""The `triton` attention backend where a query's result must not depend on what is computed beside it, bit for bit.

states_triton.py says how the order of sums is fixed, kv_blocks_triton.py has the kernels, and plan.py decides which
program computes which KV block.  The backend reads ordinary heads, pairs of them (differential attention), and latents, all in
the model's own 16 bits and of at most MAX_WIDTH; capabilities.py refuses the rest.

Shapes: T queries, H heads, K kv heads, G = H/K, D width of a key and of a value, S states of a query.
"""

from __future__ import annotations

import triton
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.layout import KVView
from specdec.attention.caches.split_cache import PairedView
from specdec.attention.invariant.kv_blocks_triton import kv_blocks_kernel, path_kernel
from specdec.attention.invariant.latents import attend_latents
from specdec.attention.invariant.plan import BLOCK_M, KV_BLOCKS, KVBlockPlan, KVBlocks, doublings_of
from specdec.attention.invariant.states_triton import merge_kv_blocks_kernel
from specdec.attention.kernels.tiles_triton import padded, programs_at_once
from specdec.attention.kernels.triton_backend import TritonBackend, check_view, factors, strides_of
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState
from specdec.ops.launch import chained
from specdec.ops.products.numerics import INVARIANT

MAX_NODES = 4  # that a program computes
WARPS, STAGES = 4, 3  # of every product: with other numbers of warps tensor cores would add up in another order


class InvariantBackend(TritonBackend):
    """programs: as of TritonBackend.  blocks: the sizes of KV blocks."""

    def __init__(self, programs: int | None = None, blocks: KVBlocks = KV_BLOCKS) -> None:
        super().__init__(programs, INVARIANT)
        self.blocks = blocks

    def prepare(self, plan: AttentionPlan) -> KVBlockPlan:  # type: ignore[override]
        (paged,) = plan.segments
        return KVBlockPlan(paged, plan.suffix, self.blocks)

    def attend(self, q_THD: Tensor, view: KVView, prepared: KVBlockPlan, scoring: Scoring = PLAIN) -> AttentionState:  # type: ignore[override]
        q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
        assert prepared.paged.base_B is None and not prepared.paged.window_right and prepared.paged.pages.table.stride(1) == 1
        programs = self.programs or programs_at_once(q_THD.device)
        if isinstance(view, LatentView):
            return attend_latents(q_THD, view, prepared, scoring, programs)
        assert isinstance(view, MHAView | PairedView) and scoring.slopes_H is None and scoring.factor(q_THD.shape[2]) > 0
        check_view(q_THD, view)
        return _attend_heads(q_THD, view, prepared, scoring, programs)

    attend_with_sinks = Backend.attend_with_sinks  # the kernels that merge here add no sinks
    store_and_attend = Backend.store_and_attend  # whose splits would depend on the batch

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        return self.attend(q_THD, view, KVBlockPlan(segment, None, self.blocks), scoring)


def _attend_heads(
    q_THD: Tensor, view: MHAView | PairedView, plan: KVBlockPlan, scoring: Scoring, programs: int
) -> AttentionState:
    (T, H, part), (_, K, D), paged, suffix = q_THD.shape, view.heads[0].shape, plan.paged, plan.suffix
    state = AttentionState.empty((T, H, D), q_THD.dtype, q_THD.device)
    if not T:
        return state
    work, nodes = plan.split_work(T, H, D, paged.rows * K, H // K, programs), paged.max_seqlen_q
    in_scratch = suffix is not None or not work.unsplit
    values, sums = plan.scratch(T, H, work.states, D, q_THD.device) if in_scratch else state
    shapes = {"HEAD_DIM": D, "PADDED_DIM": padded(D), "HAS_STARTS": paged.starts_T is not None, "BLOCK_N": block_n(D),
              "MIN_KV_BLOCK": plan.blocks.min_keys, "DOUBLINGS": doublings_of(paged.span, plan.blocks.min_keys)}  # fmt: skip
    reads = {"KV_HEADS": K, "GROUP": H // K, "KEY_PARTS": D // part, "PAGE_SIZE": paged.pages.page_size,
             "SOFTCAP": scoring.softcap is not None, "UNSPLIT": work.unsplit, "BLOCK_M": BLOCK_M, **shapes}  # fmt: skip
    starts_T = paged.cache_seqlens if paged.starts_T is None else paged.starts_T
    numbers = *factors(scoring, part), *q_THD.stride()[:2], *strides_of(*view.heads)[:3], paged.pages.table.stride(0)
    kv_blocks_kernel[(work.programs, work.blocks)](
        q_THD, view.heads[0], paged.pages.table, paged.cache_seqlens, paged.cu_seqlens_q, starts_T, *state, values, sums,
        *numbers, work.states, work.tiles,
        CAUSAL=paged.causal and nodes > 1, TREE=suffix is not None, STAGES=STAGES,
        **reads, num_warps=WARPS, num_stages=STAGES, **chained(q_THD.device),
    )  # fmt: skip
    if not work.unsplit:
        merge_kv_blocks_kernel[(T * H,)](
            values, sums, paged.cache_seqlens, starts_T, *state, work.states, nodes, HEADS=H, TREE=suffix is not None,
            CHUNK=plan.blocks.merged, **shapes, num_warps=1, **chained(q_THD.device),
        )  # fmt: skip
    if suffix is not None:
        assert suffix.rows == T == paged.rows * nodes and not paged.causal and not paged.ragged
        nodes_each = nodes_a_program(T * K, H // K, programs)
        path_kernel[(paged.rows * triton.cdiv(nodes, nodes_each), K, triton.cdiv(H // K, BLOCK_M))](
            q_THD, view.heads[0], paged.pages.table, paged.cache_seqlens, suffix.pages.table, suffix.cache_seqlens,
            starts_T, values, sums, *state, *numbers, suffix.pages.table.stride(0), work.states, nodes,
            NODES=nodes_each, **reads, num_warps=WARPS, num_stages=1, **chained(q_THD.device),
        )  # fmt: skip
    return state


def nodes_a_program(pairs: int, group: int, programs: int) -> int:
    """How many nodes a program of path_kernel computes: so many that all programs run at once, two on an SM.

    pairs: of a node and a kv head.  group: query heads of a kv head.  programs: of the GPU.
    """
    most, nodes = max(1, BLOCK_M // group), 1
    while nodes < MAX_NODES and 2 * nodes <= most and pairs > 2 * programs * nodes:
        nodes *= 2
    return nodes


def block_n(D: int) -> int:
    """Keys of a step: the bytes of a pipeline's stage are bounded, and tiles have power-of-two sides."""
    return 64 if padded(D) <= 128 else 32
