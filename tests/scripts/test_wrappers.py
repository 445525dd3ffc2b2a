"""The commands in scripts/: each sets up .venv by itself and works from any folder.

The tests run copies of the scripts beside a stand-in for setup.sh, whose .venv leads to the Python that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SETUP = """#!/usr/bin/env bash
printf '%s' "$1" >"{clone}/extras"
mkdir -p "{clone}/.venv/bin"
printf '#!/bin/sh\\nexec "{python}" "$@"\\n' >"{clone}/.venv/bin/python"
printf '#!/bin/sh\\nexec "{python}" -P -m specdec.cli "$@"\\n' >"{clone}/.venv/bin/specdec"
chmod +x "{clone}/.venv/bin/python" "{clone}/.venv/bin/specdec"
"""


@pytest.fixture()
def clone(tmp_path: Path) -> Path:
    """A fresh clone's scripts: there is no .venv yet."""
    root = tmp_path / "a clone"
    shutil.copytree(SCRIPTS, root / "scripts")
    (root / "scripts/setup.sh").write_text(SETUP.format(clone=root, python=sys.executable))
    return root


@pytest.fixture()
def elsewhere(tmp_path: Path) -> Path:
    """A folder whose `specdec`, torch and transformers must not be imported."""
    folder = tmp_path / "elsewhere"
    for name in ("specdec/__init__.py", "torch.py", "transformers.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"raise RuntimeError('{name} was imported')\n")
    return folder


def run(command: list[str | Path], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CDPATH": f".:{cwd.parent}:{cwd}", "CUDA_VISIBLE_DEVICES": "", **more}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("script", "flags", "extras", "said"),
    [
        ("specdec", ["--version"], "", "specdec "),
        ("bench", ["--help"], "", "usage: specdec bench"),
        ("test", ["--version"], "test", "pytest "),
        ("train_head", ["--help"], "", "usage: train_head"),
        ("train_target", ["--help"], "", "usage: train_target"),
    ],
)
def test_a_script_works_in_a_fresh_clone_from_any_folder(
    clone: Path, elsewhere: Path, script: str, flags: list[str], extras: str, said: str
) -> None:
    """Keeps out: scripts that need an activated .venv, or that import what lies in the current folder."""
    done = run([clone / "scripts" / script, *flags], elsewhere)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert (clone / "extras").read_text() == extras


@pytest.mark.slow_cases
@pytest.mark.parametrize("script", ["specdec", "train_head"])
@pytest.mark.parametrize(("folder", "path"), [("scripts", ""), ("", "scripts/"), ("scripts", "../scripts/")])
def test_a_script_finds_its_clone_by_any_relative_path(clone: Path, script: str, folder: str, path: str) -> None:
    """Keeps out: a root that CDPATH, or a path without a slash, leads astray."""
    done = run(["bash", f"{path}{script}", "--help"], clone / folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script}")


def test_the_seconds_of_set_up_are_no_part_of_a_start(clone: Path, tmp_path: Path) -> None:
    """Keeps out: `generate --stats` in a fresh clone that counts minutes of pip as imports."""
    ends = f"sleep 1; printf %s ${{EPOCHREALTIME/,/.}} >'{clone}/ended'\n"
    (clone / "scripts/setup.sh").write_text(SETUP.format(clone=clone, python=sys.executable) + ends)
    code = "import time; from specdec.startup import process_age; print(process_age(), time.time())"
    done = run([clone / "scripts/in_venv.sh", "", "python", "-P", "-c", code], tmp_path)
    age, now = map(float, done.stdout.split())
    assert 0 < age <= now - float((clone / "ended").read_text()), done.stderr


def test_a_script_hands_on_its_exit_status_and_every_argument(clone: Path, tmp_path: Path) -> None:
    """Keeps out: a wrapper that ends with 0 whatever happened, and one that splits an argument at its spaces."""
    done = run(
        [clone / "scripts/train_head", "--target", "x", "--text", "no such file", "--out", "o", "--steps", "a b"], tmp_path
    )
    assert done.returncode == 2
    assert "invalid int value: 'a b'" in done.stderr


@pytest.mark.parametrize("command", ["head", "target"])
def test_help_and_wrong_settings_import_no_torch(tmp_path: Path, command: str) -> None:
    """Keeps out: seconds of imports before a help text or a complaint.  Importing torch or transformers is an error here."""
    traps = tmp_path / "traps"
    traps.mkdir()
    for name in ("torch.py", "transformers.py"):
        (traps / name).write_text(f"raise RuntimeError('{name} was imported')\n")
    flags = ["--text", "t", "--out", "o", "--batch", "0", *(["--target", "x"] if command == "head" else [])]
    for more, status, said in (
        (["--help"], 0, "usage: train_"),
        (flags, 2, f"train_{command}: batch: expected a whole number of at least 1"),
    ):
        done = run([sys.executable, "-P", "-m", "specdec.train", command, *more], tmp_path, PYTHONPATH=str(traps))
        assert done.returncode == status and said in done.stdout + done.stderr, done.stderr


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["draw_layers", "draw_round", "draw_speed", "fill_scaling"])
def test_help_writes_nothing(tmp_path: Path, name: str) -> None:
    """Keeps out: a picture or a table that is written anew by whoever only asks what the script does, or misspells a flag."""
    (tmp_path / "tests").symlink_to(SCRIPTS.parent / "tests")
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / name, tmp_path / "scripts")  # beside no page: one that wrote would fail
    page = "docs/SCALING.md" if name == "fill_scaling" else f"docs/{name[5:]}.svg"
    for flags, status, said in ((["--help"], 0, page), (["--hepl"], 2, "--hepl")):
        done = run([sys.executable, str(tmp_path / "scripts" / name), *flags], tmp_path)
        assert done.returncode == status and said in done.stdout + done.stderr, done.stderr
