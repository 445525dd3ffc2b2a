"""What a long call says on stderr while it runs: lines that are few and go on, and a bar on a terminal."""

from __future__ import annotations

import io
import re
import threading
from contextlib import redirect_stdout

import pytest

from specdec.screen.progress import PACE, Pace, PlainLines, show_progress


def test_progress_has_plain_lines_where_nobody_watches_a_bar() -> None:
    """Keeps out: a log that is silent for a minute, one with a line for each of a thousand passes, or every few seconds of an
    hour; lines of a call that is over at once; control characters.
    """
    out, now = io.StringIO(), [100.0]
    lines = PlainLines("bench", "passes", out, lambda: now[0])
    lines("loading", 0, 1)
    assert not out.getvalue() and lines.print_if_due() == PACE.first
    for index in range(1000):
        now[0] += 1.0
        lines("passes", index, 1000)
    said = out.getvalue().splitlines()
    assert said[0] == "specdec: bench: passes (5 s, 4 of 1,000 passes done, about 17 min left)"
    assert [line.split("(")[1].split(" s")[0] for line in said[:7]] == ["5", "15", "30", "60", "120", "180", "240"]
    assert len(said) == 19 and "\x1b" not in out.getvalue() and said[-1].endswith("(960 s, 959 of 1,000 passes done)")


def test_lines_go_on_where_a_call_tells_nothing() -> None:
    """Keeps out: a log that is silent while a model is loaded or writes its texts, lines after the end, a thread that stays."""
    out, told = io.StringIO(), threading.Semaphore(0)
    write = out.write
    out.write = lambda text: (told.release() if "loading" in text else None) or write(text)
    with show_progress("train", "parts", out, Pace(first=0.01, least=0.01, wait=0.01)) as report:
        report("loading the target", 0, 1)
        for _ in range(3):
            assert told.acquire(timeout=60)
    said = out.getvalue()
    assert len(re.findall(r"^specdec: train: loading the target \(\d+ s\)$", said, re.M)) >= 3  # a busy machine takes seconds
    assert "specdec-progress" not in {thread.name for thread in threading.enumerate()} and out.getvalue() == said


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_log_that_goes_away_does_not_end_the_call() -> None:
    """Keeps out: a thread's traceback in place of a result."""
    out, tried = io.StringIO(), threading.Event()

    def write(text: str) -> int:
        tried.set()
        raise BrokenPipeError

    out.write = write
    with show_progress("train", "parts", out, Pace(first=0.01)) as report:
        report("loading", 0, 1)
        assert tried.wait(timeout=60)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_asks_the_stream_what_it_is(is_terminal: bool) -> None:
    """Keeps out: a bar in a file, and plain lines that push a terminal's text away."""
    out = io.StringIO()
    out.isatty = lambda: is_terminal
    with show_progress("bench", "passes", out, Pace(first=0.0)) as report:
        report("warm-up", 3, 10)
    plain = [line for line in out.getvalue().splitlines() if line.startswith("specdec: bench:")]
    assert bool(plain) == (not is_terminal) == ("\x1b" not in out.getvalue())


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_printed_goes_where_stdout_goes(is_terminal: bool) -> None:
    """Keeps out: results on the terminal, and not in the file that stdout was sent to, while a bar is shown; and a bar that
    tears what is printed where both are on one terminal."""
    bar, out = io.StringIO(), io.StringIO()
    bar.isatty = lambda: True
    out.isatty = lambda: is_terminal
    with redirect_stdout(out), show_progress("bench", "passes", bar):
        print("the result")
    assert ("the result" in bar.getvalue()) == is_terminal
    assert out.getvalue() == ("" if is_terminal else "the result\n")
