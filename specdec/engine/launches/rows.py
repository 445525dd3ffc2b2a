"""The rows of the batch: which request holds which, and what a runner has not been told yet of rows that ended."""

from __future__ import annotations

from specdec import steps
from specdec.engine.request import RequestState


class BatchRows:
    """Rows 0 to count - 1.

    states: of the requests that hold rows; an index is a row, and no free row lies between others.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.states: list[RequestState] = []
        # _moved: target row -> the row where the runner still has what now belongs in the target.  _cleared: rows that have
        # become free.
        self._moved: dict[int, int] = {}
        self._cleared: set[int] = set()

    @property
    def is_full(self) -> bool:
        return len(self.states) >= self.count

    def add(self, state: RequestState) -> None:
        """Gives a request the first free row."""
        assert not self.is_full
        self.states.append(state)

    def remove(self, state: RequestState) -> None:
        """Takes a request's row away.  The last row moves into the gap."""
        row, last = self.states.index(state), len(self.states) - 1
        self.states[row] = self.states[last]
        self.states.pop()
        source = self._moved.pop(last, last)
        if row != last:
            self._moved[row] = source
        self._cleared.add(last)

    def departures(self) -> steps.LeaveRows | None:
        """The step that tells the runner which rows have ended; it must run before any other.  None: no row has."""
        if not self._cleared:
            return None
        return steps.LeaveRows(tuple((source, target) for target, source in self._moved.items()), tuple(sorted(self._cleared)))

    def departed(self) -> None:
        """The runner has been told of all departures."""
        self._moved, self._cleared = {}, set()

    def clear_all(self) -> None:
        """No request holds a row any more, and whatever the runner has been told, all rows are to be cleared."""
        assert not self.states
        self._moved, self._cleared = {}, set(range(self.count))
