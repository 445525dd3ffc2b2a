"""`import specdec` in the folder above a clone that is itself named specdec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_above_a_clone(folder: Path, name: str, *arguments: str) -> str:
    """What Python prints when it runs in a folder that holds a clone of that name."""
    (folder / name).symlink_to(ROOT, target_is_directory=True)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_found_from_above_its_clone(tmp_path: Path) -> None:
    """Keeps out: an empty namespace package `specdec`, which hides the editable install: no attribute 'SpecDecoder'."""
    code = """if True:
        import specdec
        print(specdec.SpecDecoder.__module__, specdec.SpecDecoder is specdec.decoder.SpecDecoder, specdec.__file__)
    """
    module, same, file = python_above_a_clone(tmp_path, "specdec", "-c", code).split()
    assert (module, same) == ("specdec.decoder", "True")
    assert Path(file) == ROOT / "specdec/__init__.py"


def test_the_clone_is_whole_without_an_install(tmp_path: Path) -> None:
    """Keeps out: a stand-in that needs the editable install's finder for the rooms beside specdec/.  -S: no site-packages."""
    code = "import specdec.attention, specdec.draft, specdec.verify; print(specdec.SpecConfig().topk, specdec.verify.__file__)"
    topk, file = python_above_a_clone(tmp_path, "specdec", "-S", "-c", code).split()
    assert topk == "4" and Path(file) == ROOT / "verify/__init__.py"


def test_the_command_line_runs_from_above_its_clone(tmp_path: Path) -> None:
    """Keeps out: `python -m specdec.cli` that fails where `import specdec` works."""
    assert python_above_a_clone(tmp_path, "specdec", "-m", "specdec.cli", "--version").startswith("specdec ")


def test_a_clone_of_another_name_is_no_specdec(tmp_path: Path) -> None:
    """Keeps out: a root file that takes other names over, or fails where a tool imports the clone's folder by its name."""
    code = "import sys, clone; print(hasattr(clone, 'SpecDecoder'), 'specdec' in sys.modules)"
    assert python_above_a_clone(tmp_path, "clone", "-S", "-c", code).split() == ["False", "False"]
