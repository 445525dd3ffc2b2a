"""The `triton` attention backend where a query's result must not depend on what is computed beside it, bit for bit.

leaves_triton.py has the kernels and says how the order of sums is fixed.  This module decides who computes which leaf, by
shapes alone; any choice gives the same bits.  It reads ordinary heads in the model's own 16 bits; capabilities.py refuses the
rest.

Shapes: T queries, H heads, K kv heads, G = H/K, D head dim, S states of a query.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.planes import KVView
from specdec.attention.caches.split_cache import PairedView
from specdec.attention.kernels.leaves_triton import IN_OCTAVE, join_kernel, leaves_kernel, path_kernel
from specdec.attention.kernels.tiles_triton import padded, programs_at_once
from specdec.attention.kernels.triton_backend import TritonBackend, check_view, factors, strides_of
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState
from specdec.ops.launch import chained
from specdec.ops.products.numerics import INVARIANT

BLOCK_M, WARPS, STAGES = 64, 4, 3  # of every product: with other numbers tensor cores would add up in another order
LEAST, OCTAVES = 128, 4  # keys of the first leaves, and how often their length doubles
FULL_GPU = 0.8  # threshold: the share of the GPU that has work if each program computes all leaves of its queries
MOST_SCRATCH = 1 << 28  # threshold in bytes: with more memory for states, each program computes all leaves of its queries
JOINED = 8  # states that the joining kernel loads together


@dataclass(frozen=True)
class LeavesPlan:
    """A plan, and the scratch memory that its layers share.

    paged: prefixes, or causal rows.  suffix: the nodes' paths if there are trees.
    """

    paged: Segment
    suffix: Segment | None
    _scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def scratch(self, T: int, H: int, S: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for states: weighted values [T, H, S, D], and maximum and sum of weights [T, H, S, 2], float32."""
        if (T, H, S, D) not in self._scratch:
            shapes = (T, H, S, D), (T, H, S, 2)
            values, sums = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
            self._scratch[T, H, S, D] = values, sums
        return self._scratch[T, H, S, D]


class InvariantBackend(TritonBackend):
    """programs: as of TritonBackend."""

    def __init__(self, programs: int | None = None) -> None:
        super().__init__(programs, INVARIANT)

    def prepare(self, plan: AttentionPlan) -> LeavesPlan:  # type: ignore[override]
        (paged,) = plan.segments
        return LeavesPlan(paged, plan.suffix)

    def attend(self, q_THD: Tensor, view: KVView, prepared: LeavesPlan, scoring: Scoring = PLAIN) -> AttentionState:  # type: ignore[override]
        return self._answer(q_THD, view, prepared, scoring)

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        return self._answer(q_THD, view, LeavesPlan(segment, None), scoring)

    def _answer(self, q_THD: Tensor, view: KVView, plan: LeavesPlan, scoring: Scoring) -> AttentionState:
        assert isinstance(view, MHAView | PairedView) and scoring.slopes_H is None and scoring.factor(q_THD.shape[2]) > 0
        q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
        check_view(q_THD, view)
        (T, H, _), (_, K, D), paged = q_THD.shape, view.heads[0].shape, plan.paged
        assert paged.base_B is None and not paged.ahead and paged.pages.table.stride(1) == 1
        state = AttentionState.empty((T, H, D), q_THD.dtype, q_THD.device)
        if not T:
            return state
        octaves = octaves_of(paged.span)
        tiles, most = triton.cdiv(paged.max_seqlen_q * (H // K), BLOCK_M), most_leaves(paged)
        programs = self.programs or programs_at_once(q_THD.device)
        is_full, is_large = paged.rows * K * tiles >= FULL_GPU * programs, 4 * T * H * most * D > MOST_SCRATCH
        one = most == 1 or is_full or is_large
        states, in_scratch = 2 if one else most, plan.suffix is not None or not one
        values, sums = plan.scratch(T, H, states, D, q_THD.device) if in_scratch else state
        leaves = {"HEAD_DIM": D, "PADDED_DIM": padded(D), "HAS_STARTS": paged.starts_T is not None, "BLOCK_N": block_n(D),
                  "LEAST": LEAST, "OCTAVES": octaves}  # fmt: skip
        reads = {"KV_HEADS": K, "GROUP": H // K, "KEY_PARTS": D // q_THD.shape[2], "PAGE_SIZE": paged.pages.page_size,
                 "SOFTCAP": scoring.softcap is not None, "ONE": one, "BLOCK_M": BLOCK_M, **leaves}  # fmt: skip
        starts_T = paged.cache_seqlens if paged.starts_T is None else paged.starts_T
        numbers = *factors(scoring, q_THD.shape[2]), *q_THD.stride()[:2], *strides_of(*view.heads)[:3], paged.pages.table.stride(0)
        leaves_kernel[(paged.rows * K * tiles, 1 if one else most)](
            q_THD, view.heads[0], paged.pages.table, paged.cache_seqlens, paged.cu_seqlens_q, starts_T, state.out_THD,
            state.lse_TH, values, sums, *numbers, states, tiles,
            CAUSAL=paged.causal and paged.max_seqlen_q > 1, TREE=plan.suffix is not None, STAGES=STAGES,
            **reads, num_warps=WARPS, num_stages=STAGES, **chained(q_THD.device),
        )  # fmt: skip
        suffix, nodes = plan.suffix, paged.max_seqlen_q
        if not one:
            join_kernel[(T * H,)](
                values, sums, paged.cache_seqlens, starts_T, *state, states, nodes, HEADS=H, TREE=suffix is not None,
                CHUNK=JOINED, **leaves, num_warps=1, **chained(q_THD.device),
            )  # fmt: skip
        if suffix is not None:
            assert suffix.rows == T == paged.rows * nodes and not paged.causal and not paged.ragged
            path_kernel[(T, K, triton.cdiv(H // K, BLOCK_M))](
                q_THD, view.heads[0], paged.pages.table, paged.cache_seqlens, suffix.pages.table, suffix.cache_seqlens,
                starts_T, values, sums, state.out_THD, state.lse_TH, *numbers, suffix.pages.table.stride(0), states,
                nodes, **reads, num_warps=WARPS, num_stages=1, **chained(q_THD.device),
            )  # fmt: skip
        return state


def block_n(D: int) -> int:
    """Keys of a block: the bytes of a pipeline's stage are bounded, and tiles have power-of-two sides."""
    return 64 if padded(D) <= 128 else 32


def octaves_of(span: int | None) -> int:
    """How often the length of leaves doubles.  A layer that reads a span of keys gets leaves of a 16th of the span at most."""
    return OCTAVES if span is None else min(OCTAVES, max(0, (span // (IN_OCTAVE.value * LEAST)).bit_length() - 1))


def most_leaves(segment: Segment) -> int:
    """The most leaves that the keys of one tile's queries can lie in, by what the host knows."""
    octaves, capacity = octaves_of(segment.span), segment.pages.capacity
    whole = leaves_before(capacity, octaves)
    if segment.span is None:
        return whole
    near = segment.span + segment.max_seqlen_q + LEAST  # keys that may lie across the border of one leaf more
    return min(whole, leaves_before(near, octaves) + 1)


def leaves_before(position: int, octaves: int) -> int:
    """How many leaves begin before a position; at least 1.  `leaves_triton.leaf_of` is the same for the kernels."""
    leaves, first = 0, 0
    while first < position:
        first += LEAST << min(leaves // IN_OCTAVE.value, octaves)
        leaves += 1
    return max(1, leaves)
