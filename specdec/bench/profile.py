"""Where each millisecond of a round goes: wall time, phases and kernels of rounds in which every sequence runs.

Measures a session as it is and prints nothing.  The least time that a round could take is byte_limit's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, median
from typing import TypeVar

from torch import nn

from specdec.bench.budget import PHASES, Budget, KernelSplit
from specdec.bench.byte_limit import byte_limit
from specdec.bench.kernels import trace
from specdec.config import SamplingParams, SpecConfig
from specdec.models.mixtures.counter import mixtures_of
from specdec.session import PhaseTimes, Session, Submitted

T = TypeVar("T")

ROUNDS = 50  # measured of each kind,
SECONDS = 30.0  # or as many as fit this time, but
MIN_ROUNDS = 5
TRACED = 10
PATIENCE = 4  # steps in which no prompt enters, after which no more will
FILL = 2  # rounds after a prefill that are not measured, since the pipeline between GPU and host fills in them


def profile_work(
    session: Session,
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    speculate: bool,
    bandwidth: float,
    rounds: int = ROUNDS,
) -> Budget:
    """Measures one kind of work with all prompts at once, as many as the decoder's batch.  bandwidth: see read_bandwidth.

    The tree's shape must be fixed, not "auto".  sampling: of each prompt; max_tokens must be large enough for `rounds_in` to
    be positive.  ValueError where the KV pool holds fewer sequences than there are prompts.
    """
    settings = session.settings
    spec = settings.spec if speculate else None
    workload = Workload(session, prompts, sampling, speculate)
    full_rounds(workload, session.step, rounds=MIN_ROUNDS)  # compiles and captures
    found = full_rounds(workload, session.timed_step, rounds)
    context, is_gpu = mean(tokens for _, tokens in found), settings.device.type == "cuda"
    kept = settings.options.kv_cache_dtype, settings.options.decode_context_parallel_size
    return Budget(
        len(prompts),
        spec.numbers if spec else None,
        context,
        bandwidth,
        byte_limit(session.model, session.head, spec, len(prompts), context, *kept, chosen=chosen_experts(workload, rounds)),
        settings.cuda_graphs,
        [1e3 * step.wall for step, _ in found],
        1e3 * median(step.wall - step.waited for step, _ in found) if is_gpu else None,
        phases_ms(workload, rounds),
        kernels_of(workload, spec) if is_gpu else None,
    )


class Workload:
    """Prompts that a session runs, as often as asked for."""

    def __init__(
        self, session: Session, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], speculate: bool
    ) -> None:
        self.session, self.prompts, self.speculate = session, prompts, speculate
        # Rounds are measured, and no text is read: nothing but max_tokens ends one.
        self.sampling = [replace(params, ignore_eos=True, stop=None, stop_token_ids=None) for params in sampling]

    @contextmanager
    def running(self) -> Iterator[list[Submitted]]:
        """Inside, all prompts are prefilled and the pipeline is filled.  What is not finished at the end is dropped."""
        try:
            requests = self.session.submit(self.prompts, self.sampling, speculate=self.speculate)
            self._enter(requests)
            for _ in range(FILL):
                self.session.step()
            yield requests
        finally:
            self.session.cancel()

    def _enter(self, requests: list[Submitted]) -> None:
        """Prefills all requests.  ValueError if they can't all run at once."""
        session, idle = self.session, 0
        while session.num_running < len(requests) and idle < PATIENCE:
            session.step()
            idle = 0 if session.num_entering else idle + 1
        if session.num_running < len(requests):
            error = next((request.error for request in requests if request.error), None)
            raise ValueError(
                f"a profile needs all {len(requests)} sequences of the batch to run at once, got {session.num_running} "
                f"({error or 'the KV pool holds no more'}); nearest setting that works: a smaller batch or max_seq_len"
            )


def rounds_in(max_tokens: int, spec: SpecConfig | None) -> int:
    """Rounds that can be measured in one run, however many tokens are accepted.  The last round of a run is left out."""
    return (max_tokens - 1) // (spec.levels + 1 if spec else 1) - FILL - 1


def full_rounds(workload: Workload, step: Callable[[], T], rounds: int = ROUNDS) -> list[tuple[T, float]]:
    """(what step() returned, mean tokens of a sequence) of rounds in which all prompts run.  step() must run one round.

    The prompts are run anew until there are enough rounds, or until enough time has passed.
    """
    session, found = workload.session, list[tuple[T, float]]()
    start = time.perf_counter()
    while True:
        with workload.running() as requests:
            while not any(request.is_done for request in requests):
                tokens = mean(request.num_tokens for request in requests)
                result = step()
                if session.num_running == len(requests):  # otherwise the step freed a row
                    found.append((result, tokens))
                if len(found) >= rounds or (len(found) >= MIN_ROUNDS and time.perf_counter() - start > SECONDS):
                    return found


def phases_ms(workload: Workload, rounds: int = ROUNDS) -> dict[str, float]:
    """Medians of each phase, waited for one by one, and of `rest`: the time that no phase took."""
    session = workload.session
    with session.timed_phases() as phases:
        full_rounds(workload, session.step, rounds=MIN_ROUNDS)  # where rounds are one graph, phases get graphs of their own now
        found = [seconds for seconds, _ in full_rounds(workload, lambda: _phase_seconds(session, phases), rounds)]
    return {name: 1e3 * median(seconds[name] for seconds in found) for name in found[0]}


def chosen_experts(workload: Workload, rounds: int = ROUNDS) -> dict[nn.Module, float]:
    """By mixture of either model, how many experts all passes of a round read, mean over rounds of their own."""
    session = workload.session
    models = [session.model, *([] if session.head is None or not workload.speculate else [session.head])]
    if not any(map(mixtures_of, models)):
        return {}
    with session.counted_experts() as take:

        def counted_round() -> dict[nn.Module, int]:
            take()
            session.step()
            return take()

        full_rounds(workload, counted_round, rounds=MIN_ROUNDS)  # captures
        found = [chosen for chosen, _ in full_rounds(workload, counted_round, rounds)]
    return {mixture: mean(chosen[mixture] for chosen in found) for mixture in found[0]}


def kernels_of(workload: Workload, spec: SpecConfig | None) -> KernelSplit:
    """A trace of as many rounds as surely fit one run.  Needs a GPU."""
    rounds = min(TRACED, rounds_in(workload.sampling[0].max_tokens, spec))
    with workload.running():
        return trace(workload.session.step, rounds, workload.session.settings.device)


def _phase_seconds(session: Session, phases: PhaseTimes) -> dict[str, float]:
    """Seconds of one round by phase."""
    phases.clear()
    wall = session.timed_step().wall
    spent = {name: phases.seconds[name] for name in PHASES if name in phases.seconds}
    return {**spent, "rest": wall - sum(spent.values())}
