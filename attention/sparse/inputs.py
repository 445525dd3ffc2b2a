"""The inputs of a layer of sparse latent attention: of all keys, each query reads the best ones by the layer's indexer.

Where the host knows that no query has more keys than it may read, nothing is selected and the layer is one of dense latent
attention, expanded for long prompts.  Otherwise every query gets a row of slots of its own, which holds keys of the prefix as
well as of its path in a draft tree, so no part of the plan remains.  Long prompts over 8-bit latents read converted ones, in a
workspace (latent/upconvert.py): what they select are then slots of the workspace.

Some models let a layer read what an earlier layer's indexer selected (GLM-5.2).  This module knows no model.

Shapes: T tokens, R asked-for tokens, H heads, C latent rank, N not rotated dim, V value dim, L latent width, J heads of the
indexer, I dims of its heads, B rows of a batch, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.sparse_cache import SparseLatentView
from specdec.attention.context_parallel.selection import ShardedCandidates, sharded_segment
from specdec.attention.inputs import DenseHeads, LayerCall, LayerInputs
from specdec.attention.latent.mla import LatentInputs, absorbed_queries, absorbed_values, store_latent
from specdec.attention.latent.upconvert import Workspace
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.index_store import IndexPrep, store_index
from specdec.attention.sparse.indexer import indexer_scores, select_rows
from specdec.attention.sparse.segment import sparse_segment
from specdec.ops.operator import is_traced

SELECTED = "keys selected by the last indexer"


class SelectedKeys(NamedTuple):
    """rows: each query's row of slots; None: every query reads all keys.

    workspace: in which these slots are; None: they are in the cache.
    """

    rows: Segment | None
    workspace: Workspace | None = None


@dataclass
class IndexInputs:
    """q_TJI, key_TI, weights_TJ: an indexer's raw projections.  prep: what they still need."""

    q_TJI: Tensor
    key_TI: Tensor
    weights_TJ: Tensor
    prep: IndexPrep


