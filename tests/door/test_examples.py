"""The examples run as they are written: programs in the process of the tests, and servers in processes of their own."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.real import smollm2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = 60
CLIENT = ROOT / "examples" / "openai_client.py"  # the one that needs a server
ON_RAY = ROOT / "examples" / "ray_serve.py"  # runs until it is stopped; tests/serve/replicas/ serve with it
REAL = ROOT / "examples" / "real_model.py"  # needs the model that it is about
API = (ROOT / "docs" / "API.md").read_text()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_there_are_examples_and_they_are_short():
    """Keeps out: an empty list of examples, which would pass, and examples that nobody reads to the end."""
    assert len(EXAMPLES) >= 5
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_LINES} == {}


def run(path: Path, *arguments: str) -> None:
    """Runs a program as `python FILE ARGUMENTS` does, but here: a process of its own takes seconds to import torch."""
    given, sys.argv = sys.argv, [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = given


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


@pytest.mark.slow_cases(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path not in (CLIENT, ON_RAY, REAL)], ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: an example of an interface that has changed since it was written."""
    run(path)
    out, err = capsys.readouterr()
    assert out.strip() and not err, err


@pytest.mark.slow
def test_a_server_answers_the_client_and_the_pages_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: an example of a request that the server refuses, and one whose answer it misreads or does not give."""
    with server(tmp_path / "log") as url:
        run(CLIENT, f"{url}/v1")
        answer = ask(url)
    out, err = capsys.readouterr()
    assert not err
    for said in (
        "accepted_prediction_tokens",
        "choice 1:",
        r"\n[1-9]\d? tokens streamed",  # it is sampled without a seed, and may end before 32
        "no chat: this model has no chat template",
        "refused: best_of",
    ):
        assert re.search(said, out), out
    shown = re.search(r'^\{\.\.\.,("choices":.*),\.\.\.\}$', API, re.M)
    assert shown and (shown[1] in answer or torch.cuda.is_available()), answer


def ask(url: str) -> str:
    """What the server says to the request that docs/API.md shows under `specdec serve`."""
    (command,) = re.findall(r"^curl .*?\}'$", API.partition("### specdec serve\n")[2].partition("\n### ")[0], re.S | re.M)
    _, address, _, header, _, body = shlex.split(command.replace("\\\n", " "))
    name, value = header.split(": ")
    address = address.replace("http://127.0.0.1:8000", url)
    with urllib.request.urlopen(urllib.request.Request(address, body.encode(), {name: value})) as answer:
        text = answer.read().decode()
    assert json.loads(text)["model"] == json.loads(body)["model"]
    return str(text)


@pytest.mark.slow_cases(keep=0)
def test_a_real_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a newcomer's first minutes that end in an error, by a flag, a format or an endpoint that has changed."""
    smollm2()
    run(REAL, "4")
    out = capsys.readouterr().out  # what a slow pass says of itself goes to stderr
    for said in ("Paris", r"1 of 1 prompts EXACT", r"equal\n", r"Name three planets\. -> \S"):
        assert re.search(said, out), out


def test_a_missing_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a page of traceback for whoever forgot to start the server."""
    with pytest.raises(SystemExit) as end:
        run(CLIENT, "http://127.0.0.1:9/v1")
    assert end.value.code == "no server at http://127.0.0.1:9/v1; start one with: specdec serve"
    assert capsys.readouterr() == ("", "")
