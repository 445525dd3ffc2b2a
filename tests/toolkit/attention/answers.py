"""The output of an attention backend for a plan, as a layer of a model gets it."""

from __future__ import annotations

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.layout import KVView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import AttentionPlan


def attended(backend: Backend, q_THD: Tensor, view: KVView, plan: AttentionPlan, scoring: Scoring = PLAIN) -> Tensor:
    """[T, H, E]: attention over all parts of the plan, sinks included."""
    return backend.attend_with_sinks(q_THD, view, backend.prepare(plan), scoring).out_THD