@dataclass
class SparseLatentInputs(LayerInputs):
    """latents: what a layer of dense latent attention would hand over.  topk: the most keys that a query reads.

    index: of the layer's own indexer; None: the layer reads what the last indexer before it selected.
    """

    latents: LatentInputs
    topk: int
    index: IndexInputs | None

    def paged(self, call: LayerCall) -> Tensor:
        view = call.view
        assert isinstance(view, SparseLatentView), f"sparse layers need a cache of indexer keys, got {type(view).__name__}"
        selected, workspace = self._handed_on(call) if self.index is None else self._select(self.index, call, view)
        if selected is None:
            return self.latents.over(call, view.latents)

        def latents() -> LatentView:
            return view.latents if workspace is None else workspace.converted(view.latents)

        inputs, up_HXC, N, L = self.latents, self.latents.up_HXC, self.latents.nope_dim, self.latents.latent_TL.shape[1]
        R, H, sharded = selected.rows, up_HXC.shape[0], call.plan.context_parallel
        step = max(1, inputs.limits.absorbed // ((1 if sharded is None else sharded.group.size) * H * L))
        if (
            is_traced(inputs.q_THQ) or R <= step
        ):  # a graph can't hold a number of parts that depends on how many tokens there are
            q_RHL = inputs.absorbed(call, view.latents)
            return self._attended(call, latents(), q_RHL, selected)
        store_latent(view.latents, inputs.q_THQ[..., N:], inputs.latent_TL, call.slots_T, inputs.prep)
        q_RHQ = call.asked(inputs.q_THQ)
        out_RHV, read = q_RHQ.new_empty(R, H, up_HXC.shape[1] - N), latents()
        for start in range(0, R, step):
            part = slice(start, min(start + step, R))
            q_rHL = absorbed_queries(q_RHQ[part, :, :N], up_HXC, L, numerics=inputs.numerics)
            q_rHL[..., view.latents.rank :] = q_RHQ[part, :, N:]
            rows = Segment.of_slots(selected.pages.table[part], selected.cache_seqlens[part])
            out_RHV[part] = self._attended(call, read, q_rHL, rows)
        return out_RHV

    def _attended(self, call: LayerCall, latents: LatentView, q_RHL: Tensor, rows: Segment) -> Tensor:
        """[R, H, V]: absorbed queries over the latents of their rows, and of other ranks' rows.

        Kernels may read the rows before their wait: the product that made the queries came after the rows, and waited for them.
        """
        prepared = call.backend.prepare(AttentionPlan((rows,)))
        state = call.finish(call.over_ranks(q_RHL, latents, prepared))
        return absorbed_values(state.out_THD, self.latents.up_HXC[:, self.latents.nope_dim :], self.latents.numerics)

    def _select(self, index: IndexInputs, call: LayerCall, view: SparseLatentView) -> SelectedKeys:
        """Stores the indexer's keys, and selects keys of each asked-for query.

        Where ranks share the keys, a row holds those of the selected ones that this rank reads.
        """
        assert view.index_keys is not None, "the cache has no keys of this layer's indexer"
        weights_TJ = store_index(view.index_keys, index.q_TJI, index.key_TI, index.weights_TJ, call.slots_T, index.prep)
        selected = SelectedKeys(None)
        if not reads_all(call.plan, self.topk):
            q_RJI, weights_RJ = call.asked(index.q_TJI), call.asked(weights_TJ)
            given = q_RJI, weights_RJ, view.index_keys
            if call.plan.context_parallel is None:
                workspace = self._workspace(call, view, q_RJI.shape[0])
                copy = None if workspace is None else workspace.pages
                candidates = call.once("candidates", lambda plan: CandidateKeys.of(plan, q_RJI.shape[0], copy))
                selected = SelectedKeys(sparse_segment(*given, candidates, self.topk), workspace)
            else:
                of_all = call.once("candidates", lambda plan: ShardedCandidates.of(plan, q_RJI.shape[0]))
                selected = SelectedKeys(sharded_segment(*given, of_all, self.topk))
        call.handed_on[SELECTED] = selected
        return selected

    def _workspace(self, call: LayerCall, view: SparseLatentView, queries: int) -> Workspace | None:
        """Where the layers of this pass read converted latents; None: they read the cache."""
        dtype, limits = self.latents.q_THQ.dtype, self.latents.limits
        return call.once("selected workspace", lambda plan: Workspace.of_selected(plan, view.latents, dtype, limits, queries))

    def _handed_on(self, call: LayerCall) -> SelectedKeys:
        """The same of the last indexer, which selected keys for all T tokens."""
        selected: SelectedKeys = call.handed_on[SELECTED]
        if selected.rows is None or call.rows_R is None:
            return selected
        table, lens = (x.index_select(0, call.rows_R) for x in (selected.rows.pages.table, selected.rows.cache_seqlens))
        return selected._replace(rows=Segment.of_slots(table, lens))

    def dense(self) -> DenseHeads:
        return self.latents.dense()

    def dense_as_stored(self, as_stored: Callable[[Tensor], Tensor]) -> DenseHeads:
        return self.latents.dense_as_stored(as_stored)

    def select(self, rows: int, last: Tensor | None) -> Tensor:
        if self.index is None:
            assert last is not None, "the first layer has an indexer"
            return last
        q_TJI = self.index.q_TJI.detach().clone()  # a choice has no gradient
        key_TI, weights_TJ = self.index.prep.apply_(q_TJI, self.index.key_TI.detach(), self.index.weights_TJ.detach())
        sequences = zip(*(x.detach().unflatten(0, (rows, -1)) for x in (q_TJI, weights_TJ, key_TI)), strict=True)
        return torch.stack([selected_keys(q_SJI, weights_SJ, key_SI, self.topk) for q_SJI, weights_SJ, key_SI in sequences])


def selected_keys(q_SJI: Tensor, weights_SJ: Tensor, key_SI: Tensor, topk: int) -> Tensor:
    """[S, S] bool: for each token of one sequence, the best topk keys up to its own."""
    S = q_SJI.shape[0]
    visible_S = torch.arange(1, S + 1, dtype=torch.int32, device=q_SJI.device)
    positions_SK = select_rows(indexer_scores(q_SJI, weights_SJ, key_SI), visible_S, topk).long()
    padded = torch.zeros(S, S + 1, dtype=torch.bool, device=q_SJI.device)  # the last column takes what is no position
    return padded.scatter_(1, torch.where(positions_SK < 0, S, positions_SK), True)[:, :S]


def reads_all(plan: AttentionPlan, topk: int) -> bool:
    """Whether no query of a plan has more than topk keys, as far as the host knows.  A tree's nodes lie in the pages too."""
    first, sharded = plan.parts[0], plan.context_parallel
    max_keys = first.pages.capacity
    if sharded is not None:  # all ranks' pages have room for the whole sequences
        max_keys = sharded.own.pages.capacity * sharded.group.size
        if sharded.own.max_cached is not None:
            max_keys = min(max_keys, sharded.own.max_cached * sharded.group.size + first.pages.capacity)
    elif first.max_cached is not None:
        max_keys = min(max_keys, first.max_cached + first.max_seqlen_q)
    return isinstance(max_keys, int) and max_keys <= topk  # in an exported program, a table's width may be a symbol
