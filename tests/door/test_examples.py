"""The examples run as they are written, in processes other than the tests' own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from toolkit.checkpoints.real import smollm2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
CLIENT = ROOT / "examples" / "openai_client.py"  # the one that needs a server
ON_RAY = ROOT / "examples" / "ray_serve.py"  # runs until it is stopped; tests/serve/replicas/ serve with it
REAL = ROOT / "examples" / "real_model.py"  # needs the model that it is about
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_there_are_examples_and_they_are_short():
    """Keeps out: an empty list of examples, which would pass, and examples that nobody reads to the end."""
    assert len(EXAMPLES) >= 5
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_LINES} == {}


def run(path: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", str(path), *arguments]
    return subprocess.run(argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


@contextmanager
def server(log: Path) -> Iterator[str]:
    """`specdec serve` on a free port while the block runs, as a user starts it; gives its address."""
    argv = [sys.executable, "-P", "-m", "specdec.cli", "serve", "--port", "0"]
    with log.open("w") as errors, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+", process.stdout.readline().decode())
            assert found, log.read_text()
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0, log.read_text()


@pytest.mark.slow
def test_every_example_runs(tmp_path: Path) -> None:
    """Keeps out: an example of an interface that has changed since it was written.  One process runs them, one after the other,
    because each process takes seconds to import torch.
    """
    examples = [path for path in EXAMPLES if path not in (CLIENT, ON_RAY, REAL)]
    code = """if True:
        import runpy, sys
        for path in sys.argv[1:]:
            sys.argv = [path]
            print("=== ", path, flush=True)
            runpy.run_path(path, run_name="__main__")
    """
    argv = [sys.executable, "-P", "-c", code, *map(str, examples)]
    done = subprocess.run(argv, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stderr == "", (done.stdout[-2000:], done.stderr)
    outputs = done.stdout.split("=== ")[1:]
    assert len(outputs) == len(examples)
    for path, output in zip(examples, outputs, strict=True):
        assert output.removeprefix(f" {path}").strip(), f"{path.name} prints nothing"


@pytest.mark.slow
def test_the_client_talks_to_a_server(tmp_path: Path) -> None:
    """Keeps out: an example of a request that the server refuses, and one whose answer it misreads."""
    with server(tmp_path / "log") as url:
        done = run(CLIENT, tmp_path, f"{url}/v1")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for said in (
        "accepted_prediction_tokens",
        "choice 1:",
        r"\n[1-9]\d? tokens streamed",  # it is sampled without a seed, and may end before 32
        "no chat: this model has no chat template",
        "refused: echo",
    ):
        assert re.search(said, done.stdout), done.stdout


@pytest.mark.slow
def test_a_real_model_runs(tmp_path: Path) -> None:
    """Keeps out: a newcomer's first minutes that end in an error, by a flag, a format or an endpoint that has changed."""
    smollm2()
    done = run(REAL, tmp_path, "4")
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)
    for said in ("Paris", r"1 of 1 prompts EXACT", r"equal\n", r"Name three planets\. -> \S"):
        assert re.search(said, done.stdout), done.stdout


def test_a_missing_server_is_one_line(tmp_path: Path) -> None:
    """Keeps out: a page of traceback for whoever forgot to start the server."""
    done = run(CLIENT, tmp_path, "http://127.0.0.1:9/v1")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "no server at http://127.0.0.1:9/v1; start one with: specdec serve\n"
