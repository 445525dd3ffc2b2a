"""The interface of an attention backend: `store`, `prepare` and `attend`.  This module knows no kernel.

Shapes: T queries or tokens, X = Q + 2K heads of a token, Q (also H) query heads, K kv heads, D head dim,
E value dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec.attention.caches.layout import HeadsView, KVView
from specdec.attention.caches.split_cache import QuantSplitView, SplitView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_all, merge_states, with_sinks
from specdec.ops.rope import HeadPrep


def is_first_call(checked: set[tuple[object, ...]], kind: tuple[object, ...], device: torch.device) -> bool:
    """Whether a library is asked for the first time for calls of that kind, and may be checked now; `checked` then holds it.

    A graph capture is no time for a check, which reads the device.
    """
    if kind in checked or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    checked.add(kind)
    return True


class Backend(ABC):
    """An attention backend.  `run` answers one segment, `attend` a whole plan.

    Both return states that leave attention sinks out: sinks belong to no segment.  `attend_with_sinks` adds them once, to the
    state that a layer ends with.  A backend that computes several segments in one launch overrides `attend`.
    """

    name: ClassVar[str]
    reads_no_lengths: ClassVar[bool] = (
        False  # True: lengths stay on the device, so ragged batches of prompts can be graph-captured too
    )

    @abstractmethod
    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        """The partial softmax state of every query over the keys of its row."""

    def store(self, view: HeadsView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        """Norms and rotates heads as `prep` says, writes keys and values to their slots (int64 [T]), returns the queries [T, Q,
        D].

        If a slot occurs twice (padding tokens share one), it ends up with either token's values.  The input may be changed.
        """
        q_TQD, kv_T2KD = prep.apply_(qkv_TXD)
        view.write(slots_T, kv_T2KD)
        return q_TQD

    def store_rows(self, view: SplitView | QuantSplitView, rows_TC: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        """`store` for rows [T, (Q + K) D + K E] of heads whose values have another width than keys."""
        (_, _, D), (_, _, E) = (x.shape for x in view.heads)
        q_TQD, k_TKD, v_TKE = prep.apply_rows_(rows_TC, D, E)
        view.write_heads(slots_T, k_TKD, v_TKE)
        return q_TQD

    def store_and_attend(
        self, view: HeadsView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep, prepared: Any, scoring: Scoring = PLAIN
    ) -> AttentionState | None:
        """`store`, and then `attend_with_sinks` of all queries, where the backend does both at once.

        None: it does not in this case, and has done nothing.
        """
        return None

    def rotate(self, q_TQD: Tensor, prep: HeadPrep) -> Tensor:
        """Norms and rotates the queries of a layer that stores nothing; prep has 0 kv heads.  The input may be changed."""
        return prep.apply_(q_TQD)[0]

    def prepare(self, plan: AttentionPlan) -> Any:
        """The work on a plan that all layers share, done once a forward pass.  `attend` receives what this method returns."""
        return plan

    def attend(self, q_THD: Tensor, view: KVView, prepared: Any, scoring: Scoring = PLAIN) -> AttentionState:
        """The state over all parts of the prepared plan, without sinks."""
        return merge_all([self.run(q_THD, view, segment, scoring) for segment in prepared.parts])

    def attend_after(
        self, prefix: AttentionState, q_THD: Tensor, view: KVView, prepared: Any, scoring: Scoring = PLAIN
    ) -> AttentionState:
        """As `attend`, with the state over other keys merged in; prefix: contiguous, in the queries' dtype."""
        return merge_states(prefix, self.attend(q_THD, view, prepared, scoring))

    def attend_with_sinks(
        self, q_THD: Tensor, view: KVView, prepared: Any, scoring: Scoring = PLAIN, prefix: AttentionState | None = None
    ) -> AttentionState:
        """The state that a layer ends with: of `attend`, or of `attend_after` if there is a prefix, with the layer's sinks.

        No other state may be merged into it.  A backend that can add sinks while it merges states overrides this method.
        """
        if prefix is None:
            state = self.attend(q_THD, view, prepared, scoring)
        else:
            state = self.attend_after(prefix, q_THD, view, prepared, scoring)
        return with_sinks(state, scoring.sinks_H)
