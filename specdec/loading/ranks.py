"""Has all ranks of a decoder load their shares of a pair, and run the steps of the first one.

With one rank nothing is started.  This module knows options, models and runners; how ranks find each other is the business of
parallel/.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from specdec.draft.drafter import DraftModel
from specdec.engine.loop import Engine
from specdec.loading.build import build_engine, build_runner, free_memory, plan_pool
from specdec.loading.pair import Loaded, WantedPair
from specdec.loading.resolve import EngineSettings, resolve_device
from specdec.loading.threads import use_threads
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.parallel.group import ALONE, Group
from specdec.parallel.launched import launched, meet_others, run_other_rank
from specdec.parallel.processes import OtherRanks, RankPipe, Rendezvous, start
from specdec.runner.runner import DeviceRunner, RankCall
from specdec.steps import Step


class LoadShare(NamedTuple):
    """The message that has other ranks load their shares, in place of what they held."""

    wanted: WantedPair


class BuildRunner(NamedTuple):
    """The message that has other ranks make a runner, in place of the last one, for the steps that follow.

    drafts: with the draft head.
    """

    settings: EngineSettings
    drafts: bool


class Ranks:
    """The ranks that hold one pair together, of which this process is the first.

    options: say how many there are, and on which devices.  ValueError if there are fewer devices.
    """

    def __init__(self, options: EngineOptions) -> None:
        check_devices(options)
        self.size = options.tensor_parallel_size
        self._other_ranks: OtherRanks | None = None
        self._finalizer: weakref.finalize[Any, Ranks] | None = None  # for a decoder that is forgotten, or not closed at the end

    def load(self, wanted: WantedPair) -> Loaded:
        """This rank's share.  RankFailed if another rank could not load its own."""
        if self.size == 1:
            return wanted.load(ALONE, wanted.options)
        wanted.check(self.size)
        if self._other_ranks is None:
            process = launched(self.size)
            self._other_ranks = start(self.size, run_rank) if process is None else meet_others(process)
            self._finalizer = weakref.finalize(self, self._other_ranks.close)
        other_ranks, options = self._other_ranks, options_of(wanted.options, 0)
        other_ranks.send(LoadShare(wanted))
        with _explained(other_ranks):
            if other_ranks.group is ALONE:
                other_ranks.join(resolve_device(options.device))
            loaded = wanted.load(other_ranks.group, options)
        other_ranks.wait("loaded")
        return loaded

    def build_engine(self, model: Target, head: DraftModel | None, settings: EngineSettings) -> Engine[DeviceRunner]:
        """See build.py.  All ranks make a runner, in place of the last one, and from now on run every step of this rank's."""
        other_ranks = self._other_ranks
        if other_ranks is None:
            return build_engine(model, head, settings)
        other_ranks.send(BuildRunner(settings, head is not None))
        with _explained(other_ranks):
            engine = build_engine(model, head, settings)
        engine.runner.lead(other_ranks)
        return engine

    def close(self) -> None:
        """Ends the other ranks.  A second call does nothing."""
        if self._finalizer is not None:
            self._finalizer()


@contextmanager
def _explained(other_ranks: OtherRanks) -> Iterator[None]:
    """Errors of the block are those of the rank that failed first, but for what was asked wrongly: all ranks find the same."""
    try:
        yield
    except (TypeError, ValueError):
        other_ranks.check()  # what a rank that failed did not send may be a number that makes no sense
        raise
    except BaseException as error:
        raise other_ranks.explain(error) from error


@contextmanager
def start_ranks(options: EngineOptions) -> Iterator[Ranks]:
    """The ranks of a decoder that the block makes.  If the block fails, they end.

    Where a launcher such as torchrun has started the ranks, the block runs on the first.  The other processes serve it until
    its decoder is closed, and then end: SystemExit is raised in them.
    """
    serve_first_rank(options)
    ranks = Ranks(options)
    try:
        yield ranks
    except BaseException:
        ranks.close()
        raise


