"""`python benchmarks`: it lists the scripts and runs each by its name; the rooms' pages name all scripts and results."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from toolkit.parallel.forked import launched_ranks
from toolkit.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


def load_door() -> ModuleType:
    """benchmarks/__main__.py, which takes the name of a script."""
    spec = importlib.util.spec_from_file_location("benchmarks_main", BENCHMARKS / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


door = load_door()
ROOMS = door.rooms()
SCRIPTS = [name for room in ROOMS for name in door.scripts(room)]


@pytest.fixture()
def as_command(monkeypatch: pytest.MonkeyPatch):
    """The path as `python benchmarks` has it.  What was imported of the rooms is forgotten after the test."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before, argv = set(sys.modules), sys.argv
    yield
    sys.argv = argv  # which the door replaces
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {*ROOMS, *(file.stem for file in BENCHMARKS.glob("*.py"))}:
            del sys.modules[name]


def test_every_script_says_what_it_can(as_command, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a script whose imports broke, that needs a GPU to say what it is for, or that is run without its options."""
    assert len(SCRIPTS) > 40
    for name in SCRIPTS:
        with pytest.raises(SystemExit) as end:
            door.main([name, "--help"])
        assert end.value.code == 0, name
        told = capsys.readouterr().out
        assert f"    python benchmarks {name} " in told or f"    PYTHONPATH=FOLDER python benchmarks {name} " in told, name


def test_a_script_runs_by_its_name() -> None:
    """Keeps out: help that shows a command which does not work, and a path of Python on which the rooms are missing."""
    command = [sys.executable, "-P", str(BENCHMARKS), "rounds.start"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert told.startswith("usage: python benchmarks rounds.start [-h]")
    refused = subprocess.run([*command, "--only", "none"], capture_output=True, text=True)
    assert refused.returncode == 2 and "python benchmarks rounds.start: error: argument --only" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize("name", ["layers.recurrent"])
def test_a_script_that_needs_a_gpu_says_so_first(as_command, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Keeps out: minutes of compiling on a machine that has no GPU, with an AssertionError of torch for each tile."""
    assert door.answer([name]) == 2
    assert f"python benchmarks {name}: error: this script needs an NVIDIA GPU" in capsys.readouterr().err


SPAWNS = """'''Runs a function in another process.'''

import multiprocessing
import sys

from shared import double


def named(number: int) -> tuple[str, int]:
    return __name__, double(number)


def main() -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(named, [int(sys.argv[1])]))
    return 3
"""


def test_functions_of_a_script_run_in_spawned_processes(tmp_path: Path) -> None:
    """Keeps out: processes of clients and ranks that can't import the script that started them; a lost exit code."""
    (tmp_path / "room").mkdir()
    shutil.copy(BENCHMARKS / "__main__.py", tmp_path)
    files = {"shared.py": "def double(x):\n    return 2 * x\n", "room/__init__.py": "", "room/spawns.py": SPAWNS}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "-P", tmp_path, "room.spawns", "4"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[('room.spawns', 8)]\n", 3), done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_all_scripts_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a script that nobody finds, and a line that says nothing."""
    assert door.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert list(listed) == SCRIPTS and all(len(text) > 30 for text in listed.values())
    assert [line.partition(":")[0] for line in lines[1:] if line and not line.startswith(" ")] == ROOMS


def test_one_room_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: the name of a room that is refused, though a reader meets it first."""
    assert door.main(["serving"]) == 0
    told = capsys.readouterr().out
    assert "serving.serve_soak" in told and "serving.clients" not in told and "rounds." not in told


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("round_8b", "rounds.round_8b"),
        ("caches.round_tp", "rounds.round_tp"),
        ("benchmarks/texts/near_ties.py", "texts.near_ties"),
        ("serving.clients", "serving.replicas"),
        ("../examples.start", "rounds.start"),
        ("", "caches.float8_queries"),
    ],
)
def test_an_unknown_name_is_refused(asked: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a module without main() that is imported and does nothing, and a name that leads out of the rooms."""
    assert door.main([asked]) == 2
    told = capsys.readouterr()
    assert told.out == "" and f"no script is called {asked!r}; the nearest is {near!r};" in told.err


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["texts.grammar_drafts", "--target", "BAD"], "target: expected an existing model folder or a hub id like 'org/name'"),
        (["texts.grammar_drafts", "--prompts", "BAD"], "No such file or directory: 'BAD'"),
        (["texts.grammar_drafts", "--out", "no_folder/out.json"], "--out no_folder/out.json can't be written: the folder"),
        (["texts.deterministic", "--models", "dense,BAD"], "argument --models: expected some of pair, dense"),
        (["texts.deterministic", "--ways", "0,8"], "argument --ways: expected numbers from 1 to 7, got 0,8"),
        (["rounds.round_block", "--heads", "BAD"], "argument --heads: expected some of eagle3"),
    ],
)
def test_a_wrong_value_is_one_line(
    arguments: list[str], said: str, as_command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a traceback for a folder that does not exist; a file that can't be written, told after the measurement."""
    monkeypatch.delenv("SPECDEC_DEBUG", raising=False)
    try:
        code = door.answer(arguments)
    except SystemExit as end:  # what argparse refuses
        code = end.code
    told = capsys.readouterr()
    last = told.err.splitlines()[-1]
    assert (code, told.out) == (2, "") and last.startswith(f"python benchmarks {arguments[0]}: error: "), told.err
    assert said in last and "Traceback" not in told.err


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("shape", ["8B", "Qwen3-235B-A22B-fp8"])
def test_rounds_of_several_ranks_are_measured(shape: str, as_command, tmp_path: Path) -> None:
    """Small shapes on processes of a CPU.  Keeps out: a command that fails at its end, after minutes on borrowed GPUs; a line
    that was left out without a word."""
    out, options = tmp_path / "found.json", "--ranks 2 --device cpu --tiny --rounds 1 --shape".split()
    with launched_ranks(2):
        assert door.main(["rounds.round_tp", *options, shape, "--out", str(out)]) is None
    found = json.loads(out.read_text())
    assert {row["spec"] for row in found["rows"]} == {"plain", "5,1,6", "5,8,32"}
    assert all(row["ms"] > 0 for row in found["rows"])
    assert [each["rows"] for each in found["sums"][:2]] == [1, 6]
    assert bool(found["left_out"]) == (shape != "8B")
    for each in found["left_out"]:
        assert each["what"].endswith(", tensor") and "nearest setting that works: expert_parallel='experts'" in each["why"]


def test_a_fault_of_a_script_keeps_its_traceback(as_command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a measurement that took long and failed on the device, of which one line is left."""

    def fails(name: str, options: list[str]) -> None:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        door.answer([SCRIPTS[0]], fails)
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    with pytest.raises(ValueError, match="invalid literal"):
        door.answer([SCRIPTS[0]], lambda name, options: int("x"))


def test_a_reader_that_went_away_is_141() -> None:
    """Keeps out: a traceback of `python benchmarks | head`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-P", str(BENCHMARKS)], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def faults_of_page(room: Path) -> list[str]:
    """What the room's README leaves out, and results that it names without having them."""
    page = (room / "README.md").read_text()
    held = {file.name for file in room.glob("results/*")}
    rows = [cell for line in page.splitlines() if line.startswith("| `") for cell in line.split("|")[1:2]]
    named = {name for cell in rows for name in re.findall(r"`([\w.]+\.json)`", cell)}
    scripts = [name for name in door.scripts(room.name) if not re.search(f"`(python benchmarks )?{name}[ `]", page)]
    return sorted([*(f"{name}: no row" for name in held - named), *(f"{name}: no file" for name in named - held), *scripts])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_has(room: str) -> None:
    """Keeps out: a published number without the way to make it again, and a script of which nobody says what came of it."""
    assert faults_of_page(BENCHMARKS / room) == []
    assert f"]({room}/README.md)" in (BENCHMARKS / "README.md").read_text()


def test_a_gap_in_a_page_is_seen(tmp_path: Path) -> None:
    """Keeps out: a comparison that takes any mention of a file for the row that says how to make it again."""
    (tmp_path / "serving" / "results").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "serving" / "results" / f"{name}.json").touch()
    rows = "| `a.json`, `c.json` | `python benchmarks serving.serve_load --out FILE` | H200 |\nOf `b.json`: `serve_soak.py`."
    (tmp_path / "serving" / "README.md").write_text(rows)
    assert faults_of_page(tmp_path / "serving") == [
        "b.json: no row",
        "c.json: no file",
        "serving.mixed_load",
        "serving.mixed_times",
        "serving.replicas",
        "serving.serve_soak",
        "serving.tool_streams",
        "serving.unbounded",
    ]


def test_commands_of_benchmarks_are_known() -> None:
    """Keeps out: a page or a comment that tells its readers to run a script which was moved."""
    pages = [file for ending in ("md", "py") for file in BENCHMARKS.rglob(f"*.{ending}")]
    pages += [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = {name for file in pages for name in re.findall(r"python benchmarks ([a-z][\w./]*)", file.read_text())}
    assert named == set(SCRIPTS)
