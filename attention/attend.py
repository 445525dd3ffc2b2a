"""The one place where models meet attention: store this pass's keys and values, then attend.

Also makes the backend that was chosen.  Knows neither trees nor phases: a plan says who reads what.
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
    """One forward pass's attention, called by each layer with its qkv projection: `attn(layer, qkv_TXD, prep) -> out_TQD`.

    cache: where keys and values go; plan: who reads what; slots_T: int64, where this pass's tokens are stored.  rows_plan:
    who reads what where a layer asks for some rows only, `attn(layer, qkv_TXD, prep, rows_R) -> out_RQD`.  Both are given
    as a full layer reads them; what other kinds of layers read is made from them here, once for all layers of a kind.
    """

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        plan: AttentionPlan,
        slots_T: Tensor,
        rows_plan: AttentionPlan | None = None,
    ) -> None:
        self.backend, self.cache, self.plan, self.slots_T = backend, cache, plan, slots_T
        self.prepared = self._by_kind(plan)
        self.rows_prepared = None if rows_plan is None else self._by_kind(rows_plan)
        self._latent: LatentFn | None = None

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
        """The same pass for layers of latent attention, whose cache keeps latents; what they share is made once."""
        if self._latent is None:
            self._latent = MLAttention(self.backend, self.cache, self.plan, self.slots_T, self.prepared, self.rows_prepared)
        return self._latent


def make_backend(choice: BackendChoice | str) -> Backend:
    """The backend chosen, or of that name.  Imports its library only now: `import specdec` needs neither triton nor a GPU."""
    name, by_rule = (choice, False) if isinstance(choice, str) else (choice.name, choice.by_rule)
    if name == "torch":
        from specdec.attention.eager.torch_backend import TorchBackend

        return TorchBackend()
    if name == "triton":
        from specdec.attention.kernels.triton_backend import TritonBackend

        return TritonBackend()
    from specdec.attention.flash.backend import FlashBackend

    return FlashBackend(name, by_rule)
