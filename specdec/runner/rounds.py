"""Runs rounds on the device: draft -> verify (read the tree, accept, commit) -> extend, captured as CUDA graphs.

This module knows both models' workers and the batch as tensors; it knows no request, no page and no length on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens, RoundResult
from specdec.batch.grammars.masks import BitMasks
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import GraphMode
from specdec.draft.drafter import Drafter
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.grammars import GrammarRows
from specdec.runner.phase_clock import PhaseClock
from specdec.runner.workers import Workers
from specdec.steps import CatchUp, Needs, RunRound
from specdec.verify.verifier import TreePass

R = TypeVar("R")
EAGER = GraphSet(False)
VERIFY = {"plain": "decode", "paused": "paused", "speculative": "verify"}  # what graphs of the target's phase are called


class RoundRunner:
    """Runs rounds, eagerly or by replaying graphs; both run the same code.

    graphs: "round" captures a whole round as one graph; "step" captures each phase as a graph of its own; False
        captures nothing.
    clock: while it is enabled, each phase runs as a graph of its own, in the mode "round" too.
    """

    def __init__(self, workers: Workers, graphs: GraphMode, clock: PhaseClock, grammars: GrammarRows) -> None:
        self.workers, self.graph_mode, self.clock, self.grammars = workers, graphs, clock, grammars
        self.round_graphs = GraphSet(graphs == "round")
        self.phase_graphs = GraphSet(bool(graphs))

    def run(self, state: BatchState, step: RunRound) -> RoundResult:
        """Runs the round over these rows.  It updates lengths and bonus tokens, and the drafter's rows."""
        is_whole = self.graph_mode == "round" and not self.clock.enabled and not step.needs.grammar
        if not is_whole or step.kind != "speculative":
            result = self._phases(state, step, self.phase_graphs)
        else:
            changed = [*self.workers.verifier.written(state, step.needs), *self.workers.need_drafter().changed(state)]
            key = "round", state.shape, step.spec, step.needs
            result = self._run(self.round_graphs, key, lambda: self._phases(state, step, EAGER), changed)
        if step.needs.halts:
            self.grammars.follow_round(result.emitted)
        return result

    def rehearse(self, state: BatchState, step: RunRound) -> None:
        """Runs the round as a rehearsal (ops/compiling/rehearsal.py) does: it captures nothing."""
        self._phases(state, step, EAGER)

    def catch_up(self, state: BatchState, step: CatchUp) -> None:
        """Has the drafter learn all tokens of a pause at once."""
        drafter = self.workers.need_drafter()
        if not drafter.catches_up:  # and nothing would be captured
            return
        changed = drafter.changed(state)
        with self.clock.phase("extend"):
            key = "catch up", state.shape, step.needs.drafts
            self.phase_graphs.run(key, lambda: drafter.catch_up(state, step.needs), changed)

    def _phases(self, state: BatchState, step: RunRound, graphs: GraphSet) -> RoundResult:
        """The phases one after the other.  graphs: of single phases, or EAGER.

        A round that is not speculative verifies a tree that is only a root: one step of plain decoding.
        """
        choosing, active_B = self.workers.choosing, state.awake(step.needs).active_B
        if step.kind != "speculative":
            with self.clock.phase("decode"), choosing(active_B):
                return self._verify(state, step, DraftTree.chain(state.bonus_B[:, None]), graphs)
        drafter, spec, needs = self.workers.need_drafter(), step.spec, step.needs
        assert spec is not None
        changed = drafter.changed(state)
        with self.clock.phase("draft"), choosing(active_B):
            key = "draft", state.shape, spec, needs.drafts, needs.halts
            tree = self._run(graphs, key, lambda: drafter.draft(state.begin_round(needs), spec, needs), changed)
        with self.clock.phase("verify"), choosing(active_B):
            result = self._verify(state, step, tree, graphs)
        with self.clock.phase("extend"), choosing(active_B, result.new.last_B):
            self._run(graphs, ("extend", state.shape, spec, needs), lambda: _extend(drafter, state, needs, result.new), changed)
        return result

    def _run(
        self, graphs: GraphSet, key: tuple[Hashable, ...], fn: Callable[[], R], changed: list[Tensor],
        before: Callable[[], object] = lambda: None,
    ) -> R:  # fmt: skip
        """As `GraphSet.run`.  While somebody counts experts, graphs are others, which count too."""
        counts = self.workers.expert_counts
        return graphs.run((*key, bool(counts)), fn, [*changed, *counts], before=before)

    def _verify(self, state: BatchState, step: RunRound, tree: DraftTree, graphs: GraphSet) -> RoundResult:
        """The target reads the trees and chooses its tokens; then paths are accepted and committed.

        Where a row has a grammar, drafts that break it leave the trees before the target reads them, and the host makes masks
        while the device runs the target.
        """
        verifier, needs, rows = self.workers.verifier, step.needs, state.awake(step.needs)
        key, with_features = (VERIFY[step.kind], state.shape, step.spec, needs), step.kind != "plain"
        paused = self.workers.need_drafter() if step.kind == "paused" else None
        changed = [*verifier.written(state, needs), *(paused.changed(state) if paused else ())]

        def accept(done: TreePass, masks: BitMasks | None = None) -> RoundResult:
            result = verifier.accept(rows, tree, needs, done, with_features, masks)
            if paused:  # the drafter will need the token and its features in `catch_up`
                paused.keep(rows, result.new)
            return result

        def read_tree() -> TreePass:
            begun = rows if step.kind == "speculative" else state.begin_round(needs)  # a draft has begun the round already
            return verifier.read_tree(begun, tree, with_features)

        if not needs.grammar:
            return self._run(graphs, key, lambda: accept(read_tree()), changed)

        def read() -> TreePass:
            return self._run(graphs, ("read", *key), read_tree, [])

        trees = self.grammars.complete(tree)
        done = read()
        masks = self.grammars.of_round(state.rows, tree.num_nodes, trees)
        self._end_drafts(state.rows)
        # A warm-up moves the accepted path's keys and values, so the tree is read again after it.
        result = self._run(graphs, ("accept", *key), lambda: accept(done, masks), changed, before=read)
        self.grammars.follow_round(result.emitted)
        return result

    def _end_drafts(self, rows: int) -> None:
        """Lets rows go on plainly in which drafts have become too much for the library of grammars."""
        if self.workers.drafter is None:
            return
        if (ended_B := self.grammars.end_drafts(rows)) is not None:
            padding = len(self.workers.state.lens_B) - 1
            rows_B = torch.arange(rows, dtype=torch.int64, device=ended_B.device)
            self.workers.stop_drafting(rows_B.masked_fill(~ended_B, padding))


def _extend(drafter: Drafter, state: BatchState, needs: Needs, new: NewTokens) -> None:
    """The drafter learns what the round emitted.  A row that had halted before the round keeps its next draft as it is."""
    rows, changed = state.awake(needs), drafter.changed_rows(state) if needs.halts else []
    before = [tensor.clone() for tensor in changed]
    drafter.extend(rows, needs, new)
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(torch.where(rows.active_B.view(-1, *[1] * (tensor.dim() - 1)) > 0, tensor, old))
