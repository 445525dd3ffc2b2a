"""The attention of one forward pass over a paged cache: the one place where models meet plans and caches.

This module also constructs the attention backend that was chosen.  It knows neither trees nor phases, nor any kind of attention
layer: a plan says which query reads which keys, and a layer's inputs say what is stored and attended to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.capabilities import TABLE, BackendChoice, Table
from specdec.attention.inputs import LayerCall, LayerInputs, PreparedPlan
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import AttentionPlan
from specdec.ops.products.numerics import FAST, Numerics


class PassTables(NamedTuple):
    """Where the tokens of one forward pass stand in one group of layers.  Both plans describe layers that read every key.

    plan: which of the T tokens reads which keys.
    slots_T: int64, the cache slot of each token.
    rows_plan: the plan of some tokens alone, for layers that want the attention of no others.
    Both plans say which text of an encoder a query reads, if layers of cross attention are to read one.
    """

    plan: AttentionPlan
    slots_T: Tensor
    rows_plan: AttentionPlan | None = None


class PagedAttention:
    """One forward pass's attention (an AttentionFn).

    cache: where the pass's tokens are stored.  tables: one for each of cache.group_numbers, in that order.
    encoder_cache: an encoder's texts, which all groups' plans name alike; None for a model without one.
    """

    def __init__(self, backend: Backend, cache: KVCache, *tables: PassTables, encoder_cache: KVCache | None = None) -> None:
        self.backend, self.cache, self.encoder_cache = backend, cache, encoder_cache
        self._handed_on: dict[str, Any] = {}
        self._groups = {  # by group: slots, and the plans of all tokens and of some
            group: (each.slots_T, PreparedPlan(each.plan), None if each.rows_plan is None else PreparedPlan(each.rows_plan))
            for group, each in zip(cache.group_numbers, tables, strict=True)
        }

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        slots_T, of_all, of_rows = self._groups[self.cache.groups[layer]]
        prepared = of_all if rows_R is None else of_rows
        assert prepared is not None, "rows need a plan of their own"
        view, kind = self.cache.view(layer), self.cache.kinds[layer]
        encoder_cache = None if self.encoder_cache is None else self.encoder_cache.view(layer)
        call = LayerCall(self.backend, view, kind, slots_T, prepared, rows_R, scoring, self._handed_on, encoder_cache)
        return inputs.paged(call)


def make_backend(choice: BackendChoice | str, numerics: Numerics = FAST, table: Table = TABLE) -> Backend:
    """The attention backend that was chosen, or the one of that name, one of those in the table.

    numerics: an invariant policy needs a backend that is deterministic by the table.

    The backend's library is imported here and not before, so `import specdec` needs neither triton nor a GPU.
    """
    if isinstance(choice, str):
        choice = BackendChoice(choice, "")
    if numerics.is_invariant:
        assert choice.name == "triton", choice
        from specdec.attention.invariant.backend import InvariantBackend

        return InvariantBackend()
    return table[choice.name].make(choice.by_rule)
