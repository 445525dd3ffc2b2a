"""Executes the scheduler's steps on one rank's device, and hands back the tokens that they emit.

The runner decides nothing by wall time, by free memory or by an error of its own, so that several ranks which get the same
steps compute the same.  It knows tensors and both models' workers; it knows no request, no whole prompt and no free page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from specdec import steps
from specdec.attention.shared import SharedPrefix
from specdec.batch.emitted import FirstTokens, RoundResult
from specdec.batch.sampling import RowSampling
from specdec.batch.state import BatchState
from specdec.batch.transfer import to_device
from specdec.config import GraphMode, SpecConfig
from specdec.generation import Pending
from specdec.grammar.library import Grammars
from specdec.limits import DUMMY_PAGE
from specdec.ops.compiling.known import num_loaded
from specdec.ops.compiling.rehearsal import compile_ahead
from specdec.ops.cuda_graph import on_device
from specdec.ops.launch import launching
from specdec.parallel.processes import OtherRanks
from specdec.runner.first_passes import FirstPasses, compile_steps
from specdec.runner.grammars import GrammarRows
from specdec.runner.mixed import MixedRunner
from specdec.runner.pending import BothPending, EmittedPending, TryPending
from specdec.runner.phase_clock import PhaseClock
from specdec.runner.prompts import PromptRunner
from specdec.runner.readback import Readback
from specdec.runner.rounds import RoundRunner
from specdec.runner.workers import Workers
from specdec.tables.steps import FillTable, TableStep, UseTable
from specdec.verify.synthetic import SyntheticAcceptance

R = TypeVar("R")

TRIES = 3  # runs of a step that is tried; the last of them is measured


class RankCall(NamedTuple):
    """What other ranks call with their workers, as the first one does: see `DeviceRunner.on_all_ranks`."""

    function: Callable[..., Any]
    given: tuple[Any, ...]


class DeviceRunner:
    """Executes steps.

    graphs: see RoundRunner.  max_captured: see PromptRunner.  rehearses, spec: see FirstPasses, whose purpose the first is;
    None: passes may not be rehearsed.  shared: buffers for the pages that rows read together; None where rows never do.
    """

    def __init__(
        self,
        workers: Workers,
        graphs: GraphMode,
        max_captured: int = 0,
        shared: SharedPrefix | None = None,
        rehearses: str | None = None,
        spec: SpecConfig | None = None,
    ) -> None:
        self.workers, self.shared = workers, shared
        self._other_ranks: OtherRanks | None = None
        self.device = workers.state.lens_B.device
        # Callers' threads may have other streams current; all steps of a batch must run in order, so they share one.
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self.clock = PhaseClock(self.device)
        self.readback = Readback(self.device)
        self._last_round: Any = None  # the event after the last step, if that was a round
        vocabulary = workers.verifier.model.vocabulary
        self.grammars = GrammarRows(self.readback, vocabulary.size, vocabulary.group)
        self.rounds = RoundRunner(workers, graphs, self.clock, self.grammars)
        self.prompts = PromptRunner(workers, bool(graphs), max_captured, self.grammars)
        self.mixed = MixedRunner(workers, bool(graphs), self.prompts)
        self._rehearses = rehearses is not None
        self._first = None if rehearses is None else FirstPasses(self.prompts, self.rounds, spec, rehearses)
        self._actions: dict[type[Any], Callable[[Any], Pending | None]] = {
            steps.EnterRows: self._enter,
            steps.RunChunk: self._chunk,
            steps.RunMixed: self._mixed,
            steps.CatchUp: self._catch_up,
            steps.Try: self._try,
            steps.GrowRows: self._grow,
            steps.ShareRows: self._share,
            steps.LeaveRows: self._leave,
            steps.StopDrafting: self._stop_drafting,
            steps.CopyPages: self._copy,
            FillTable: self._bring_table,
            UseTable: self._bring_table,
            steps.TimePhases: lambda step: setattr(self.clock, "enabled", step.enabled),
            steps.ForceAcceptance: self._force_acceptance,
        }

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far."""
        rounds = len(self.rounds.round_graphs) + len(self.rounds.phase_graphs)
        return rounds + len(self.prompts.graphs) + len(self.mixed.graphs)

    @property
    def readiness(self) -> tuple[int, int, int]:
        """Loaded kernels, captured graphs, first uses of chunks' shapes.  A step that changes none did nothing but its work."""
        return num_loaded(self.device), self.num_graphs, self.prompts.num_first_uses + self.mixed.num_first_uses

    @torch.inference_mode()
    def rehearse(self, passes: Sequence[steps.Pass]) -> None:
        """Has the kernels of these passes compiled (see `compile_steps`) where they may be rehearsed."""
        if self._rehearses:
            for step in passes:
                self._need(step.needs)
            with self._in_order():
                compile_steps(self.mixed, self.rounds, passes, self._rows_of)

    @torch.inference_mode()
    def run(self, step: steps.Step) -> Pending | None:
        """Launches the step, as `Runner.run` describes it."""
        return self._on_all_ranks(step, lambda: self._run(step))

    def lead(self, other_ranks: OtherRanks) -> None:
        """Has the other ranks run every step from now on, and fails with the reason if one of them does."""
        self._other_ranks = other_ranks
        self.readback.other_ranks = other_ranks

    def close(self) -> None:
        """Ends what goes on beside steps.  No step may be under way, and none may follow."""
        if self._first is not None:
            self._first.close()

    def use_grammars(self, grammars: Grammars) -> None:
        """From now on rows' grammars are compiled by this library, which has checked them."""
        self.grammars.library = grammars

    def on_all_ranks(self, function: Callable[..., R], *given: Any) -> R:
        """function(workers, *given) of this rank, which all ranks call.  The function is pickled."""
        return self._on_all_ranks(RankCall(function, given), lambda: function(self.workers, *given))

    def _on_all_ranks(self, message: steps.Step | RankCall, run: Callable[[], R]) -> R:
        """run(), of which the other ranks are told."""
        if self._other_ranks is not None:
            self._other_ranks.send(message)
        try:
            with self._in_order():
                return run()
        except BaseException as error:  # an interrupt too: the others run the whole step, and wait for this rank in it
            if self._other_ranks is None:
                raise
            raise self._other_ranks.explain(error) from error

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """What the block launches comes after all earlier steps."""
        with launching(self.device), on_device(self.device), torch.cuda.stream(self._stream):
            yield

    def _run(self, step: steps.Step) -> Pending | None:
        last_round, self._last_round = self._last_round, None
        if isinstance(step, steps.RunRound):
            return self._round(step, last_round)
        return self._actions[type(step)](step)

    # ---- what emits tokens ----

    def _chunk(self, step: steps.RunChunk) -> EmittedPending:
        self._need(step.needs)
        with self.clock.phase("prefill"):
            for part in step.parts:
                if part.encoder_input is not None:
                    self._read_encoder_input(part.encoder_input)
            if self._first is not None:
                self._first.before_chunk(self.workers.state.narrow(self._rows_after(len(step.parts))), step)
            first = self.prompts.run(step)
        if step.needs.grammar:
            self.grammars.follow_chunk(first, step.parts)
        return self._first_tokens(step, first)

    def _first_tokens(self, step: steps.RunChunk, first: FirstTokens) -> EmittedPending:
        """What the chunk emits."""
        read, parts = partial(FirstTokens.read, wanted=[part.emits for part in step.parts]), len(step.parts)
        logprobs = None if first.logprobs_BY is None else first.logprobs_BY[:parts]
        scores = None if first.scores_RY is None else (first.scores_RY, [part.num_scores for part in step.parts])
        return EmittedPending(self.readback, first.tokens_B[:parts], read, logprobs, scores=scores)

    def _mixed(self, step: steps.RunMixed) -> Pending:
        if self.clock.enabled:  # phases are timed by themselves
            both = BothPending(self._round(step.round, None), self._chunk(step.chunk))
            self._last_round = None
            return both
        self._need(step.needs)
        state = self._rows_of(step.round)
        if self._first is not None and self._first.before_round(state, step.round):
            self._first = None
        if self._rehearses and not self.mixed.num_first_uses:
            compile_ahead(lambda: self.mixed.rehearse(state, step), self.device)
        result = self.mixed.run(state, step)
        return BothPending(self._emitted(result.around), self._first_tokens(step.chunk, result.first))

    def _round(self, step: steps.RunRound, last_round: Any) -> EmittedPending:
        """last_round: the event after the step before this one, if that was a round."""
        begun = None if not step.timed else self.readback.record_event() if last_round is None else last_round
        result = self._launch_round(step)
        ended = self.grammars.report_ended() if step.needs.grammar else ()
        pending = self._emitted(result, ended, begun)
        self._last_round = pending.done
        return pending

    def _emitted(self, result: RoundResult, ended: Sequence[int] = (), begun: Any = None) -> EmittedPending:
        """What a round emits.  ended, begun: see EmittedPending."""
        emitted = result.emitted
        return EmittedPending(
            self.readback, emitted.numbers_BX, emitted.read, result.logprobs_BEY, ended, begun, result.trees_B5N
        )

    def _launch_round(self, step: steps.RunRound) -> RoundResult:
        state = self._rows_of(step)
        if self._first is not None and self._first.before_round(state, step):
            self._first = None
        return self.rounds.run(state, step)

    def _try(self, step: steps.Try) -> Pending:
        tried = step.step
        state = self._rows_of(tried)
        verifier, drafter = self.workers.verifier, self.workers.drafter
        changed = [*verifier.written(state, tried.needs), *(drafter.changed(state) if drafter else ())]
        saved = [tensor.clone() for tensor in changed]
        for _ in range(TRIES):  # the first of them captures
            begun = self.readback.record_event()
            if isinstance(tried, steps.CatchUp):
                self._catch_up(tried)
            else:
                with self.grammars.only_trying():
                    self._launch_round(tried)
            done = self.readback.record_event()
            for tensor, value in zip(changed, saved, strict=True):
                tensor.copy_(value)
        return TryPending(self.readback, begun, done)

    # ---- what changes rows ----

    def _enter(self, step: steps.EnterRows) -> None:
        """Writes the entries into the batch."""
        if any(entry.rules is not None for entry in step.entries):
            self._need_tables()
        if any(entry.waits is not None for entry in step.entries):
            self._need_waits()
        state, entries, device = self.workers.state, step.entries, self.device
        most = max(len(entry.pages[0]) for entry in entries)
        padded = [[[*pages, *[DUMMY_PAGE] * (most - len(pages))] for pages in entry.pages] for entry in entries]
        rows_R, speculates_R = to_device([(entry.row, int(entry.speculates)) for entry in entries], device).unbind(1)
        sampling = RowSampling.of([entry.options for entry in entries], device)
        state.enter_rows(rows_R, to_device(padded, device, torch.int32), sampling, speculates_R)
        if state.encoder_size:
            texts = [(given.page, len(given.token_ids)) if (given := entry.encoder_input) else (0, 0) for entry in entries]
            for tensor, values_R in zip(
                (state.encoder_page_B, state.encoder_lens_B), to_device(texts, device, torch.int32).unbind(1)
            ):
                tensor.index_copy_(0, rows_R, values_R)
        if self.workers.verifier.keeps_states:
            self.workers.verifier.enter_rows(rows_R, to_device([entry.state for entry in entries], device))
        if self.workers.drafter is not None:
            self.workers.drafter.enter(step.entries)
        for entry in step.entries:
            if entry.rules is not None:
                assert state.tables is not None
                state.tables.enter(entry.row, entry.rules, self.workers.verifier.model.vocabulary.first, entry.written)
            if entry.waits is not None:
                state.waiting.enter(entry.row, entry.waits)
            self.grammars.enter(entry)

    def _grow(self, step: steps.GrowRows) -> None:
        """Writes more pages into the page tables."""
        entries = [
            (row, first + i, *pages) for row, first, groups in step.growths for i, pages in enumerate(zip(*groups, strict=True))
        ]
        self.workers.state.grow_rows(to_device(entries, self.device))

    def _need_tables(self) -> None:
        """Makes the tables of rules for tokens, if there are none yet: most decoders never need them."""
        if self.workers.state.tables is None:
            self.workers.state = self.workers.state.with_tables(self.workers.verifier.model.vocabulary.own)

    def _need(self, needs: steps.Needs) -> None:
        """Makes what a pass with these needs reads."""
        if needs.rules:
            self._need_tables()
        if needs.waits:
            self._need_waits()

    def _need_waits(self) -> None:
        """Makes the tables of how texts wait for their grammars, if there are none yet."""
        if self.workers.state.waits is None:
            self.workers.state = self.workers.state.with_waits(self.workers.verifier.model.vocabulary.size)

    def _read_encoder_input(self, given: steps.EncoderInput) -> None:
        """Runs the target's encoder over a text, and keeps what the decoder's layers read of it."""
        ids_S = to_device(given.token_ids, self.device)
        first = given.page * self.workers.state.encoder_size
        slots_S = torch.arange(first, first + len(given.token_ids), dtype=torch.int64, device=self.device)
        self.workers.verifier.read_encoder_input(slots_S, ids_S)

    def _catch_up(self, step: steps.CatchUp) -> None:
        self.rounds.catch_up(self._rows_of(step), step)

    def _share(self, step: steps.ShareRows) -> None:
        assert self.shared is not None
        self.shared.set(list(step.rows), list(step.pages), step.tokens)

    def _leave(self, step: steps.LeaveRows) -> None:
        moves = len(step.moves)
        assert not {source for source, _ in step.moves} & {target for _, target in step.moves}, step
        rows = [source for source, _ in step.moves] + [target for _, target in step.moves] + list(step.cleared)
        rows_R = to_device(rows, self.device)
        self.workers.move_rows(rows_R[:moves], rows_R[moves : 2 * moves])
        self.workers.clear_rows(rows_R[2 * moves :])
        self.grammars.leave(step)

    def _stop_drafting(self, step: steps.StopDrafting) -> None:
        self.workers.stop_drafting(to_device(step.rows, self.device))
        self.grammars.stop_drafting(step.rows)

    def _copy(self, step: steps.CopyPages) -> None:
        sources_N, targets_N = to_device([step.sources, step.targets], self.device)
        self.workers.copy_pages(sources_N, targets_N, step.group)

    def _bring_table(self, step: TableStep) -> None:
        self.workers.need_drafter().bring_table(step)

    # ---- what is measured ----

    def _force_acceptance(self, step: steps.ForceAcceptance) -> None:
        verifier = self.workers.verifier
        forced, held = SyntheticAcceptance.of(step.probs, verifier.model.config.vocab_size, self.device), verifier.synthetic
        if held is not None and held.probs_S.shape == forced.probs_S.shape:
            held.probs_S.copy_(forced.probs_S)  # captured rounds read this very tensor
            return
        is_captured = len(self.rounds.round_graphs) or len(self.rounds.phase_graphs) or len(self.mixed.graphs)
        assert not is_captured, "a captured round would go on as it was captured"
        verifier.synthetic = forced

    def _rows_after(self, prompts: int) -> int:
        """How many rows a round over so many prompts computes."""
        most = self.workers.state.rows - 1
        return min(most, 1 << (prompts - 1).bit_length()) if self.rounds.graph_mode else prompts

    def _rows_of(self, step: steps.RunRound | steps.CatchUp) -> BatchState:
        """Views of the rows that a step runs over."""
        self._need(step.needs)
        state = self.workers.state.narrow(step.rows)
        if not step.shared:
            return state
        assert self.shared is not None
        return state.sharing(self.shared)
