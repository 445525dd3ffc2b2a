"""`specdec serve` as a process of its own, for tests of what a process has: descriptors, limits, signals."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running(
    *flags: str, files: int | None = None, stderr: int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, over the shipped pair on a free port, and its address once it listens.  It is killed at the end.

    files: how many it may have open; None: as many as this process.
    """

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    argv = [sys.executable, "-P", "-m", "specdec.cli", "serve", "--port", "0", "--device", "cpu", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, preexec_fn=limit)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, process.poll()
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


class Pipe:
    """A pipe whose reader reads only when it is told to."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fill(self) -> None:
        os.set_blocking(self.writer, False)
        try:
            while True:
                os.write(self.writer, b"-" * 4096)
        except BlockingIOError:
            os.set_blocking(self.writer, True)

    def read(self) -> str:
        """What is there now, without what filled it."""
        os.set_blocking(self.reader, False)
        found = b""
        try:
            while piece := os.read(self.reader, 1 << 16):
                found += piece
        except BlockingIOError:
            pass
        return found.lstrip(b"-").decode()

    def close(self) -> None:
        for end in (self.reader, self.writer):
            try:
                os.close(end)
            except OSError:
                pass
