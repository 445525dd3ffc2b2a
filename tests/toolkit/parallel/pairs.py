"""Pairs for several ranks, one of which fails."""

from typing import Any, NamedTuple

from specdec.loading.pair import Loaded, WantedPair
from specdec.options import EngineOptions
from specdec.parallel.group import Group


class FailingPair(NamedTuple):
    """A pair whose target raises on one rank, in its pass number `call`."""

    pair: WantedPair
    rank: int
    call: int

    @property
    def options(self) -> EngineOptions:
        return self.pair.options

    def check(self, size: int) -> None:
        self.pair.check(size)

    def load(self, group: Group, options: EngineOptions) -> Loaded:
        loaded = self.pair.load(group, options)
        target, calls = loaded[0], [0]
        forward = target.forward

        def failing(*given: Any) -> Any:
            calls[0] += 1
            if calls[0] == self.call:
                raise RuntimeError("no more room for activations")
            return forward(*given)

        if group.rank == self.rank:
            target.forward = failing  # type: ignore[method-assign]
        return loaded
