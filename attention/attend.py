"""The one place where models meet attention: it stores this pass's keys and values, then attends.

This module also constructs the attention backend that was chosen.  It knows neither trees nor phases: a plan says which query
reads which keys.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.capabilities import BackendChoice
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.latent.latent import LatentFn
from specdec.attention.latent.mla import MLAttention
from specdec.attention.segment import AttentionPlan
from specdec.ops.rope import HeadPrep
from specdec.ops.rows import select_rows


class PagedAttention:
    """One forward pass's attention, which each layer calls with its qkv projection: `attn(layer, qkv_TXD, prep) -> out_TQD`.

    Shapes: T tokens, Q query heads, X = Q + 2 * kv heads, D head dim, R selected tokens.
    cache: where the pass's keys and values are stored.
    plan: which query reads which keys.
    slots_T: int64, the cache slot of each of this pass's tokens.
    rows_plan: the plan of the selected tokens where a layer wants the attention of some tokens only: `attn(layer, qkv_TXD,
        prep, rows_R) -> out_RQD`.
    Both plans describe layers that read every key.  For windowed and chunked layers this class derives plans from them, once
    for all layers of a kind.
    """

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        plan: AttentionPlan,
        slots_T: Tensor,
        rows_plan: AttentionPlan | None = None,
        sources: KVCache | None = None,
    ) -> None:
        self.sources = sources
        self._cross = None if sources is None else self.backend_prepare(backend, plan)
        self.backend, self.cache, self.plan, self.slots_T = backend, cache, plan, slots_T
        self.prepared = self._by_kind(plan)
        self.rows_prepared = None if rows_plan is None else self._by_kind(rows_plan)
        self._latent: LatentFn | None = None

    def backend_prepare(self, backend, plan):
        return backend.prepare(AttentionPlan((plan.cross,)))

    def cross(self, layer, q_TQD, scoring):
        return self.backend.attend(q_TQD, self.sources.view(layer), self._cross, scoring)

    def _by_kind(self, plan: AttentionPlan) -> dict[LayerKind, Any]:
        return {kind: self.backend.prepare(plan.local(kind)) for kind in dict.fromkeys(self.cache.kinds)}

    def __call__(
        self, layer: int, qkv_TXD: Tensor, prep: HeadPrep, rows_R: Tensor | None = None, scoring: Scoring = PLAIN
    ) -> Tensor:
        view, kind = self.cache.view(layer), self.cache.kinds[layer]
        q_TQD = self.backend.store(view, qkv_TXD, self.slots_T, prep)
        if rows_R is None:
            return self.backend.attend(q_TQD, view, self.prepared[kind], scoring)
        assert self.rows_prepared is not None, "rows need a plan of their own"
        q_RQD = select_rows(q_TQD.flatten(1), rows_R).unflatten(1, q_TQD.shape[1:])
        return self.backend.attend(q_RQD, view, self.rows_prepared[kind], scoring)

    def latent(self) -> LatentFn:
        """The same pass for layers of latent attention, whose cache holds latents.  The object is made once and shared by all
        layers.
        """
        if self._latent is None:
            self._latent = MLAttention(self.backend, self.cache, self.plan, self.slots_T, self.prepared, self.rows_prepared)
        return self._latent


def make_backend(choice: BackendChoice | str) -> Backend:
    """The attention backend that was chosen, or the one of that name ("torch", "triton", "fa2", "fa3" or "fa4").

    The backend's library is imported here and not before, so `import specdec` needs neither triton nor a GPU.
    """
    name, by_rule = (choice, False) if isinstance(choice, str) else (choice.name, choice.by_rule)
    if name == "torch":
        from specdec.attention.eager.torch_backend import TorchBackend

        return TorchBackend()
    if name == "triton":
        from specdec.attention.kernels.triton_backend import TritonBackend

        return TritonBackend()
    from specdec.attention.flash.backend import FlashBackend

    return FlashBackend(name, by_rule)
