"""Something that may happen thousands of times a second, in two lines of the log: one when it begins, one when it is over."""

from __future__ import annotations

import time

from specdec.serve.log import write_line


class RepeatedEvent:
    """what: has happened, in words.  quiet: seconds without a further time, after which it is over."""

    def __init__(self, what: str, quiet: float) -> None:
        self._what, self._quiet = what, quiet
        self._times = 0
        self._began = self._last = 0.0

    def happened(self, detail: str = "") -> None:
        """Counts it.  The first time is a line of the log, which says the detail too."""
        self._last = time.monotonic()
        if not self._times:
            self._began = self._last
            self._write(self._what + detail)
        self._times += 1

    def look(self) -> None:
        """Writes the line at the end, if it is over and happened more than once.  To be called now and then."""
        if not self._times or time.monotonic() < self._last + self._quiet:
            return
        if self._times > 1:
            self._write(f"{self._times} times in {self._last - self._began:.1f} s, and not since: {self._what}")
        self._times = 0

    def _write(self, message: str) -> None:
        write_line("server", {"level": "warning", "message": message})
