"""The choice of an indexer's keys where ranks share each sequence's tokens: made once, and the same on every rank.

Each rank scores the committed keys that it keeps and finds its best ones; the ranks gather these with their scores, and choose
the best of all.  No other key can be among the best, so the choice is what one rank would choose, ties included: they go to the
lower position.  The keys of a pass's own tokens lie in the scratch of every rank, which each scores for itself.  Of the chosen
tokens each rank reads those that it keeps, or will keep if they stay: so every one is read once.

This module knows no kernel and no model.

Shapes: T queries, t some of them, H indexer heads, D indexer dim, X slots, N ranks, K best keys, M gathered keys, I selected
keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.segment import AttentionPlan, ContextParallelPrefix, Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.indexer import NOTHING
from specdec.attention.sparse.segment import best_keys
from specdec.ops.topk import places_of, ranked

GATHERED = 1 << 25  # keys of all ranks that are chosen from at once
EMPTY = torch.iinfo(torch.int64).min  # ranks below every key
NOWHERE = torch.iinfo(torch.int32).max  # a position after every other


@dataclass(frozen=True)
class ShardedCandidates:
    """Which keys each query of a pass may select from, over all ranks.

    committed: those of the committed tokens that this rank keeps, in its own numbering.  fresh: those of the pass's own tokens.
    base_T: int32, the position of each query's first fresh key; all before it are committed.
    """

    prefix: ContextParallelPrefix
    committed: CandidateKeys
    fresh: CandidateKeys
    base_T: Tensor

    @classmethod
    def of(cls, plan: AttentionPlan, queries: int) -> ShardedCandidates:
        """The candidates of a plan's queries, which are `queries` many; the plan has a context_parallel prefix."""
        prefix, (fresh,) = plan.context_parallel, plan.parts
        assert prefix is not None and fresh.base_B is not None and not prefix.has_all_heads
        each = queries // fresh.base_B.shape[0]
        base_T = fresh.base_B[:, None].expand(-1, each).reshape(-1)
        committed, own = (CandidateKeys.of(AttentionPlan((part,)), queries) for part in (prefix.own, fresh))
        return cls(prefix, committed, own, base_T)

    def own_slots(self, chosen_tI: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """(slots [t, I] int32, counts [t] int32): where this rank reads its own of the chosen keys, in the order of positions.

        chosen_tI: `ranked` keys of positions; EMPTY ones are none.  part: which queries these are.
        """
        sharding = self.prefix.sharding
        positions_tI = places_of(chosen_tI)
        is_own_tI = (chosen_tI != EMPTY) & sharding.keeps(positions_tI)
        positions_tI = torch.where(is_own_tI, positions_tI, NOWHERE).sort(dim=1).values.int()
        is_own_tI, base_t1 = positions_tI < NOWHERE, self.base_T[part, None]
        is_fresh_tI = positions_tI >= base_t1
        before_tI = sharding.local_lens(torch.where(is_own_tI & ~is_fresh_tI, positions_tI, 0))
        fresh_tI = torch.where(is_own_tI & is_fresh_tI, positions_tI - base_t1, 0)
        slots_tI = torch.where(is_fresh_tI, _slots(self.fresh, fresh_tI, part), _slots(self.committed, before_tI, part))
        return torch.where(is_own_tI, slots_tI, 0).int(), is_own_tI.sum(1).int()


def sharded_segment(q_THD: Tensor, w_TH: Tensor, keys_XD: Tensor, candidates: ShardedCandidates, topk: int) -> Segment:
    """Of the keys that each query selects among those of all ranks, the ones that this rank reads: a row of slots a query.

    q_THD, w_TH, keys_XD: as of `sparse_segment`; the queries are the same on all ranks.
    The ranks exchange alike whatever each of them keeps.
    """
    group, sharding = candidates.prefix.group, candidates.prefix.sharding
    committed, fresh = (best_keys(q_THD, w_TH, keys_XD, own, topk) for own in (candidates.committed, candidates.fresh))
    T, M = q_THD.shape[0], group.size * committed[1].shape[1] + fresh[1].shape[1]
    slots_TI = fresh[1].new_empty(T, min(topk, M))
    counts_T = torch.empty_like(candidates.base_T)
    step = max(1, GATHERED // M)
    for t in range(0, T, step):
        part = slice(t, min(t + step, T))
        scores_tK, places_tK = (x[part] for x in fresh)
        fresh_tK = _ranked(scores_tK, places_tK, places_tK + candidates.base_T[part, None])
        scores_tK, places_tK = (x[part] for x in committed)
        gathered_NtK = group.all_gather(_ranked(scores_tK, places_tK, sharding.positions(places_tK)))
        all_tM = torch.cat((gathered_NtK.transpose(0, 1).flatten(1), fresh_tK), dim=1)
        chosen_tI = all_tM.topk(slots_TI.shape[1], dim=1, sorted=False).values
        slots_TI[part], counts_T[part] = candidates.own_slots(chosen_tI, part)
    return Segment.of_slots(slots_TI, counts_T)


def _ranked(scores_tK: Tensor, places_tK: Tensor, positions_tK: Tensor) -> Tensor:
    """`ranked` keys of these positions, EMPTY where there is no place."""
    return torch.where(places_tK == NOTHING, EMPTY, ranked(scores_tK, positions_tK))


def _slots(candidates: CandidateKeys, places_tI: Tensor, part: slice) -> Tensor:
    """The slots of keys by their places in each query's row of pages."""
    table, P = candidates.segment.pages
    return table[candidates.rows_T[part, None].long(), places_tI.long() // P] * P + places_tI % P
