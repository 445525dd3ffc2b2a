"""What one layer hands to the attention of a forward pass, and how ordinary heads answer.

Each kind of attention layer has inputs of its own (ordinary heads here, latents in attention/latent/).  The inputs know how a
layer's queries are made, what the layer keeps of each token, and what remains to be done with attention's output; they know
neither pages nor which query reads which key.  A LayerCall tells them that.

Shapes: T tokens, B rows of S tokens each, R asked-for tokens, Q (also H) query heads, K kv heads, X = Q + 2K, D head dim, E
value dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.layout import HeadsView, KVView
from specdec.attention.caches.split_cache import QuantSplitView, SplitView
from specdec.attention.context_parallel.all_to_all import all_to_all_states, gather_states
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.segment import AttentionPlan, LaterQueries
from specdec.attention.state import AttentionState, with_sinks
from specdec.ops.rope import HeadPrep
from specdec.ops.rows import select_rows

Made = TypeVar("Made")


@dataclass
class PreparedPlan:
    """A plan for the queries of one pass, and its form for each kind of layer, made when the first such layer asks.

    once: what layers of the pass share besides, by name.
    """

    plan: AttentionPlan
    once: dict[str, Any] = field(default_factory=dict)
    _by_kind: dict[LayerKind, tuple[Any, Any]] = field(default_factory=dict)
    _apart: list[PreparedPlan] = field(default_factory=list)

    def apart(self, later: LaterQueries) -> list[PreparedPlan]:
        """The plan without its later queries, and theirs."""
        if not self._apart:
            self._apart += [PreparedPlan(replace(self.plan, later=None)), PreparedPlan(later.plan)]
        return self._apart

    def of(self, kind: LayerKind, backend: Backend) -> Any:
        """What `backend.attend` needs for a layer of that kind."""
        return self._of(kind, backend)[0]

    def sharded_of(self, kind: LayerKind, backend: Backend) -> Any:
        """The same for what this rank keeps of a prefix that ranks shard."""
        return self._of(kind, backend)[1]

    def _of(self, kind: LayerKind, backend: Backend) -> tuple[Any, Any]:
        if kind not in self._by_kind:
            plan = self.plan.local(kind)
            sharded = plan.context_parallel and backend.prepare(AttentionPlan((plan.context_parallel.own,)))
            self._by_kind[kind] = backend.prepare(plan), sharded
        return self._by_kind[kind]


class LayerCall(NamedTuple):
    """One layer's call of attention, as the layer's inputs see it.

    view: the layer's part of the cache.
    kind: which keys the layer reads.
    slots_T: int64, the cache slot of each of this pass's tokens.
    prepared: the plan of the queries that the layer asks for: all T tokens', or those of rows_R.
    rows_R: int64, the tokens whose attention the layer wants; None stands for all.
    handed_on: what layers of this pass left for later ones, by name.
    encoder_cache: the layer's part of the cache of an encoder's texts; None for a model without an encoder.
    """

    backend: Backend
    view: KVView
    kind: LayerKind
    slots_T: Tensor
    prepared: PreparedPlan
    rows_R: Tensor | None
    scoring: Scoring
    handed_on: dict[str, Any]
    encoder_cache: KVView | None = None

    @property
    def plan(self) -> AttentionPlan:
        """The plan of the asked-for queries, as a layer reads it that reads every key."""
        return self.prepared.plan

    def asked(self, x: Tensor) -> Tensor:
        """The asked-for rows of a tensor [T, ...]."""
        return x if self.rows_R is None else select_rows(x.flatten(1), self.rows_R).unflatten(1, x.shape[1:])

    def attend(self, q_THD: Tensor, view: KVView | None = None) -> Tensor:
        """[T, H, E]: the asked-for queries' attention by the layer's plan.  view: read in place of the layer's own."""
        if (later := self.plan.later) is not None:
            first, others = (self._replace(prepared=each) for each in self.prepared.apart(later))
            return torch.cat((first.attend(q_THD[: later.begin], view), others.attend(q_THD[later.begin :], view)))
        prepared, backend, view = self.prepared.of(self.kind, self.backend), self.backend, self.view if view is None else view
        prefix = None
        if self.plan.context_parallel is not None:
            prefix = self.over_ranks(q_THD, view, self.prepared.sharded_of(self.kind, backend))
        return backend.attend_with_sinks(q_THD, view, prepared, self.scoring, prefix).out_THD

    def store_and_attend(self, view: HeadsView, qkv_TXD: Tensor, prep: HeadPrep) -> AttentionState | None:
        """The layer's state, if the backend stores the pass's tokens and attends to all of them at once."""
        if self.rows_R is not None or self.plan.later is not None or self.plan.context_parallel is not None:
            return None
        prepared = self.prepared.of(self.kind, self.backend)
        return self.backend.store_and_attend(view, qkv_TXD, self.slots_T, prep, prepared, self.scoring)

    def over_ranks(self, q_THD: Tensor, view: KVView, prepared: Any) -> AttentionState:
        """The state of this rank's heads over what all ranks read.  prepared: the prepared plan of what this one reads."""
        sharded, backend = self.plan.context_parallel, self.backend
        if sharded is None:
            return backend.attend(q_THD, view, prepared, self.scoring)
        if sharded.has_all_heads:
            return gather_states(backend.attend(q_THD, view, prepared, self.scoring), sharded.group)
        q_THD = sharded.group.all_gather_heads(q_THD)
        return all_to_all_states(backend.attend(q_THD, view, prepared, self.scoring), sharded.group)

    def finish(self, state: AttentionState) -> AttentionState:
        """Adds the layer's sinks to a state of other calls of the backend, after all states have been merged."""
        return with_sinks(state, self.scoring.sinks_H)

    def once(self, name: str, make: Callable[[AttentionPlan], Made]) -> Made:
        """What `make` returns for this pass's plan: made when the first layer asks, the same object for all others."""
        made = self.prepared.once
        if name not in made:
            made[name] = make(self.plan)
        result: Made = made[name]
        return result


