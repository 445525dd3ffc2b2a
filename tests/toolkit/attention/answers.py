"""The output of an attention backend for a plan, as a layer of a model gets it."""

from __future__ import annotations

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.layout import KVView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import AttentionPlan
from specdec.attention.state import with_sinks


def attended(backend: Backend, q_THD: Tensor, view: KVView, plan: AttentionPlan, scoring: Scoring = PLAIN) -> Tensor:
    """[T, H, E]: attention over all parts of the plan, sinks included."""
    state = backend.attend(q_THD, view, backend.prepare(plan), scoring)
    return with_sinks(state, scoring.sinks_H).out_THD
