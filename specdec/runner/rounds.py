"""Runs rounds on the device: draft -> build tree -> verify -> accept -> commit -> extend, captured as CUDA graphs.

This module knows both models' workers and the batch as tensors; it knows no request, no page and no length on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import GraphMode, SpecConfig
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.phase_clock import PhaseClock
from specdec.runner.workers import Workers
from specdec.steps import Needs
from specdec.verify.verifier import VerifyResult

RunPhase = Callable[[Hashable, Callable[[], Any], list[Tensor]], Any]


class Round(NamedTuple):
    """What a round emitted.

    emitted_BX: int64; each row holds the count of its accepted draft tokens, the emitted tokens, and in the last two places how
        many draft tokens of the tree's best path were accepted, and how many that path has.
    drafted, depths: how many draft tokens and levels the round's tree had.
    logprobs_BEX: float64, of the emitted tokens; None if they were not asked for.
    """

    emitted_BX: Tensor
    drafted: int
    depths: int
    logprobs_BEX: Tensor | None


class RoundRunner:
    """Runs rounds, eagerly or by replaying graphs; both run the same code.

    graphs: "round" captures a whole round as one graph; "step" captures each phase as a graph of its own; False
        captures nothing.
    clock: measures phases.  While it is enabled, each phase runs as a graph of its own, in the mode "round" too.
    """

    def __init__(self, workers: Workers, graphs: GraphMode, clock: PhaseClock) -> None:
        self.workers, self.graph_mode, self.clock = workers, graphs, clock
        self.round_graphs = GraphSet(graphs == "round")
        self.phase_graphs = GraphSet(bool(graphs))

    def plain(self, state: BatchState, needs: Needs) -> Round:
        """One step of plain decoding: verifies a tree that is only a root, which needs no drafter and no features."""
        verifier = self.workers.verifier

        def decode() -> Round:
            tree = DraftTree.chain(state.bonus_B[:, None])
            return _round(verifier.verify(state, tree, needs, with_features=False), tree)

        with self.clock.phase("decode"):
            return self.phase_graphs.run(("decode", state.shape, needs), decode, state.written(needs))

    def paused(self, state: BatchState, needs: Needs) -> Round:
        """One step of plain decoding that keeps the token and the features which the drafter will need in `catch_up`."""
        verifier, drafter = self.workers.verifier, self.workers.need_drafter()

        def decode() -> Round:
            tree = DraftTree.chain(state.bonus_B[:, None])
            result = verifier.verify(state, tree, needs)
            features_BF = None if result.features_BEF is None else result.features_BEF[:, 0]
            drafter.keep(state, result.base_lens_B, result.tokens_BE[:, 0].clamp(min=0), features_BF)
            return _round(result, tree)

        with self.clock.phase("decode"):
            changed = [*state.written(needs), *drafter.changed(state)]
            return self.phase_graphs.run(("paused", state.shape, needs), decode, changed)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        """Has the drafter learn all tokens of a pause at once."""
        drafter = self.workers.need_drafter()
        changed = drafter.changed(state)
        if not changed:  # a drafter that keeps nothing has nothing to learn
            return
        with self.clock.phase("extend"):
            key = "catch up", state.shape, needs.drafts
            self.phase_graphs.run(key, lambda: drafter.catch_up(state, needs), changed)

    def speculative(self, state: BatchState, spec: SpecConfig, needs: Needs) -> Round:
        """One speculative round with a tree of shape `spec`.  Updates lengths and bonus tokens, and the drafter's rows."""
        if not self._fuses:
            return self._phases(state, spec, needs, self.phase_graphs.run)
        changed = [*state.written(needs), *self.workers.need_drafter().changed(state)]

        def whole() -> Round:
            return self._phases(state, spec, needs, lambda key, phase, changed: phase())

        return self.round_graphs.run(("round", state.shape, spec, needs), whole, changed)

    @property
    def _fuses(self) -> bool:
        """Whether the next round runs as one piece, so that the host can do nothing between its phases."""
        return self.graph_mode == "round" and not self.clock.enabled

    def _phases(self, state: BatchState, spec: SpecConfig, needs: Needs, run: RunPhase) -> Round:
        verifier, drafter, key = self.workers.verifier, self.workers.need_drafter(), (state.shape, spec, needs)
        with self.clock.phase("draft"):
            tree = run(("draft", state.shape, spec, needs.drafts), lambda: drafter.draft(state, spec, needs), [])

        def verify() -> tuple[VerifyResult, Round]:
            result = verifier.verify(state, tree, needs)
            return result, _round(result, tree)

        with self.clock.phase("verify"):
            result, done = run(("verify", *key), verify, state.written(needs))

        def extend() -> None:
            drafter.extend(state, needs, result.base_lens_B, result.tokens_BE, result.accepted_B, result.features_BEF)

        with self.clock.phase("extend"):
            run(("extend", *key), extend, drafter.changed(state))
        return done


def _round(result: VerifyResult, tree: DraftTree) -> Round:
    return Round(result.emitted_BX, tree.num_nodes - 1, tree.max_depth, result.logprobs_BEX)