class DenseHeads(NamedTuple):
    """The queries, keys and values of a pass's tokens, with nothing cached: [T, Q, D], [T, K, D] and [T, K, E]."""

    q_TQD: Tensor
    k_TKD: Tensor
    v_TKE: Tensor


class LayerInputs(ABC):
    """What one layer hands to attention for the T tokens of a pass.  An object is used once: it may change its tensors."""

    @abstractmethod
    def paged(self, call: LayerCall) -> Tensor:
        """Stores what the layer keeps of all T tokens, and returns the attention of the asked-for ones."""

    @abstractmethod
    def dense(self) -> DenseHeads:
        """The same tokens' queries, keys and values, where no cache is used: in training, and in checks."""

    def dense_as_stored(self, as_stored: Callable[[Tensor], Tensor]) -> DenseHeads:
        """`dense`, over what a cache would give back.  as_stored: rounds what the layer keeps: here keys and values
        [T, 2, K, D].
        """
        heads = self.dense()
        return DenseHeads(heads.q_TQD, *as_stored(torch.stack(heads[1:], dim=1)).unbind(1))

    def select(self, rows: int, last: Tensor | None) -> Tensor | None:
        """[B, S, S] bool: which of its row's S tokens each token reads over `dense`, where the layer itself selects keys.

        rows: B.  last: what the last layer of the pass that selects keys returned.  None: the layer reads all that its kind
            lets it.
        """
        return None

    def finish(self, out_TQE: Tensor) -> Tensor:
        """What `paged` returns, from the attention over `dense`."""
        return out_TQE

    def whole_rows(self, rows: int) -> Tensor | None:
        """[T, H, E]: the layer's output where it attends to no keys, for rows of equally many tokens, from their first on.

        None: it attends to those of `dense`.
        """
        return None


