"""The examples of docs/API.md run as they stand, on the shipped pair, and print what the page shows.

In Python they are one program, as the page says.  A fence `sh` holds a command, which runs in the process of the tests; what a
test writes to /tmp lies in a folder of its own.  In outputs `...` stands for anything, and spaces and line ends count alike.
The example of `specdec serve` runs in tests/door/test_examples.py, and that of `specdec tune`, which needs a GPU, nowhere.
"""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from toolkit.paths import ROOT

import specdec
from specdec.cli.entry import build_parser, main
from specdec.train.__main__ import main as train_main

PAGE = (ROOT / "docs" / "API.md").read_text()
SECTION = re.compile(r"^(##+) ([^\n]+)\n(.*?)(?=^##|\Z)", re.S | re.M)
FENCE = re.compile(r"^```(python|sh|text)\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.S | re.M)
ELSEWHERE = ("specdec serve", "specdec tune")
TIMED = ("specdec bench", "specdec verify", "specdec train", "scripts/train_target")  # print times, or bounds of rounding
MAX_LINES = 14


class Example(NamedTuple):
    """heading: of the section.  kind: the fence's label.  shown: what the page says it prints."""

    heading: str
    kind: str
    code: str
    shown: str


def examples(page: str) -> list[Example]:
    """All fences of a page, each with the output that follows it at once."""
    return [
        Example(heading, kind, code, shown)
        for _, heading, text in SECTION.findall(page)
        for kind, code, shown in FENCE.findall(text)
    ]


EXAMPLES = examples(PAGE)
PROGRAM = [example for example in EXAMPLES if example.kind == "python"]
COMMANDS = [example for example in EXAMPLES if example.kind == "sh"]


def prints(shown: str, printed: str, *, numbers: bool = True) -> bool:
    """Whether something printed what the page shows.  numbers: whether numbers count."""
    if not numbers:
        shown, printed = (re.sub(r"\d[\d.,e-]*", "#", text) for text in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def missing(page: str, classes: list[str], commands: list[str]) -> list[str]:
    """Classes and commands in whose section no example uses them, and shows what came."""
    used = {(each.heading, kind) for each in examples(page) if each.shown for kind in (each.kind, each.code.split()[0])}
    lacking = [name for name in classes if (name, "python") not in used]
    return lacking + [name for name in commands if (name, name.split()[0]) not in used and name != "specdec tune"]


def test_every_class_and_every_command_has_one() -> None:
    """Keeps out: eight hundred lines of tables in which nobody sees what a call looks like."""
    (parsers,) = (action.choices for action in build_parser()._subparsers._group_actions)  # type: ignore[union-attr]
    commands = [*(f"specdec {name}" for name in parsers), "scripts/train_target"]  # type: ignore[union-attr]
    assert missing(PAGE, specdec.__all__, commands) == [] and len(commands) == 12
    assert max(len(example.code.splitlines()) for example in EXAMPLES) <= MAX_LINES


def test_a_missing_example_is_seen() -> None:
    """Keeps out: an example of another section that is taken for a class's own, and one that shows nothing."""
    page = "## A\n```python\nA()\n```\n```text\nx\n```\n## B\n```python\nA()\n```\n### specdec c\n```sh\nspecdec c\n```\n"
    assert missing(page, ["A", "B"], ["specdec c", "specdec d"]) == ["B", "specdec c", "specdec d"]


def test_outputs_are_compared() -> None:
    """Keeps out: a comparison that takes everything."""
    assert prints("a ... c\n", "a\n  b c") and not prints("a c", "a b c") and not prints("a 1", "a 2")
    assert prints("a 1.5e-06, 2x", "a 3, 14x", numbers=False) and not prints("a 1", "b 1", numbers=False)


def test_the_program_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an example of a name that was changed, or that prints something else."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    known = {"__name__": "__main__"}
    try:
        for example in PROGRAM:
            exec(compile(example.code, f"docs/API.md, {example.heading}", "exec"), known)
            out, err = capsys.readouterr()
            assert not err and (prints(example.shown, out) or torch.cuda.is_available()), (
                f"{example.heading} prints\n{out}{err}"
            )
    finally:
        known["decoder"].close()  # type: ignore[attr-defined]


@pytest.mark.slow_cases
@pytest.mark.parametrize("example", COMMANDS, ids=lambda example: example.heading)
def test_a_command_prints_what_the_page_shows(
    example: Example, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keeps out: an example of a flag that was changed, or that prints something else."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)
    program, *argv = shlex.split(example.code.replace("\\\n", " ").replace("/tmp", str(tmp_path)))
    if program == "specdec":
        assert main(argv) == 0
    else:
        assert program == "scripts/train_target" and train_main(["target", *argv]) in (0, None)
    out = capsys.readouterr().out.replace(str(tmp_path), "/tmp")
    timed = example.heading in TIMED
    assert prints(example.shown, out, numbers=not timed) or torch.cuda.is_available(), f"{example.heading} prints\n{out}"
