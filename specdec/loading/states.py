"""Decides how many states of recurrent layers there are, and how many bytes they take: two a row, and those kept for prompts.

This module knows a target's config and settings; it allocates nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from specdec.limits import RESERVED_STATES
from specdec.loading.resolve import EngineSettings
from specdec.models.config import ModelConfig


class StatePlan(NamedTuple):
    """with_nodes: the numbers of states that a tree's nodes may follow: all but the kept ones, which come last.

    nodes: the most of one tree.  kept: how many states are kept for later prompts.  state_bytes, node_bytes: of all layers.
    """

    with_nodes: int
    nodes: int
    kept: int
    state_bytes: int
    node_bytes: int

    @property
    def numbers(self) -> int:
        return self.with_nodes + self.kept

    @property
    def row_bytes(self) -> int:
        """What a row of the batch takes: two states, and what nodes leave beside each."""
        return 2 * (self.state_bytes + self.nodes * self.node_bytes)

    @property
    def bytes(self) -> int:
        return self.numbers * self.state_bytes + self.with_nodes * self.nodes * self.node_bytes


def plan_states(target: ModelConfig, settings: EngineSettings, memory: float) -> StatePlan | None:
    """The states of a target's recurrent layers; None: it has none.  memory: bytes for them and the KV pool together."""
    sizes, layers, spec = target.recurrent, len(target.recurrent_layers), settings.spec
    if sizes is None:
        return None
    nodes = max(shape.num_draft_tokens for shape in spec.shapes) if spec else 1
    rows = RESERVED_STATES + 2 * settings.options.max_batch_size
    each = layers * sizes.state_bytes(settings.dtype), layers * sizes.node_bytes(settings.dtype)
    return StatePlan(rows, nodes, 0, *each)
