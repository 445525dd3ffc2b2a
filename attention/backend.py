"""What an attention backend is: store, prepare, attend.  Knows no kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from specdec.attention.caches.kv_cache import KVView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_states, with_sinks
from specdec.ops.rope import HeadPrep


class Backend(ABC):
    """`run` answers one segment; `attend` a whole plan.  A backend that can fuse segments overrides `attend`."""

    name: ClassVar[str]
    reads_no_lengths: ClassVar[bool] = False  # never from the device, so that packed prompts can be captured too

    @abstractmethod
    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        """The state of every query over the keys of its row.  Sinks are not in it: they belong to no segment."""

    def store(self, view: KVView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        """Norms and rotates as `prep` says, writes keys and values to their slots (int64), and returns the queries.

        Slots that occur twice (padding) get either value.  The input may be changed.
        """
        q_TQD, kv_T2KD = prep.apply_(qkv_TXD)
        view.write(slots_T, kv_T2KD)
        return q_TQD

    def prepare(self, plan: AttentionPlan) -> Any:
        """Work on a plan that all layers share, done once a forward pass.  What it returns goes to `attend`."""
        return plan

    def attend(self, q_THD: Tensor, view: KVView, prepared: Any, scoring: Scoring = PLAIN) -> Tensor:
        """Attention over all segments of the prepared plan, and the sinks: out [T, H, D]."""
        state, *rest = [self.run(q_THD, view, segment, scoring) for segment in prepared.parts]
        for other in rest:
            state = merge_states(state, other)
        return (state if scoring.sinks_H is None else with_sinks(state, scoring.sinks_H)).out_THD
