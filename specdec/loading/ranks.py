"""Loads a pair onto the ranks that a decoder was asked for, and has all of them run the first one's steps.

With one rank nothing is started.  This module knows options and runners; how ranks find each other is parallel/processes.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.loading.build import build_runner, plan_pool
from specdec.loading.load import load_pair
from specdec.loading.resolve import EngineSettings, resolve_device
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.parallel.group import ALONE
from specdec.parallel.processes import Followers, Seat
from specdec.runner.runner import DeviceRunner, follow
from specdec.steps import Step


class Wanted(NamedTuple):
    """What every rank loads its share of."""

    target: str | Path
    draft: str | Path | None
    spec: SpecConfig
    options: EngineOptions


class Ranks:
    """The ranks of one decoder, of which this process is the first."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, size = wanted, wanted.options.tensor_parallel_size
        if size > 1 and resolve_device(wanted.options.device).type != "cpu":
            raise ValueError(f"tensor_parallel_size must be 1 on a GPU, got {size}; nearest setting that works: device='cpu'")
        self._followers = Followers(size, run_rank, wanted) if size > 1 else None

    def load(self) -> tuple[Target, DraftModel | None, EngineSettings, Path]:
        """This rank's share, as of `load_pair`.  RankFailed if another rank could not load its own."""
        group = ALONE if self._followers is None else self._followers.join()
        loaded = load_pair(*self._wanted, group)
        if self._followers is not None:
            self._followers.wait()
        return loaded

    def lead(self, runner: DeviceRunner) -> None:
        """Has the other ranks run every step of this runner."""
        if self._followers is not None:
            runner.announce = self._followers.send

    def close(self) -> None:
        if self._followers is not None:
            self._followers.close()


@contextmanager
def start_ranks(target: str | Path, draft: str | Path | None, spec: SpecConfig, options: EngineOptions) -> Iterator[Ranks]:
    """The ranks of a decoder that the block makes.  If the block fails, they end."""
    ranks = Ranks(Wanted(target, draft, spec, options))
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise


def run_rank(seat: Seat, wanted: Wanted, steps: Iterator[Step]) -> None:
    """What the process of another rank does: loads its share, and runs the first rank's steps."""
    model, head, settings, _ = load_pair(*wanted, seat.join())
    follow(build_runner(model, head, settings, plan_pool(model, head, settings)), steps)
