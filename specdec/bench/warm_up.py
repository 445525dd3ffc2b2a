"""Gets a session ready to be timed: what will be measured is compiled, captured and run once, and nothing more.

Whether that was enough is not believed but looked at: see `cell`, which repeats a timed pass that still had to prepare
something.  Knows no files and prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.config import SamplingParams
from specdec.session import Session

CHUNK_USES = 3  # a chunk of prompts is captured at its third use
SHORT_ROUNDS = 2  # of the batch, which each side runs before it is timed


class Laps:
    """Seconds by what they were spent on.  clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to that name."""
        now = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def warm_up(
    session: Session, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], sides: Sequence[bool], laps: Laps
) -> None:
    """Compiles and captures what passes over these prompts need, on each of the sides: whether it speculates.

    sampling: of each prompt.  A side runs whole texts only if its shape is "auto", which learns from them.
    """
    session.rehearse(prompts, sampling[0])
    laps.lap("compiling")
    settings, spec = session.settings, session.settings.spec
    if settings.cuda_graphs or settings.options.prefix_caching:  # whose repeats find the prompts' pages
        first = [_shortened(params, 1) for params in sampling]
        for speculate in sides:
            for _ in range(CHUNK_USES):
                before = session.readiness
                session.generate(prompts, first, speculate=speculate)
                if session.readiness == before:
                    break
    laps.lap("prompts")
    session.capture_rounds(prompts, sampling[0])
    laps.lap("capturing rounds")
    count = settings.options.max_batch_size
    most = 1 + SHORT_ROUNDS * (spec.levels + 1 if spec else 1)
    for speculate in sides:
        session.generate(prompts[:count], [_shortened(params, most) for params in sampling[:count]], speculate=speculate)
    if spec is not None and spec.is_auto:
        session.make_ready()
        session.generate(prompts, sampling, speculate=True)
    laps.lap("warm-up")


def _shortened(params: SamplingParams, most: int) -> SamplingParams:
    """The same options for a text of at most `most` tokens."""
    most = min(most, params.max_tokens)
    return replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
