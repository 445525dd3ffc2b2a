"""Has the kernels of passes compiled side by side: a decoder's first ones, or any that somebody knows will come.

This module knows which passes come first in a decoder; how a pass is rehearsed is the matter of ops/compiling/rehearsal.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.batch.state import BatchState
from specdec.config import SpecConfig
from specdec.ops.compiling.known import KnownKernels
from specdec.ops.compiling.rehearsal import Rehearsals, compile_ahead
from specdec.runner.mixed import MixedRunner
from specdec.runner.prompts import PromptRunner
from specdec.runner.rounds import RoundRunner
from specdec.startup import STARTUP
from specdec.steps import Pass, RunChunk, RunMixed, RunRound


class FirstPasses:
    """Rehearses before the first chunk runs, and before the first round does if that is not the expected one.

    spec: the shape of the first speculative round; None: nobody knows it yet.
    purpose: a text that is equal for decoders whose first passes need the same kernels; None: no kernels are known from earlier
        starts, and no later start will know these.
    """

    def __init__(self, prompts: PromptRunner, rounds: RoundRunner, spec: SpecConfig | None, purpose: str | None = None) -> None:
        self._prompts, self._rounds, self._spec, self._purpose = prompts, rounds, spec, purpose
        self._rehearsals: Rehearsals | None = None
        self._known: KnownKernels | None = None
        self._expected: dict[RunRound, Callable[[], None]] = {}  # a round that is being compiled, and how to wait for it

    def before_chunk(self, state: BatchState, chunk: RunChunk) -> None:
        """Compiles what the first chunk needs, and begins with the round that is expected after it.

        state: the batch, of as many rows as that round will have.
        """
        if self._rehearsals is not None or chunk.needs.grammar:
            return
        STARTUP.begin("compiling the kernels of the first prompt")
        self._rehearsals = Rehearsals(state.lens_B.device)
        if self._purpose is not None:
            self._known = KnownKernels(state.lens_B.device, self._purpose)
            self._rehearsals.recall(self._known)
        wait = self._rehearsals.rehearse(lambda: self._prompts.rehearse(chunk))
        if not chunk.drafted:
            self._begin(state, RunRound(state.rows, "plain", None, chunk.needs))
        elif self._spec is not None:
            self._begin(state, RunRound(state.rows, "speculative", self._spec, chunk.needs))
        self._rehearsals.begin()
        wait()
        STARTUP.lap("kernels of the first prefill")

    def before_round(self, state: BatchState, step: RunRound) -> bool:
        """Waits until what the first round needs is compiled.  Returns whether that was all there is to do."""
        if step.needs.grammar:
            return False
        step = replace(step, timed=False)
        if step not in self._expected:
            self._begin(state, step).begin()
        self._expected[step]()
        if self._known is not None and self._rehearsals is not None:
            self._known.add(self._rehearsals.functions)
        STARTUP.lap("kernels of the first round")
        self.close()
        return True

    def close(self) -> None:
        """Drops compilations for a round that will not come."""
        if self._rehearsals is not None:
            self._rehearsals.close()

    def _begin(self, state: BatchState, step: RunRound) -> Rehearsals:
        if self._rehearsals is None:
            self._rehearsals = Rehearsals(state.lens_B.device)
        self._expected[step] = self._rehearsals.rehearse(lambda: self._rounds.rehearse(state, step))
        return self._rehearsals


def compile_steps(
    mixed: MixedRunner, rounds: RoundRunner, steps: Sequence[Pass], state_of: Callable[[RunRound], BatchState]
) -> None:
    """Has the kernels of these steps compiled side by side: of a chunk its first pass and the padded one.  No step is run.

    state_of: the batch of a round's rows.  No step may have a grammar: a rehearsal has no masks.
    """

    def passes() -> None:
        for step in steps:
            if isinstance(step, RunRound):
                rounds.rehearse(state_of(step), step)
            elif isinstance(step, RunMixed):
                mixed.rehearse(state_of(step.round), step)
            else:
                mixed.prompts.rehearse(step)
                mixed.prompts.rehearse(step, padded=True)

    compile_ahead(passes, mixed.workers.state.lens_B.device)