@dataclass
class HeadInputs(LayerInputs):
    """Ordinary heads.  qkv_TXD: the raw projections, query heads, then key heads, then value heads.

    prep: the norm and the rotation that queries and keys still need.
    """

    qkv_TXD: Tensor
    prep: HeadPrep

    def paged(self, call: LayerCall) -> Tensor:
        view = cast(HeadsView, call.view)
        assert hasattr(view, "write"), f"heads of one width need a cache of such heads, got {view}"
        if (state := call.store_and_attend(view, self.qkv_TXD, self.prep)) is not None:
            return state.out_THD
        return call.attend(call.asked(call.backend.store(view, self.qkv_TXD, call.slots_T, self.prep)))

    def dense(self) -> DenseHeads:
        q_TQD, kv_T2KD = self.prep.apply_(self.qkv_TXD)
        return DenseHeads(q_TQD, kv_T2KD[:, 0], kv_T2KD[:, 1])


@dataclass
class SplitInputs(LayerInputs):
    """Heads whose values have a width of their own, normed and rotated: [T, Q, D], [T, K, D] and [T, K, E]."""

    heads: DenseHeads

    def paged(self, call: LayerCall) -> Tensor:
        assert isinstance(call.view, SplitView | QuantSplitView), (
            f"values of another width need their own cache, got {call.view}"
        )
        call.view.write_heads(call.slots_T, self.heads.k_TKD, self.heads.v_TKE)
        return call.attend(call.asked(self.heads.q_TQD))

    def dense(self) -> DenseHeads:
        return self.heads

    def dense_as_stored(self, as_stored: Callable[[Tensor], Tensor]) -> DenseHeads:
        return _rows_as_stored(self.heads, as_stored)


def _rows_as_stored(heads: DenseHeads, as_stored: Callable[[Tensor], Tensor]) -> DenseHeads:
    """`LayerInputs.dense_as_stored`, where a cache keeps a row [K D + K E] of a token."""
    q_TQD, k_TKD, v_TKE = heads
    rows = as_stored(torch.cat((k_TKD.flatten(1), v_TKE.flatten(1)), dim=1)).split((k_TKD[0].numel(), v_TKE[0].numel()), 1)
    return DenseHeads(q_TQD, *(x.unflatten(1, (k_TKD.shape[1], -1)) for x in rows))


@dataclass
class RowInputs(LayerInputs):
    """Heads whose values have a width of their own, as their projections leave them: rows_TC, [T, (Q + K) D + K E].

    head_dim, value_dim: D and E.  prep: what queries, keys and values still need.
    """

    rows_TC: Tensor
    head_dim: int
    value_dim: int
    prep: HeadPrep

    def paged(self, call: LayerCall) -> Tensor:
        assert isinstance(call.view, SplitView | QuantSplitView), f"unlike widths need a cache of rows, got {call.view}"
        return call.attend(call.asked(call.backend.store_rows(call.view, self.rows_TC, call.slots_T, self.prep)))

    def dense(self) -> DenseHeads:
        return DenseHeads(*self.prep.apply_rows_(self.rows_TC, self.head_dim, self.value_dim))

    def dense_as_stored(self, as_stored: Callable[[Tensor], Tensor]) -> DenseHeads:
        return _rows_as_stored(self.dense(), as_stored)


@dataclass
class QueryInputs(HeadInputs):
    """Heads of a layer that reads the keys and values of an earlier layer.  The call's view is that layer's.

    qkv_TXD: queries alone, of the asked-for tokens alone; prep has 0 kv heads.  `dense` returns no keys and values: an
        attention without a cache keeps the earlier layer's.
    """

    def paged(self, call: LayerCall) -> Tensor:
        return call.attend(call.backend.rotate(self.qkv_TXD, self.prep))


class AttentionFn(Protocol):
    """The attention of one forward pass: over paged caches in the runtime, over dense tensors in training.

    layer: number of the calling layer, which selects the layer's cache.
    inputs: what the layer hands over.
    rows_R: indices of the tokens whose queries are to be answered; None stands for all.  What the layer keeps of all T tokens
        is stored either way.
    scoring: how the layer turns products of queries and keys into attention weights.
    The result is the attention output of all query heads, [T, Q, E], or [R, Q, E] with rows_R.
    """

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor: ...
