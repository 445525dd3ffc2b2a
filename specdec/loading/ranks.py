"""Loads a pair onto the ranks that a decoder was asked for, and has all of them run the first one's steps.

With one rank nothing is started.  This module knows options, models and runners; how ranks find each other is
parallel/processes.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from specdec.config import SpecConfig
from specdec.draft.eagle import DraftHead
from specdec.loading.build import build_runner, free_memory, plan_pool
from specdec.loading.load import load_pair
from specdec.loading.resolve import EngineSettings, resolve_device
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.parallel.group import ALONE, Group
from specdec.parallel.processes import Followers, Line, Seat, start
from specdec.runner.runner import DeviceRunner
from specdec.steps import Step

Loaded = tuple[Target, DraftHead | None, EngineSettings, Path]


class Wanted(Protocol):
    """What every rank loads its share of.  It is pickled."""

    @property
    def options(self) -> EngineOptions: ...

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        """This rank's share.  options: `self.options`, with this rank's device."""
        ...


class WantedPair(NamedTuple):
    """A pair in its folders: see `load_pair`."""

    target: str | Path
    draft: str | Path | None
    spec: SpecConfig
    options: EngineOptions

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        return load_pair(self.target, self.draft, self.spec, options, group)


class Load(NamedTuple):
    """The message that has other ranks load their shares, in place of what they held."""

    wanted: Wanted


class Build(NamedTuple):
    """The message that has other ranks make a runner, in place of the last one, for the steps that follow."""

    settings: EngineSettings


class Ranks:
    """The ranks that hold one pair together, of which this process is the first.

    options: say how many there are, and on which devices.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._group: Group = ALONE
        self._followers: Followers | None = None
        if options.tensor_parallel_size > 1:
            check_devices(options)
            self._followers = start(options.tensor_parallel_size, run_rank)

    def load(self, wanted: Wanted) -> Loaded:
        """This rank's share.  RankFailed if another rank could not load its own."""
        followers = self._followers
        if followers is None:
            return wanted.load(ALONE, wanted.options)
        followers.send(Load(wanted))
        options = options_of(wanted.options, 0)
        try:
            if self._group is ALONE:
                followers.wait("here")
                self._group = followers.seat.join(resolve_device(options.device))
                followers.at_failure = self._group.abort
            loaded = wanted.load(self._group, options)
        except (TypeError, ValueError):  # what was asked for is wrong: all ranks find the same
            raise
        except BaseException as error:
            raise followers.explain(error) from error
        followers.wait("loaded")
        return loaded

    def build(self, settings: EngineSettings) -> None:
        """Has the other ranks make a runner, as this rank does next."""
        if self._followers is not None:
            self._followers.send(Build(settings))

    def lead(self, runner: DeviceRunner) -> None:
        """Has the other ranks run every step of this runner."""
        if self._followers is not None:
            runner.lead(self._followers)

    def close(self) -> None:
        if self._followers is not None:
            self._followers.close()


@contextmanager
def start_ranks(options: EngineOptions) -> Iterator[Ranks]:
    """The ranks of a decoder that the block makes.  If the block fails, they end."""
    ranks = Ranks(options)
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise


class Follower:
    """Another rank: what it holds, as the first rank's messages change it."""

    def __init__(self, seat: Seat, line: Line) -> None:
        self._seat, self._line = seat, line
        self._group: Group | None = None
        self._held: tuple[Target, DraftHead | None, torch.device] | None = None
        self._runner: DeviceRunner | None = None

    def take(self, message: Any) -> None:
        """Does what a message says."""
        if isinstance(message, Load):
            self._load(message.wanted)
        elif isinstance(message, Build):
            self._build(message.settings)
        else:
            assert self._runner is not None, "steps come after Build"
            follow(self._runner, message)

    def _load(self, wanted: Wanted) -> None:
        options = options_of(wanted.options, self._seat.rank)
        device = resolve_device(options.device)
        if self._group is None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._line.tell("here")
            self._group = self._seat.join(device)
        self._runner = self._held = None
        free_memory(device)
        model, head, _, _ = wanted.load(self._group, options)
        self._held = model, head, device
        self._line.tell("loaded")

    def _build(self, settings: EngineSettings) -> None:
        assert self._held is not None, "Build comes after Load"
        model, head, device = self._held
        self._runner = None
        free_memory(device)  # of the last runner's pool and graphs
        options = replace(settings.options, device=str(device))
        settings = replace(settings, device=device, options=options)
        self._runner = build_runner(model, head, settings, plan_pool(model, head, settings))


def run_rank(seat: Seat, line: Line) -> None:
    """What the process of another rank does: whatever the first rank's messages say."""
    follower = Follower(seat, line)
    for message in line.messages():
        follower.take(message)


def follow(runner: DeviceRunner, step: Step) -> None:
    """Runs a step of the first rank on another one, which reads no tokens back."""
    if (pending := runner.run(step)) is not None:
        pending.drop()


def options_of(options: EngineOptions, rank: int) -> EngineOptions:
    """The options of one rank: its GPU is that many after the first one's, which is cuda:0 unless it is named."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    device = torch.device(device)
    if options.tensor_parallel_size == 1 or device.type != "cuda":
        return options
    return replace(options, device=f"cuda:{(device.index or 0) + rank}")


def check_devices(options: EngineOptions) -> None:
    """ValueError unless there is a GPU for each rank, or all run on CPUs."""
    first = torch.device(str(options_of(options, 0).device).replace("auto", "cpu"))
    if first.type != "cuda":
        return
    size, there = options.tensor_parallel_size, torch.cuda.device_count() - (first.index or 0)
    if size > there:
        raise ValueError(
            f"tensor_parallel_size {size} needs a GPU for each rank from {first} on, but torch sees {max(there, 0)}; nearest "
            f"setting that works: tensor_parallel_size={max(there, 1)}"
        )
