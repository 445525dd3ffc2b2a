"""The one place where models meet attention: store this pass's keys and values, then attend.

Also chooses the backend, and can say why.  Knows neither trees nor phases: a plan says who reads what.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.kv_cache import KVCache
from specdec.attention.segment import AttentionPlan
from specdec.ops.rope import HeadPrep
from specdec.ops.rows import select_rows

BACKENDS = ("torch", "triton", "fa2", "fa3", "fa4")


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
        self.backend, self.cache, self.slots_T = backend, cache, slots_T
        self.prepared = self._by_kind(plan)
        self.rows_prepared = None if rows_plan is None else self._by_kind(rows_plan)

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


class BackendChoice(NamedTuple):
    """name: one of BACKENDS; reason: why `auto` took it, or why a backend can't run (empty: it can)."""

    name: str
    reason: str


def why_not(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Why this backend can't run here; the empty string if it can."""
    if name not in BACKENDS:
        return f"attention must be one of {', '.join(('auto', *BACKENDS))}; got {name!r}"
    if name == "torch":
        return ""
    if name in ("fa2", "fa3", "fa4"):
        return f"attention={name!r} has no door in this version; nearest setting that works: attention='auto'"
    if importlib.util.find_spec("triton") is None:
        return "attention='triton' needs the triton package, which is not installed; nearest: attention='torch'"
    if device.type != "cuda":
        return f"attention='triton' needs a CUDA device, got {device}; nearest setting that works: attention='torch'"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"attention='triton' computes float32, float16 or bfloat16, got {dtype}; nearest: attention='torch'"
    return ""


def choose_backend(name: str, device: torch.device, dtype: torch.dtype) -> BackendChoice:
    """Resolves `auto`, or holds a named backend against the device and dtype.  Raises ValueError if it can't run here."""
    if name == "auto":
        reason = why_not("triton", device, dtype)
        return BackendChoice("torch", reason) if reason else BackendChoice("triton", "CUDA device and triton installed")
    if reason := why_not(name, device, dtype):
        raise ValueError(reason)
    return BackendChoice(name, "asked for by name")


def make_backend(name: str) -> Backend:
    """The backend of that name.  Imports its library only now: `import specdec` needs neither triton nor a GPU."""
    if name == "triton":
        from specdec.attention.triton_backend import TritonBackend

        return TritonBackend()
    assert name == "torch", f"no backend {name!r}"
    from specdec.attention.torch_backend import TorchBackend

    return TorchBackend()
