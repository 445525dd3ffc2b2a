"""A start that takes long says on stderr what it waits for; a quick one, and one from Python, says nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
from toolkit.paths import ROOT

from specdec import SpecDecoder, shipped
from specdec.cli import entry
from specdec.cli.terminal import waiting
from specdec.cli.terminal.screen import Screen
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.screen.progress import Pace
from specdec.startup import STARTUP, Startup

READ = r"2[0-9] of 254 tensors done"
COMMANDS = {
    "generate": ["hi", "--max-tokens", "4", "--device", "cpu"],
    "verify": ["--num-prompts", "1", "--max-tokens", "4", "--device", "cpu"],
    "plan": ["--gpu-memory", "1GB"],
    "inspect": [str(shipped.target_folder())],
}


class Slow:
    """Holds the read of the 30th tensor until somebody has said on stderr that most of these are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen, self.count = threading.Event(), 0
        real: Callable[..., Any] = Checkpoint._take

        def take(checkpoint: Checkpoint, *args: Any) -> Any:
            self.count += checkpoint.has_data
            if self.count == 30 and checkpoint.has_data:
                assert self.seen.wait(20), "nobody said what the command waits for"
            return real(checkpoint, *args)

        monkeypatch.setattr(Checkpoint, "_take", take)


class Lines:
    """A stream for stderr that tells when a line about tensors came."""

    closed = False

    def __init__(self, seen: threading.Event) -> None:
        self.text, self.seen = "", seen

    def write(self, text: str) -> None:
        self.text += text
        if re.search(READ, self.text, re.M):
            self.seen.set()

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_a_long_load_says_how_far_it_is(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a minute of silence in front of the first output, in which nobody knows whether to wait."""
    slow = Slow(monkeypatch)
    err = Lines(slow.seen)
    with redirect_stderr(err):
        assert entry.main([command, *COMMANDS[command]], Pace(quiet=0.0, tick=0.005, least=0.0)) == 0
    said = rf"^specdec: {command}: reading the target's weights \(\d+ s, 2[0-9] of 254 tensors done\)$"
    assert re.search(said, err.text, re.M), err.text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_quick_start_says_nothing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: lines on stderr of what took less than a few seconds, and a thread that outlives its command."""
    assert entry.main([command, *COMMANDS[command]], Pace(quiet=600.0)) == 0
    said = capsys.readouterr().err
    assert not [line for line in said.splitlines() if line.startswith(f"specdec: {command}: ") and "verify: " not in line], said
    assert not [thread for thread in threading.enumerate() if thread.name == "specdec-progress"]


def test_nothing_is_said_after_the_first_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: lines about the start in the middle of a text, and of a command that failed."""
    pace = Pace(quiet=0.0, tick=0.001, least=0.0)
    with waiting.told_if_slow("test", pace):
        waiting.over()
        capsys.readouterr()
        threading.Event().wait(0.05)
        waiting.over()
    assert capsys.readouterr().err == ""
    with pytest.raises(RuntimeError), waiting.told_if_slow("test", pace):
        raise RuntimeError
    assert not [thread for thread in threading.enumerate() if thread.name == "specdec-progress"]


def test_python_callers_get_no_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a library that writes to its caller's stderr."""
    with SpecDecoder.from_pretrained(shipped.target_folder(), device="cpu"):
        assert not [thread for thread in threading.enumerate() if thread.name == "specdec-progress"]
    assert capfd.readouterr() == ("", "")


def test_every_command_with_a_start_says_when_it_is_over() -> None:
    """Keeps out: a command whose own output lines about the start would cut through."""
    for name in ("bench", "plan", "serve", "verify", "heads/eval_head", "heads/inspect", "heads/train"):
        assert "over()" in (ROOT / "specdec" / "cli" / f"{name}.py").read_text(), name


def test_parts_are_counted_within_a_stage() -> None:
    """Keeps out: "300 of 254 tensors", of a tied matrix that is read twice, and counts that go on in the next stage."""
    start = Startup()
    start.begin("a", 2)
    for _ in range(3):
        start.part_done()
    assert start.doing == ("a", 2, 2)
    start.begin("b")
    assert start.doing == ("b", 0, 1)
    with SpecDecoder.from_pretrained(shipped.target_folder(), device="cpu") as decoder:
        assert STARTUP.doing == ("waiting for the first token", 0, 1)
        next(decoder.stream([5, 6]))
        assert not STARTUP.doing[0], "lines about the start would cut through the text"


def test_a_screen_does_not_end_the_wait() -> None:
    """Keeps out: a terminal's first text, whose kernels are yet to be compiled, that is waited for without a word."""
    with waiting.told_if_slow("generate"):
        Screen("hi", True, str, [1], False)
        assert not waiting._over.is_set()
