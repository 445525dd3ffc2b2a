"""Kernels that earlier starts have compiled are loaded at once, and never where they may be others."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from toolkit.paths import ROOT, compiler_s_output

from specdec.ops.compiling import known
from specdec.ops.compiling.known import ENDINGS


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """For each start: the kernels that were known, and those of two that Triton was asked for."""
    printed = compiler_s_output("inside/known_kernels.py", TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache")))
    found: dict[str, list[int]] = json.loads(printed.splitlines()[-1])
    return found


def test_the_second_start_knows_the_kernels(starts: dict[str, list[int]]) -> None:
    """Keeps out: starts that name all kernels anew, and a file that no later start finds."""
    assert starts["first"] == [0, 2] and starts["second"] == [2, 0] and starts["the same again"] == [2, 0]


@pytest.mark.parametrize("change", ["another purpose", "another source"])
def test_other_kernels_are_not_taken_for_known_ones(starts: dict[str, list[int]], change: str) -> None:
    """Keeps out: a kernel of an older source, and starts that load the kernels of all models that ever ran."""
    assert starts[change] == [0, 2]


@pytest.mark.parametrize(("damage", "found"), [("a file is gone", [1, 1]), ("cut short", [0, 2]), ("nowhere to write", [0, 2])])
def test_what_is_broken_is_compiled(starts: dict[str, list[int]], damage: str, found: list[int]) -> None:
    """Keeps out: a start that fails because someone cleaned the cache, or because a disk was full."""
    assert starts[damage] == found


def test_modules_with_kernels_are_known_by_their_names() -> None:
    """Keeps out: a change of a kernel that no later start notices, because its module is called otherwise."""
    modules = [path for room in ("specdec", "attention", "draft", "verify") for path in (ROOT / room).rglob("*.py")]
    kernels = [path for path in modules if re.search(r"^@(triton|gluon)\.jit", path.read_text(), re.MULTILINE)]
    assert len(kernels) > 20 and all(path.stem.endswith(ENDINGS) for path in kernels)


def test_files_do_not_pile_up(tmp_path: Path) -> None:
    """Keeps out: drafts of files that could not be written, and a file for every setting that was ever tried."""
    for number in range(known.MAX_FILES + 3):
        path = tmp_path / f"{number}.kernels"
        known._write(path, b"kernels")
        os.utime(path, ns=(number, number))
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {f"{number}.kernels" for number in range(3, known.MAX_FILES + 3)}

    (tmp_path / "0.kernels").mkdir()  # which no file can take the place of
    with pytest.raises(IsADirectoryError):
        known._write(tmp_path / "0.kernels", b"more")
    assert {file.name for file in tmp_path.iterdir()} == left | {"0.kernels"}