def serve_first_rank(options: EngineOptions) -> None:
    """On a launched rank that is not the first: serves the first one until it ends, and raises SystemExit.  Else nothing."""
    process = launched(options.tensor_parallel_size)
    if process is not None and process.rank > 0:
        check_devices(options)
        run_other_rank(process, run_rank)
        raise SystemExit(0)


class RankWorker:
    """Another rank: what it holds, as the first rank's messages change it."""

    def __init__(self, rendezvous: Rendezvous, pipe: RankPipe) -> None:
        self._rendezvous, self._pipe = rendezvous, pipe
        self._group: Group | None = None
        self._held: tuple[Target, DraftModel | None, torch.device] | None = None
        self._runner: DeviceRunner | None = None

    def take(self, message: Any) -> None:
        """Does what a message says."""
        if isinstance(message, LoadShare):
            self._load(message.wanted)
        elif isinstance(message, BuildRunner):
            self._build(message.settings, message.drafts)
        else:
            assert self._runner is not None, "steps come after BuildRunner"
            run_step(self._runner, message)

    def _load(self, wanted: WantedPair) -> None:
        options = options_of(wanted.options, self._rendezvous.rank)
        device = resolve_device(options.device)
        if self._group is None:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._pipe.tell("here")
            self._group = self._rendezvous.join(device)
        self._runner = self._held = None
        free_memory(device)
        model, head, settings, _ = wanted.load(self._group, options)
        use_threads(settings.threads)  # this thread runs all steps
        self._held = model, head, device
        self._pipe.tell("loaded")

    def _build(self, settings: EngineSettings, drafts: bool) -> None:
        assert self._held is not None, "BuildRunner comes after LoadShare"
        model, head, device = self._held
        head = head if drafts else None
        self._runner = None
        free_memory(device)  # of the last runner's pool and graphs
        settings = replace(settings, device=device, options=replace(settings.options, device=str(device)))
        self._runner = build_runner(model, head, settings, plan_pool(model, head, settings))


def run_rank(rendezvous: Rendezvous, pipe: RankPipe) -> None:
    """What the process of another rank does: whatever the first rank's messages say."""
    worker = RankWorker(rendezvous, pipe)
    for message in pipe.messages():
        worker.take(message)


def run_step(runner: DeviceRunner, step: Step | RankCall) -> None:
    """Runs a step of the first rank on another one, which reads no tokens back."""
    if isinstance(step, RankCall):
        runner.on_all_ranks(step.function, *step.given)
    elif (pending := runner.run(step)) is not None:
        pending.drop()


def options_of(options: EngineOptions, rank: int) -> EngineOptions:
    """The options of one rank: its GPU is as many after the first one's as its number on its machine says.

    The first GPU is cuda:0 unless the options name one.
    """
    size, first = options.tensor_parallel_size, _first_device(options)
    if size == 1 or first.type != "cuda":
        return options
    process = launched(size)
    number = rank if process is None else process.local_rank
    return replace(options, device=f"cuda:{(first.index or 0) + number}")


def check_devices(options: EngineOptions, count: Callable[[], int] = torch.cuda.device_count) -> None:
    """ValueError unless there is a GPU for each rank of this machine, or all run on CPUs.  count: says how many there are."""
    size, first = options.tensor_parallel_size, _first_device(options)
    if size == 1 or first.type != "cuda":
        return
    process = launched(size)
    needed, there = size if process is None else process.local_size, count() - (first.index or 0)
    if needed > there:
        nearest = f"tensor_parallel_size={there}" if there > 0 else "device='cpu'"
        raise ValueError(
            f"tensor_parallel_size {size} needs {needed} GPUs from cuda:{first.index or 0} on, but torch sees {max(there, 0)}; "
            f"nearest setting that works: {nearest}"
        )


def _first_device(options: EngineOptions) -> torch.device:
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(options.device)
