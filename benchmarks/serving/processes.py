"""The clients' processes as the benchmark drives them: it deals requests out to them and collects their records."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from serving.clients import Record
from serving.work import Work

DAY = 86_400.0  # seconds, in which every lane comes to its end
LEAD = 0.3  # seconds between a command and its start, in which the processes make their prompts


class ClientProcesses:
    """A context manager around some client processes.  They end with the block."""

    def __init__(self, url: str, key: str, count: int) -> None:
        folder = Path(__file__).resolve().parents[1]
        command = [sys.executable, "-m", "serving.clients", url, key]
        self._processes = [
            subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def __enter__(self) -> ClientProcesses:
        for process in self._processes:
            assert self._answer(process) == "ready"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()  # the end of its commands, after which it leaves
            process.stdout.close()
        for process in self._processes:
            process.wait(timeout=30)

    def closed(self, work: Work, lanes: Sequence[Sequence[int]], seconds: float = DAY) -> tuple[float, list[Record]]:
        """Every lane is a client that sends its next request when the last one has ended, for so long.  (start, records)"""
        count = min(len(self._processes), len(lanes))
        return self._run(work, [{"lanes": lanes[i::count], "seconds": seconds} for i in range(count)])

    def opened(self, work: Work, arrivals: Sequence[tuple[float, int]], places: int) -> tuple[float, list[Record]]:
        """Requests are due at their times, whatever the server does; each process has its share of the places.

        arrivals: (seconds after the start, the request's number), which are dealt to the processes in turn.
        """
        count = min(len(self._processes), places)
        assert places % count == 0, (places, count)
        return self._run(work, [{"arrivals": arrivals[i::count], "places": places // count} for i in range(count)])

    def _run(self, work: Work, shares: list[dict[str, Any]]) -> tuple[float, list[Record]]:
        start, used = time.monotonic() + LEAD, self._processes[: len(shares)]
        for process, share in zip(used, shares, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps({"work": asdict(work), "start": start, **share}) + "\n")
            process.stdin.flush()
        return start, [Record(**fields) for process in used for fields in self._answer(process)]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of clients ended with code {process.wait()}; its errors are printed above")
        return json.loads(line)
