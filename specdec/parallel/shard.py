"""Which share of a model a rank holds.  Knows numbers only: no process, no tensor and no model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """The share of rank `rank` among `size` ranks, counted from 0.  Without arguments: the whole model on one rank."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, (self.rank, self.size)

    def share(self, count: int) -> int:
        """How many of `count` equal things each rank holds.  If there are fewer than ranks, several ranks hold the same one."""
        assert count % self.size == 0 or self.size % count == 0, (count, self.size)
        return max(1, count // self.size)

    def copies(self, count: int) -> int:
        """How many neighbouring ranks hold the same of `count` things: 1, unless there are fewer of them than ranks."""
        return max(1, self.size // count)

    def piece(self, count: int) -> slice:
        """This rank's run of `count` things, of which the last ranks may hold fewer, or none."""
        most = -(-count // self.size)
        return slice(min(self.rank * most, count), min((self.rank + 1) * most, count))


WHOLE = Shard()
