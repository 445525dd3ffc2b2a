"""A decoder as measurements drive it: prompts go in, rounds run one by one, and times and sizes come out.

The benchmark touches the engine inside a decoder through this file alone, which knows no cell, budget or report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import Tensor, nn

from specdec.attention.caches.quant_cache import as_stored
from specdec.attention.eager.dense import StoreFn
from specdec.batch.grammars.masks import masks_of_text
from specdec.config import SamplingParams
from specdec.draft.drafter import DraftModel
from specdec.draft.eagle.worker import DraftWorker
from specdec.engine.chunks import PromptRest
from specdec.engine.needs import RowChoice
from specdec.engine.request import Request
from specdec.generation import Generation
from specdec.loaded import LoadedDecoder
from specdec.loading.resolve import EngineSettings
from specdec.loading.threads import use_threads
from specdec.models.target import Target
from specdec.runner.phase_clock import PhaseClock
from specdec.runner.workers import Workers
from specdec.steps import ForceAcceptance, Pass, PromptPart, RunChunk, RunMixed, RunRound, TimePhases, Try

R = TypeVar("R")
Submitted: TypeAlias = Request  # a prompt that was handed to the engine
PhaseTimes: TypeAlias = PhaseClock  # seconds and calls of each phase since the last `clear`


class StepTime(NamedTuple):
    """Seconds of one round: all of it, and the part in which the host waited for the device."""

    wall: float
    waited: float


class Session:
    """Drives one decoder on the thread of the caller, who must be the only one to use it then, and `cancel` what was submitted.
    That thread keeps the decoder's number of torch's threads; see `using_threads`.
    """

    def __init__(self, decoder: LoadedDecoder, rehearsed: set[Pass] | None = None) -> None:
        """rehearsed: steps of earlier sessions over the same models, whose kernels this process has; gets those of this one."""
        self.decoder, self._rehearsed = decoder, set() if rehearsed is None else rehearsed
        self._submitted: list[Request] = []

    # ---- what the decoder is made of ----

    @property
    def model(self) -> Target:
        return self.decoder.model

    @property
    def head(self) -> DraftModel | None:
        return self.decoder.head

    @property
    def settings(self) -> EngineSettings:
        return self.decoder.settings

    @property
    def writes_text(self) -> bool:
        """Whether outputs have a text; without a tokenizer they only have token ids."""
        return self.decoder.tokenizer.is_present

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far."""
        return self.decoder.engine.runner.num_graphs

    @property
    def readiness(self) -> tuple[int, int, int]:
        """A pass that changes it compiled or captured something, or met a shape for the first time: it was no usual pass."""
        return self.decoder.engine.runner.readiness

    @property
    def rounds_run(self) -> int:
        """Rounds of the batch so far, steps of plain decoding included."""
        return self.decoder.engine.totals().rounds

    @property
    def kv_pool_bytes(self) -> int:
        """Bytes of the KV pool over both models."""
        return sum(cache.bytes for cache in self.decoder.engine.runner.workers.caches)

    @property
    def as_stored(self) -> StoreFn | None:
        """Keys and values as the target's cache would give them back; None where the cache keeps them exactly."""
        return as_stored(self.decoder.engine.runner.workers.verifier.cache)

    def on_all_ranks(self, function: Callable[..., R], *given: Any) -> R:
        """function(workers, *given) on every rank that holds the models; this rank's result."""
        return self.decoder.engine.runner.on_all_ranks(function, *given)

    @property
    def chunk_budget(self) -> dict[str, float | None]:
        """What a chunk of prompts may cost, in tokens of an empty context, and the context that doubles a token's cost."""
        return asdict(self.decoder.engine.scheduler.budget)

    def choice(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> RowChoice:
        """How a row with this prompt chooses its tokens."""
        return self.decoder.new_request(prompt_ids, sampling).choice

    def masks(self, choice: RowChoice, token_ids: Sequence[int]) -> Tensor | None:
        """int32 [places of the output, words of a mask]: what the row's grammar allows; None: the row has none."""
        if choice.grammar is None:
            return None
        return masks_of_text(self.decoder.grammars.matcher(choice.grammar), token_ids, self.decoder.model.config.vocab_size)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, the engine is the caller's, and what runs on a CPU takes as many threads as on the engine's own thread."""
        use_threads(self.decoder.settings.threads)
        with self.decoder.owner.turn:
            yield

    # ---- what is compiled and captured before it is measured ----

    def rehearse(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
        """Compiles side by side what rounds of any number of rows need, the shortest and the longest chunk of prompts, and the
        largest of both in one pass where they share passes.
        """
        rounds, chunks = self.rounds_to_come(prompts, sampling), self.chunks_to_come(prompts, sampling)
        steps: list[Pass] = [*rounds, *chunks]
        if rounds and chunks and self.decoder.engine.scheduler.mixing is not None:
            steps.append(RunMixed(rounds[-1], chunks[-1]))
        if new := [step for step in steps if step not in self._rehearsed]:
            with self.turn():
                self.decoder.engine.runner.rehearse(new)
            self._rehearsed.update(new)

    def capture_rounds(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
        """Captures the rounds of both sides for any number of rows, except those of "auto"; see `make_ready`.

        To be called while nothing runs, and after the first prompt: an 8-bit cache takes its scales from that one.
        """
        if self.settings.cuda_graphs:
            with self.turn():
                for step in self.rounds_to_come(prompts, sampling):
                    tried = self.decoder.engine.runner.run(Try(step))
                    assert tried is not None
                    tried.read()

    def rounds_to_come(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[RunRound]:
        """All that may come, but for "auto"; none where rounds have grammars, which nobody can run without a text."""
        scheduler, needs = self.decoder.engine.scheduler, self.choice(prompts[0], sampling).needs
        if needs.grammar:
            return []
        sizes = scheduler.sizes() if scheduler.pads_rows else [1]
        return [step for size in sizes for step in scheduler.speculation.rounds(size, needs)]

    def chunks_to_come(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[RunChunk]:
        """The shortest and the longest with which a batch of the prompts would begin."""
        scheduler, needs = self.decoder.engine.scheduler, self.choice(prompts[0], sampling).needs
        if needs.grammar:
            return []
        chunks = []
        for first in range(0, len(prompts), scheduler.batch.count):
            batch = prompts[first : first + scheduler.batch.count]
            shares = scheduler.budget.share([PromptRest(0, len(prompt)) for prompt in batch], 0)
            parts = tuple(
                PromptPart(row, tuple(prompt[:tokens]), 0, prompt[tokens] if tokens < len(prompt) else -1)
                for row, (prompt, tokens) in enumerate(zip(batch, shares, strict=True))
                if tokens
            )
            chunks.append(RunChunk(parts, needs, self.head is not None, sum(shares), may_capture=True))
        chunks.sort(key=lambda chunk: chunk.cost)
        return list(dict.fromkeys((chunks[0], chunks[-1])))

    def make_ready(self, sizes: Sequence[int] = ()) -> None:
        """Captures whatever "auto" may run later, for options that have occurred.  sizes: numbers of rows; none: all."""
        with self.turn():
            self.decoder.engine.make_ready(sizes)

    @property
    def reasons(self) -> list[str]:
        """For each number of rows that has run, which shape "auto" runs and why."""
        return self.decoder.reasons

    @property
    def forces_acceptance(self) -> bool:
        return self.decoder.engine.runner.workers.verifier.synthetic is not None

    def force_acceptance(self, probs: Sequence[float]) -> None:
        """From now on level d + 1 of a tree is accepted with probability probs[d], given that level d was."""
        self.decoder.engine.runner.run(ForceAcceptance(tuple(probs)))

    def share_noise(self, shares: bool) -> None:
        """Whether drafts are chosen with the target's own noise.  To be called before the first round is captured."""
        drafter = self.decoder.engine.runner.workers.drafter
        assert isinstance(drafter, DraftWorker), "only a head's drafter has two rules"
        drafter.shares_noise = shares

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], *, speculate: bool
    ) -> list[Generation]:
        """RuntimeError if a request fails."""
        return self.decoder.generate(list(prompts), list(sampling), speculate=speculate)

    # ---- round by round ----

    def submit(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], *, speculate: bool) -> list[Submitted]:
        """Queues prompts; the next steps prefill them."""
        requests = [
            self.decoder.new_request(self.decoder.encode(prompt), params, speculate=speculate)
            for prompt, params in zip(prompts, sampling, strict=True)
        ]
        with self.turn():
            self.decoder.engine.submit(requests)
        self._submitted += requests
        return requests

    @property
    def num_running(self) -> int:
        """Prompts that are prefilled and not finished."""
        return len(self.decoder.engine.running)

    @property
    def num_entering(self) -> int:
        """Prompts that hold a row, and of which a part is yet to be prefilled."""
        return len(self.decoder.engine.scheduler.states) - self.num_running

    def step(self) -> None:
        """Runs one chunk of prompts, or one round."""
        with self.turn():
            self.decoder.engine.step()

    def timed_step(self) -> StepTime:
        readback = self.decoder.engine.runner.readback
        waited, start = readback.wait_seconds, time.perf_counter()
        self.step()
        return StepTime(time.perf_counter() - start, readback.wait_seconds - waited)

    def cancel(self) -> None:
        """Ends everything that was submitted and is not finished, and frees its place."""
        with self.turn():
            for request in self._submitted:
                self.decoder.engine.cancel(request)
        self._submitted.clear()

    @contextmanager
    def counted_experts(self) -> Iterator[Callable[[], dict[nn.Module, int]]]:
        """Inside, rounds count the experts that they choose, from zero.  That slows rounds, whose graphs are captured anew.

        Yields what says how many distinct experts of each mixture were chosen since the last call, in each pass for itself; it
        waits for the device.
        """
        self.on_all_ranks(Workers.count_experts, True)
        self.on_all_ranks(Workers.take_chosen)
        try:
            yield lambda: self.on_all_ranks(Workers.take_chosen)
        finally:
            self.on_all_ranks(Workers.count_experts, False)

    @contextmanager
    def timed_phases(self) -> Iterator[PhaseTimes]:
        """Inside, every phase is waited for and timed, from zero.  That slows rounds."""
        runner = self.decoder.engine.runner
        runner.clock.clear()
        runner.run(TimePhases(True))
        try:
            yield runner.clock
        finally:
            runner.run(TimePhases(False))
