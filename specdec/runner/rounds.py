"""Runs rounds on the device: draft -> build tree -> verify -> accept -> commit -> extend, captured as CUDA graphs.

This module knows both models' workers and the batch as tensors; it knows no request, no page and no length on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import GraphMode, SpecConfig
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.grammars import GrammarRows
from specdec.runner.phase_clock import PhaseClock
from specdec.runner.workers import Workers
from specdec.steps import Needs, RunRound
from specdec.verify.verifier import TreePass, VerifyResult

R = TypeVar("R")
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
    grammars: makes the masks of rows that have a grammar.
    """

    def __init__(self, workers: Workers, graphs: GraphMode, clock: PhaseClock, grammars: GrammarRows) -> None:
        self.workers, self.graph_mode, self.clock, self.grammars = workers, graphs, clock, grammars
        self.round_graphs = GraphSet(graphs == "round")
        self.phase_graphs = GraphSet(bool(graphs))

    def run(self, state: BatchState, step: RunRound) -> Round:
        """Runs the round over these rows.  It updates lengths and bonus tokens, and the drafter's rows."""
        if step.kind == "speculative" and self._fuses(step.needs):
            return self._whole(state, step)
        return self._by_phases(state, step, self.phase_graphs.run)

    def rehearse(self, state: BatchState, step: RunRound) -> None:
        """Runs the round as a rehearsal (ops/compiling/rehearsal.py) does: it captures nothing."""
        self._by_phases(state, step, lambda key, phase, changed: phase())

    def _by_phases(self, state: BatchState, step: RunRound, run: RunPhase) -> Round:
        if step.kind == "speculative":
            assert step.spec is not None
            return self._phases(state, step.spec, step.needs, run)
        return self._paused(state, step.needs, run) if step.kind == "paused" else self._plain(state, step.needs, run)

    def _plain(self, state: BatchState, needs: Needs, run: RunPhase) -> Round:
        """One step of plain decoding: verifies a tree that is only a root, which needs no drafter and no features."""
        tree = DraftTree.chain(state.bonus_B[:, None])
        with self.clock.phase("decode"):
            key, changed = ("decode", state.shape, needs), state.written(needs)
            return self._verify(
                state,
                tree,
                needs,
                key,
                run,
                lambda result: _round(result, tree),
                changed,
                with_features=False,
            )

    def _paused(self, state: BatchState, needs: Needs, run: RunPhase) -> Round:
        """One step of plain decoding that keeps the token and the features which the drafter will need in `catch_up`."""
        drafter, tree = self.workers.need_drafter(), DraftTree.chain(state.bonus_B[:, None])

        def keep(result: VerifyResult) -> Round:
            features_BF = None if result.features_BEF is None else result.features_BEF[:, 0]
            drafter.keep(state, result.base_lens_B, result.tokens_BE[:, 0].clamp(min=0), features_BF)
            return _round(result, tree)

        with self.clock.phase("decode"):
            changed = [*state.written(needs), *drafter.changed(state)]
            return self._verify(state, tree, needs, ("paused", state.shape, needs), run, keep, changed)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        """Has the drafter learn all tokens of a pause at once."""
        drafter = self.workers.need_drafter()
        changed = drafter.changed(state)
        if not changed:  # a drafter that keeps nothing has nothing to learn
            return
        with self.clock.phase("extend"):
            key = "catch up", state.shape, needs.drafts
            self.phase_graphs.run(key, lambda: drafter.catch_up(state, needs), changed)

    def _whole(self, state: BatchState, step: RunRound) -> Round:
        """A speculative round as one graph."""
        changed = [*state.written(step.needs), *self.workers.need_drafter().changed(state)]
        key = "round", state.shape, step.spec, step.needs
        return self.round_graphs.run(key, lambda: self._by_phases(state, step, lambda key, phase, changed: phase()), changed)

    def _fuses(self, needs: Needs) -> bool:
        """Whether the next round runs as one piece, so that the host can do nothing between its phases."""
        return self.graph_mode == "round" and not self.clock.enabled and not needs.grammar

    def _verify(
        self,
        state: BatchState,
        tree: DraftTree,
        needs: Needs,
        key: tuple[Hashable, ...],
        run: RunPhase,
        after: Callable[[VerifyResult], R],
        changed: list[Tensor],
        with_features: bool = True,
    ) -> R:
        """Verifies trees: after(result).  changed: the tensors that this and `after` change.

        Where a row has a grammar, drafts that break it leave the trees before the target reads them, and the host makes masks
        while the device runs the target.
        """
        verifier = self.workers.verifier
        if not needs.grammar:
            return run(key, lambda: after(verifier.verify(state, tree, needs, with_features)), changed)
        trees = self.grammars.complete(tree)

        def read() -> TreePass:
            return run(("read", *key), lambda: verifier.read_tree(state, tree, with_features), [])

        done = read()
        masks = self.grammars.of_round(state.rows, tree.num_nodes, trees)
        self._end_drafts(state.rows)

        def choose() -> tuple[Tensor, R]:
            result = verifier.choose(state, tree, needs, done, with_features, masks)
            return result.emitted_BX, after(result)

        # A warm-up moves the accepted path's keys and values, so the tree is read again after it.
        emitted_BX, said = self.phase_graphs.run(("choose", *key), choose, changed, before=read)
        self.grammars.follow_round(emitted_BX)
        return cast(R, said)

    def _end_drafts(self, rows: int) -> None:
        """Lets rows go on plainly in which drafts have become too much for the library of grammars."""
        if self.workers.drafter is None:
            return
        if (ended_B := self.grammars.end_drafts(rows)) is not None:
            padding = len(self.workers.state.lens_B) - 1
            rows_B = torch.arange(rows, dtype=torch.int64, device=ended_B.device)
            self.workers.stop_drafting(rows_B.masked_fill(~ended_B, padding))

    def _phases(self, state: BatchState, spec: SpecConfig, needs: Needs, run: RunPhase) -> Round:
        drafter, key = self.workers.need_drafter(), (state.shape, spec, needs)
        with self.clock.phase("draft"):
            tree = run(("draft", state.shape, spec, needs.drafts), lambda: drafter.draft(state, spec, needs), [])

        def both(result: VerifyResult) -> tuple[VerifyResult, Round]:
            return result, _round(result, tree)

        with self.clock.phase("verify"):
            result, done = self._verify(state, tree, needs, ("verify", *key), run, both, state.written(needs))

        def extend() -> None:
            drafter.extend(state, needs, result.base_lens_B, result.tokens_BE, result.accepted_B, result.features_BEF)

        with self.clock.phase("extend"):
            run(("extend", *key), extend, drafter.changed(state))
        return done


def _round(result: VerifyResult, tree: DraftTree) -> Round:
    return Round(result.emitted_BX, tree.num_nodes - 1, tree.max_depth, result.logprobs_BEX)
