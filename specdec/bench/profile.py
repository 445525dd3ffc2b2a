"""Where each millisecond of a round goes: wall time, phases and kernels of rounds in which every sequence runs.

Every function takes a decoder and measures it as it is; nothing is printed.  What the least would be: byte_limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, median
from typing import TypeVar

from specdec.bench.budget import PHASES, Budget, KernelSplit
from specdec.bench.byte_limit import byte_limit
from specdec.bench.kernels import trace
from specdec.config import SamplingParams, SpecConfig
from specdec.decoder import SpecDecoder
from specdec.engine.loop import Engine
from specdec.engine.request import Request
from specdec.runner.phase_clock import PhaseClock

T = TypeVar("T")

ROUNDS = 50  # measured of each kind,
SECONDS = 30.0  # or as many as fit this time, but
FEWEST = 5
TRACED = 10
FILL = 2  # rounds behind a prefill that are not measured: the pipeline between GPU and host fills


def profile_work(
    decoder: SpecDecoder,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    speculate: bool,
    bandwidth: float,
    rounds: int = ROUNDS,
) -> Budget:
    """One kind of work, all prompts at once: as many as the decoder's batch.  bandwidth: see read_bandwidth.

    The shape must be fixed, not "auto".  sampling: of each prompt; enough max_tokens for `rounds_in` to be positive.
    ValueError where the KV pool holds fewer sequences than there are prompts.
    """
    spec = decoder.settings.spec if speculate else None
    work = Work(decoder, prompts, sampling, speculate)
    full_rounds(work, decoder.engine.step, rounds=FEWEST)  # compiles and captures
    found = full_rounds(work, lambda: timed_walls(decoder.engine), rounds)
    context, is_gpu = mean(tokens for _, tokens in found), decoder.settings.device.type == "cuda"
    return Budget(
        len(prompts),
        (spec.max_steps, spec.topk, spec.num_draft_tokens) if spec else None,
        context,
        bandwidth,
        byte_limit(decoder.model, decoder.head, spec, len(prompts), context, decoder.settings.options.kv_cache_dtype),
        decoder.engine.rounds.mode,
        [1e3 * wall for (wall, _), _ in found],
        1e3 * median(wall - waited for (wall, waited), _ in found) if is_gpu else None,
        phases_ms(work, rounds),
        kernels_of(work, spec) if is_gpu else None,
    )


class Work:
    """Prompts that a decoder runs, as often as asked for."""

    def __init__(
        self, decoder: SpecDecoder, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], speculate: bool
    ) -> None:
        self.decoder, self.prompts, self.speculate = decoder, prompts, speculate
        self.sampling = [replace(params, ignore_eos=True) for params in sampling]

    @contextmanager
    def running(self) -> Iterator[list[Request]]:
        """All prompts prefilled and the pipeline filled; what is not finished at the end is dropped."""
        decoder = self.decoder
        requests = [
            decoder._request(prompt, params, "prompt", streaming=False)
            for prompt, params in zip(self.prompts, self.sampling, strict=True)
        ]
        decoder._start(requests, self.speculate)
        try:
            self._enter(requests)
            for _ in range(FILL):
                decoder.engine.step()
            yield requests
        finally:
            for request in requests:
                decoder.engine.cancel(request)

    def _enter(self, requests: list[Request]) -> None:
        """Prefills all requests.  ValueError if they can't all run at once."""
        engine, entered = self.decoder.engine, -1
        while entered < len(engine.running) < len(requests):  # each step admits some, or no more can enter
            entered = len(engine.running)
            engine.step()
        if len(engine.running) < len(requests):
            error = next((request.error for request in requests if request.error), None)
            raise ValueError(
                f"a profile needs all {len(requests)} sequences of the batch to run at once, got {len(engine.running)} "
                f"({error or 'the KV pool holds no more'}); nearest setting that works: a smaller batch or max_seq_len"
            )


def rounds_in(max_tokens: int, spec: SpecConfig | None) -> int:
    """Rounds that can be measured in one run, however many tokens are accepted; a run's last one is left out."""
    return (max_tokens - 1) // (spec.max_steps + 1 if spec else 1) - FILL - 1


def full_rounds(work: Work, step: Callable[[], T], rounds: int = ROUNDS) -> list[tuple[T, float]]:
    """(what step() returned, committed tokens of a sequence) of rounds in which all prompts run; step() must run one.

    Prompts are run anew until there are enough rounds, or enough time went by.
    """
    engine, found = work.decoder.engine, list[tuple[T, float]]()
    start = time.perf_counter()
    while True:
        with work.running() as requests:
            while not any(request.is_done for request in requests):
                tokens = mean(len(request.prompt_ids) + len(request.output.token_ids) for request in requests)
                result = step()
                if len(engine.running) == len(requests):  # else rows were freed in it
                    found.append((result, tokens))
                if len(found) >= rounds or (len(found) >= FEWEST and time.perf_counter() - start > SECONDS):
                    return found


def phases_ms(work: Work, rounds: int = ROUNDS) -> dict[str, float]:
    """Medians of each phase, waited for one by one, and `rest`: what no phase took."""
    engine = work.decoder.engine
    with timed_phases(engine):
        full_rounds(work, engine.step, rounds=FEWEST)  # where rounds are one graph, phases get graphs of their own now
        found = [seconds for seconds, _ in full_rounds(work, lambda: _phase_seconds(engine), rounds)]
    return {name: 1e3 * median(seconds[name] for seconds in found) for name in found[0]}


def kernels_of(work: Work, spec: SpecConfig | None) -> KernelSplit:
    """A trace of as many rounds as surely fit one run.  Needs a GPU."""
    rounds = min(TRACED, rounds_in(work.sampling[0].max_tokens, spec))
    with work.running():
        return trace(work.decoder.engine.step, rounds, work.decoder.settings.device)


@contextmanager
def timed_phases(engine: Engine) -> Iterator[PhaseClock]:
    """Inside, every phase is waited for and timed, from zero."""
    clock = engine.rounds.clock
    clock.clear()
    clock.enabled = True
    try:
        yield clock
    finally:
        clock.enabled = False


def timed_walls(engine: Engine) -> tuple[float, float]:
    """Seconds of one round, and those of them in which the host waited for the GPU."""
    waited, start = engine.readback.wait_seconds, time.perf_counter()
    engine.step()
    return time.perf_counter() - start, engine.readback.wait_seconds - waited


def _phase_seconds(engine: Engine) -> dict[str, float]:
    """Seconds of one round by phase."""
    clock = engine.rounds.clock
    clock.clear()
    wall, _ = timed_walls(engine)
    spent = {name: clock.seconds[name] for name in PHASES if name in clock.seconds}
    return {**spent, "rest": wall - sum(spent.values())}
