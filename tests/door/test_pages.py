"""The pages for people: the command line knows their commands, their links lead somewhere, and CI runs the README."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from toolkit.rules.guides import GUIDES, ROOMS

from specdec.cli.entry import build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *ROOMS]
OURS = {
    "specdec": [],
    "./scripts/specdec": [],
    "./scripts/bench": ["bench"],
}  # a command, and what it puts before its arguments


def load_runner() -> ModuleType:
    """The script that CI runs, as a module."""
    spec = importlib.util.spec_from_file_location("readme_commands", ROOT / ".ci" / "readme_commands.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runner = load_runner()


def specdec_commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """(the line, what `specdec` gets) of every command in a fence for a shell, whether or not CI runs the fence."""
    for fence in runner.fences(page):
        if fence.label in ("sh", "text"):
            for line in runner.shell_lines(fence.body):
                command = line.split()[0]
                if command in OURS:
                    yield line, OURS[command] + shlex.split(line, comments=True)[1:]


def slug(heading: str) -> str:
    """The anchor that code hosts make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(path: Path) -> list[str]:
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            found.append(target)
        elif anchor and anchor not in {
            slug(line.lstrip("# ")) for line in file.read_text().splitlines() if line.startswith("#")
        }:
            found.append(target)
    return found


def test_there_is_something_to_run():
    """Keeps out: a README whose fences lost their labels, of which nothing would run any more."""
    commands = runner.commands((ROOT / "README.md").read_text(), "python")
    assert sum(argv[0] == "bash" for _, argv in commands) >= 2 and sum(argv[0] == "python" for _, argv in commands) >= 1
    assert "readme_commands.py" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_is_short():
    """Keeps out: a first page that grows until nobody reads it to its end."""
    assert len((ROOT / "README.md").read_text().split()) <= 1200


def test_a_page_is_taken_apart():
    """Keeps out: a fence without a label that is passed over, a continued line that is cut, a comment that is run."""
    page = "x\n```sh\na b \\\n  c\n\n# no\nd\n```\n```text\nrm DIR\n```\n```python\nprint(1)\n```\n"
    assert [argv[-1] for _, argv in runner.commands(page, "python")] == ["a b    c", "d", "print(1)\n"]
    assert [fence.line for fence in runner.fences(page)] == [2, 9, 12]
    with pytest.raises(ValueError, match="line 1: a fence must be labelled"):
        runner.fences("```\nls\n```\n")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_known(path: Path) -> None:
    """Keeps out: a page that tells its readers to use a flag which was renamed."""
    for line, argv in specdec_commands(path.read_text()):
        try:
            build_parser().parse_args(argv)
        except SystemExit as error:
            raise AssertionError(f"{path.name}: specdec does not know {line!r}") from error


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    """Keeps out: a link to a page, a file or a heading that was moved."""
    assert broken_links(path) == []


@functools.cache
def roots() -> tuple[Path, ...]:
    """The repository, and every folder of the product and of tests/."""
    tops = [ROOT / top for top in ("specdec", "draft", "verify", "attention", "tests")]
    return (ROOT, *tops, *(folder for top in tops for folder in top.rglob("*/")))


@functools.cache
def meant_files(path: str) -> tuple[Path, ...]:
    """The files that a page may mean."""
    return tuple(root / path for root in roots() if (root / path).exists())


def missing_files(page: str) -> list[str]:
    """Paths in backticks that are nowhere."""
    paths = re.findall(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|md|sh|txt|json|svg))?|\w+\.py|scripts/\w+)`", page)
    return [path for path in paths if not meant_files(path)]


def misplaced_names(page: str) -> list[str]:
    """Names with a file in brackets after them, or before them and a colon, that this file does not have."""
    behind = re.findall(r"`([A-Za-z_]\w*)(?:\([^`]*\))?`\s+\(`([\w./-]+\.py)`\)", page)
    before = re.findall(r"`([\w./-]+\.py)`(?: \([^)]*\))?: `([A-Za-z_]\w*)`", page)
    pairs = [*behind, *((name, path) for path, name in before)]
    return [name for name, path in pairs if not any(re.search(rf"\b{name}\b", file.read_text()) for file in meant_files(path))]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_pages_name_are_there(path: Path) -> None:
    """Keeps out: a guide that sends its reader to a file which was moved or split."""
    assert path.read_text().count(".py`") > (20 if path in GUIDES[:2] else 1)
    assert missing_files(path.read_text()) == []
    assert misplaced_names(path.read_text()) == []


@functools.cache
def words_of_the_code() -> frozenset[str]:
    """Every word of the package and of the tests but this file's."""
    folders = ("specdec", "draft", "verify", "attention", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py") if file != Path(__file__).resolve()]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_pages_use_are_in_the_code(path: Path) -> None:
    """Keeps out: a guide that tells its reader to change a function or a field which was renamed."""
    used = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", path.read_text())
    named = {part for name in used if not name.endswith((".py", ".md", ".json", ".txt")) for part in name.split(".")}
    tools = {"pytest", "ruff", "mypy", "dev", "format", "check"}
    assert len(named) > (30 if path in GUIDES[:2] else 5) and named - words_of_the_code() - tools == set()


def test_a_missing_file_is_seen() -> None:
    """Keeps out: a search that overlooks folders, or names without one."""
    page = "`specdec/config.py` `engine/loop.py` `steps.py` `caches/` `scripts/test` `specdec/no.py` `no.py` `no/` `scripts/no`"
    assert missing_files(page) == ["specdec/no.py", "no.py", "no/", "scripts/no"]


def test_a_misplaced_name_is_seen() -> None:
    """Keeps out: a search that passes over calls, line ends, and names after their files."""
    right = "`Segment` (`attention/segment.py`) `draft(x, y)` (`draft/drafter.py`) `attend.py`: `PassTables`"
    wrong = "`PassTables`\n(`attention/segment.py`) `Segment(x)` (`drafter.py`) `draft/kinds.py`: `Segment`"
    assert misplaced_names(right) == [] and misplaced_names(wrong) == ["PassTables", "Segment", "Segment"]


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    """Keeps out: a search that overlooks anchors."""
    (tmp_path / "b.md").write_text("# S, k and nd\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md) [x](b.md#s-k-and-nd) [x](c.md) [x](b.md#other) [x](#here) [x](https://example.org)")
    assert broken_links(page) == ["c.md", "b.md#other", "#here"]
