"""What the server writes where nobody reads it: the queue in front of a descriptor."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from queue import SimpleQueue
from typing import Any

import pytest
from toolkit.serving.command import Pipe
from toolkit.serving.server import PATIENCE, wait_until

from specdec.serve.process.output import NonBlockingStream, output_that_never_waits

LINE = "x" * 99 + "\n"


@pytest.fixture()
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def everything(pipe: Pipe, until: str) -> str:
    """All that comes, up to a text that must come."""
    found = ""

    def has_come() -> bool:
        nonlocal found
        found += pipe.read()
        return until in found

    wait_until(has_come, f"{until!r} comes")
    return found


def test_no_write_waits_and_what_was_lost_is_said(pipe: Pipe) -> None:
    """Keeps out: a thread that stops because nobody reads its log, memory that grows with a log that nobody reads, and lines
    that are missing without a word, or of which a wrong number is given."""
    pipe.fill()
    out = NonBlockingStream(pipe.writer, max_held=50 * len(LINE))
    began = time.monotonic()
    for number in range(1000):
        print(f"{number:099}", file=out, flush=True)
    assert time.monotonic() - began < 5 and out.dropped == 950
    before = everything(pipe, "950 lines were dropped here")
    print("after", file=out)
    lines = (before + everything(pipe, "after")).splitlines()
    assert [int(line) for line in lines[:50]] == list(range(50)) and lines[51:] == ["after"]
    note = json.loads(lines[50])
    assert (note["event"], note["level"]) == ("server", "warning") and note["time"]
    out.close()


def test_a_slow_reader_is_not_told_with_every_line(pipe: Pipe) -> None:
    """Keeps out: a log that is half notes about lost lines, because each line that is read makes room for one."""
    pipe.fill()
    out, found = NonBlockingStream(pipe.writer, max_held=400 * len(LINE)), ""
    for _ in range(60):  # each of which makes room for a tenth of the queue, and writes more than that
        found += os.read(pipe.reader, 4096).decode()
        time.sleep(0.005)
        for _ in range(60):
            out.write(LINE)
    assert out.dropped > 500
    found += everything(pipe, "dropped here")
    assert found.count("dropped here") < 20
    out.close()


def test_lines_stay_whole(pipe: Pipe) -> None:
    """Keeps out: lines of two threads that are mixed, which no reader of JSON takes, and text without an end that is lost."""
    out = NonBlockingStream(pipe.writer)

    out.write("a")
    other = threading.Thread(target=lambda: (out.write("b"), out.write("b\n"), out.write("never ended"), out.flush()))
    other.start()
    other.join()
    out.write("a\n")
    out.write("begun")
    out.close()
    assert pipe.read() == "bb\nnever endedaa\nbegun"


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    """Keeps out: a server that ends, or that counts nothing, because its log's disk is full."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    out = NonBlockingStream(descriptor)
    for _ in range(3):
        out.write("a\nb\n")
    out.drain(PATIENCE)
    assert out.dropped == 6
    out.close()
    os.close(descriptor)


class Disk:
    """What a pipe stands for here: a disk with so many free bytes, which takes the beginning of what does not fit."""

    def __init__(self) -> None:
        self.free = 0

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = os.write(descriptor, data[: self.free])
        self.free -= taken
        return taken


def test_a_line_that_was_half_written_stays_alone(pipe: Pipe) -> None:
    """Keeps out: a line joined to the beginning of one that the disk had no room for, so that no reader of JSON takes it."""
    disk = Disk()
    out = NonBlockingStream(pipe.writer, write=disk.write)
    disk.free = 5
    for _ in range(2):  # nothing of the second is taken, and the first stays half written
        out.write("first line\n")
        out.drain(PATIENCE)
    disk.free = 1 << 16
    out.write("third\n")
    out.drain(PATIENCE)
    torn, said, whole = pipe.read().splitlines()
    assert (torn, whole) == ("first", "third") and json.loads(said)["message"].startswith("2 lines were dropped")
    out.close()


def test_losses_of_an_unwritten_note_are_said_later(pipe: Pipe) -> None:
    """Keeps out: a note that was lost itself, together with the losses that it was to tell of."""
    disk = Disk()
    out = NonBlockingStream(pipe.writer, write=disk.write)
    for _ in range(3):  # each after the first one with a note, which is not written either
        out.write("lost\n")
        out.drain(PATIENCE)
    disk.free = 1 << 16
    out.write("written\n")
    out.drain(PATIENCE)
    said, written = pipe.read().splitlines()
    assert json.loads(said)["message"].startswith("3 lines were dropped") and written == "written" and out.dropped == 3
    out.close()


def test_a_handler_may_write_while_its_thread_does(pipe: Pipe) -> None:
    """Keeps out: a signal's handler that writes while the thread that it interrupts holds the lock, and waits for ever."""
    handlers = ["handled\n"]

    class Interrupted(SimpleQueue):  # type: ignore[type-arg]
        """A queue at which a thread that holds the lock is interrupted, once."""

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            if handlers:
                out.write(handlers.pop())
            super().put(item)

    out = NonBlockingStream(pipe.writer, queue=Interrupted())
    writer = threading.Thread(target=out.write, args=("written\n",), daemon=True)
    writer.start()
    writer.join(timeout=5)
    assert not writer.is_alive(), "the handler waits for its own thread"
    out.close()
    assert pipe.read() == "handled\nwritten\n"


def test_a_pipe_that_does_not_wait_loses_nothing(pipe: Pipe) -> None:
    """Keeps out: lost lines where a parent process has made the shared pipe one that does not wait, as Node does."""
    pipe.fill()
    os.set_blocking(pipe.writer, False)
    out = NonBlockingStream(pipe.writer)
    for number in range(2000):
        out.write(f"{number:099}\n")
    found = everything(pipe, f"{1999:099}\n")
    assert [int(line) for line in found.splitlines()] == list(range(2000)) and not out.dropped
    out.close()


def test_the_end_does_not_wait_for_a_reader(pipe: Pipe) -> None:
    """Keeps out: a process that can't end because nobody reads its last line, and streams that stay replaced afterwards."""
    pipe.fill()
    with os.fdopen(os.dup(pipe.writer), "w") as stderr, redirect_stderr(stderr):
        began = time.monotonic()
        with output_that_never_waits():
            print("never read", file=sys.stderr, flush=True)
            assert isinstance(sys.stderr, NonBlockingStream)
        assert sys.stderr is stderr and time.monotonic() - began < 5
        pipe.read()
