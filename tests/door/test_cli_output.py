"""What the command line writes: results first, files after; nothing is lost or misread when one of them can't be written."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec import cli
from specdec.cli import entry
from specdec.cli.terminal.output import check_files, write_files
from specdec.screen.progress import PACE

TINY = "--num-prompts 1 --batch-sizes 1 --spec 2,2,4 --max-tokens 4 --repeats 1 --device cpu".split()


def test_files_are_checked_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: minutes of measuring that end in "Is a directory" or "Permission denied"."""
    good = tmp_path / "o.json"
    check_files({"--json": str(good), "--plot": str(tmp_path / "o.png")})
    link = tmp_path / "link.json"
    link.symlink_to(good)
    check_files({"--json": str(link)})
    assert link.is_symlink() and not good.exists(), "a check removes the file that it made, and nothing else"
    link.unlink()
    refused = {str(tmp_path): "it is a folder", str(tmp_path / "no" / "o.json"): "the folder .*no does not exist"}
    for name, said in (*refused.items(), ("/proc/o.json", "No such file|permission")):  # not even root makes one there
        with pytest.raises(ValueError, match=f"--json .* can't be written: {said}"):
            check_files({"--json": name})
    with pytest.raises(ValueError, match="--json and --plot name the same file"):
        check_files({"--json": str(good), "--plot": str(tmp_path / "." / "o.json")})
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(Path(path)) or False)
    with pytest.raises(ValueError, match="--plot .* can't be written: permission is denied"):
        check_files({"--plot": str(good)})
    good.touch()
    with pytest.raises(ValueError, match="permission is denied"):
        check_files({"--plot": str(good)})
    assert asked == [tmp_path, good], "the folder where there is no file yet, else the file"


def test_every_file_is_tried(tmp_path: Path) -> None:
    """Keeps out: a figure that is lost because the JSON before it could not be written."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "o.txt"
    with pytest.raises(OSError, match="^a.json was not written: No space left on device; b.json was not written: No space"):
        write_files({"a.json": full, str(out): lambda path: path.write_text("x"), "b.json": full})
    assert out.read_text() == "x"


@pytest.mark.parametrize("name", ["", "x"])
def test_a_full_disk_is_the_outputs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: "[Errno 28] No space left on device", which names nothing."""

    def full(args: argparse.Namespace) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", *([name] if name else []))

    assert entry.run(argparse.Namespace(command="doctor", run=full, pace=PACE)) == 2
    assert capsys.readouterr().err == f"specdec: error: No space left on device: {name or 'the output'}\n"


@pytest.mark.slow
def test_a_late_write_error_loses_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a full disk that takes the printed table with it."""
    assert cli.main(["bench", *TINY, "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "speed-up" in out and "accept" in out
    assert err.endswith("specdec: error: /dev/full was not written: No space left on device\n")


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("command", ["doctor", "bench", "generate"])
def test_a_reader_that_went_away_is_141(command: str, tmp_path: Path) -> None:
    """Keeps out: `specdec bench | head`, which exited with 1 ("outputs differ"); tracebacks when Python exits; files that were
    asked for and not written because nobody read the report."""
    out = tmp_path / "o.json"
    flags = {"bench": [*TINY, "--json", str(out)], "doctor": [], "generate": ["Once", "--max-tokens", "4", "--device", "cpu"]}
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "specdec.cli", command, *flags[command]], cwd=tmp_path, env=env, stdout=write,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert done.returncode == 141, done.stderr
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr and "error" not in done.stderr
    if command == "bench":
        assert json.loads(out.read_text())["cells"]


def test_closed_streams() -> None:
    """Keeps out: tracebacks from a service or a cron job that closes stdin, or after the whole run where stdout is closed, and
    messages on stdout where stderr is."""
    for flags, said in (("<&-", "PROMPT is missing"), ("hi >&-", "stdout is closed"), ("hi --max-tokens 0 2>&-", "")):
        line = f"{sys.executable} -P -m specdec.cli generate {flags}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert done.returncode == 2 and not done.stdout and said in done.stderr and bool(done.stderr) == bool(said)
