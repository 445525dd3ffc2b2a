"""`specdec doctor`: a screen whose first line is a verdict, by facts that are given here for machines that nobody has."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from toolkit.paths import ROOT

from specdec import cli
from specdec.attention.capabilities import BackendChoice
from specdec.loading.about.machine import machine_facts, versions
from specdec.loading.about.screen import here_rows, machine_of, print_machine, print_verdict
from specdec.loading.about.verdict import MIN_VERSIONS, NEEDED, OPTIONAL, TRY, Gpu, Machine, broken, optional_rows, verdict
from specdec.ops.products.gpus import nearest

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 85 * 10**9)
VERSIONS = {"torch": "2.13.0+cu130", "transformers": "5.23.0", "triton": "3.7.1", "tokenizers": "0.23"}
VERSIONS |= dict.fromkeys(("safetensors", "numpy", "rich"), "1.0")


def machine(**changes: Any) -> Machine:
    """A server with an H100 and no optional package, but for what a test changes."""
    usual: dict[str, Any] = dict(
        gpus=(H100,), driver="580.1", torch_cuda="13.0", visible=None, packages=VERSIONS, attention="triton", why="installed"
    )
    return Machine(**{**usual, **changes})


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in VERSIONS.items() if name not in names}


ON_CPU: dict[str, Any] = dict(gpus=(), attention="torch", why="triton needs a CUDA device, got cpu")
CASES: dict[str, tuple[dict[str, Any], str, str, bool]] = {
    "a server": ({}, r"runs specdec on its GPU, NVIDIA H100 80GB HBM3, 85 GB, with all kernels", re.escape(TRY), True),
    "eight": ({"gpus": (H100,) * 8}, r"85 GB \(and 7 more\), with all kernels", re.escape(TRY), True),
    "no pair": ({"has_pair": False}, "all kernels", "generate --target DIR --draft DIR .* incomplete", True),
    "unmeasured": ({"gpus": (H100._replace(has_tiles=False),)}, "measured on an H100 and an H200", "specdec tune", True),
    "Ada": ({"gpus": (Gpu("RTX 4090", (8, 9), 24 * 10**9),)}, "RTX 4090, 24 GB.* of another kind", "specdec verify", True),
    "Blackwell": ({"gpus": (Gpu("B200", (10, 0), 190 * 10**9),)}, "of another kind", "specdec verify", True),
    "Turing": ({"gpus": (Gpu("T4", (7, 5), 16 * 10**9),)}, "capability 7.5 is older than any", "--dtype float16", False),
    "no triton": (
        {"packages": without("triton"), "attention": "torch", "why": "triton needs the package triton"},
        "but slowly: without specdec's kernels", "^pip install triton$", False,
    ),
    "a CPU": ({**ON_CPU, "driver": None, "torch_cuda": None}, "on its CPU: small models well; .{0,30}$", re.escape(TRY), True),
    "torch for CPUs": ({**ON_CPU, "torch_cuda": None}, "leaves its GPU .* idle: torch .* without CUDA", "for CUDA", False),
    "hidden": ({**ON_CPU, "visible": ""}, "CUDA_VISIBLE_DEVICES='' hides it", "^unset CUDA_VISIBLE_DEVICES", False),
    "old driver": (ON_CPU, "torch, built for CUDA 13.0, sees none", "nvidia-smi.*13.0 or later", False),
    "old torch": ({"packages": VERSIONS | {"torch": "2.5.1"}}, "torch 2.5.1 is older than 2.11", "'torch>=2.11'", False),
    "old transformers": (
        {"packages": VERSIONS | {"transformers": "4.57.3"}}, "transformers 4.57.3 is older than 5.0", "transformers>=5.0", False
    ),
    "no tokenizers": ({"packages": without("tokenizers")}, "no model yet: tokenizers", "pip install tokenizers", False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is_the_machine_s(case: str) -> None:
    """Keeps out: a doctor that leaves it to its reader to find out of 200 lines what does not work, and what would mend it."""
    changes, runs, then, is_whole = CASES[case]
    found = verdict(machine(**changes))
    assert re.search(runs, found.runs) and re.search(then, found.next), found
    assert found.is_whole == is_whole and found.runs.startswith("This machine ") and found.runs.endswith(".")


def test_the_worst_comes_first() -> None:
    """Keeps out: "install triton" for a machine on which torch itself is too old."""
    worst = machine(packages=without("triton") | {"torch": "2.1"}, attention="torch", gpus=(H100._replace(capability=(7, 0)),))
    assert "torch 2.1 is older" in verdict(worst).runs


@pytest.mark.parametrize("case", CASES)
def test_it_is_a_screen(case: str) -> None:
    """Keeps out: 200 lines, and a verdict that is not the first of them."""
    out = io.StringIO()
    m = machine(**CASES[case][0])
    console = Console(file=out, width=80)
    print_verdict(verdict(m), console)
    lines = out.getvalue().splitlines()
    facts = {"cpu": "A CPU with a long name @ 3.70GHz", "cpus_usable": 192, "torch_threads": 96, "memory_bytes": 2 * 10**12}
    if not next(broken(m.packages), None):
        values = [value for rows in (here_rows(facts, m), optional_rows(m)) for _, value in rows]
        lines += [row for value in values for row in re.findall(r".{1,50}", value)] + [""] * 8
    assert lines[0].startswith("This machine ") and max(map(len, lines)) <= 80
    assert len(lines) <= 40 and sum(line.startswith("Next: ") for line in lines) == 1


def test_this_machine_is_a_screen_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a screen that is one only by the facts of a test."""
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["doctor"]) == 0
    out, err = capsys.readouterr()
    lines = [line.rstrip() for line in out.splitlines()]
    assert not err and len(lines) <= 40 and max(map(len, lines)) <= 80
    assert lines[0].startswith("This machine ") and "Next: " in out
    for word in ("GPU", "torch", "triton", "GGUF targets", "tokenizers", "specdec serve", "--details", "--table"):
        assert word in out, word


@pytest.mark.parametrize(
    ("name", "bandwidth", "capability", "runs"),
    [
        ("NVIDIA H100 80GB HBM3", 3.35e12, (9, 0), "with all kernels and CUDA graphs"),
        ("NVIDIA H100 PCIe", 2.04e12, (9, 0), "sizes of their tiles were measured on an H100 and an H200"),
        ("NVIDIA A100-SXM4-80GB", 2.04e12, (8, 0), "of another kind"),
    ],
)
def test_facts_of_gpus_become_the_verdict_s(name: str, bandwidth: float, capability: tuple[int, int], runs: str) -> None:
    """Keeps out: a doctor that works on the machine without a GPU on which its tests ran.  The GPUs are stand-ins."""
    has_tiles = capability < (9, 0) or nearest(name, bandwidth, capability).is_own
    gpu = {"name": name, "capability": "{}.{}".format(*capability), "memory_bytes": 85 * 10**9, "multiprocessors": 132}
    facts = machine_facts() | {"gpus": [gpu, gpu], "driver": "580.1"}
    choice = BackendChoice("triton", "CUDA device and triton installed")
    out = io.StringIO()
    print_machine(facts, machine_of(facts, versions(), choice, lambda index: has_tiles), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    said = " ".join(out.getvalue().split())
    assert runs in said and f"its GPU, {name}, 85 GB (and 1 more)" in said and f"2 x {name}, 85 GB" in said
    assert len(lines) <= 40 and max(len(line.rstrip()) for line in lines) <= 80


def test_an_incomplete_pair_is_said() -> None:
    """Keeps out: a next step that fails because its files are not there."""
    out = io.StringIO()
    print_machine(machine_facts(), machine(has_pair=False), Console(file=out, width=80))
    assert TRY not in out.getvalue() and "incomplete" in out.getvalue()


def test_optional_packages_say_what_they_are_for() -> None:
    """Keeps out: a list of absent packages of which nobody knows whether to miss them, and advice that is of no use here."""
    rows = dict(optional_rows(machine(packages=VERSIONS | {"fastapi": "1", "flash-attn-3": "3.0"})))
    assert rows["specdec serve"] == "no: pip install uvicorn prometheus-client"
    assert rows["attention of flash-attn"] == "flash-attn-3 3.0" and rows["kernels, CUDA graphs"] == "triton 3.7.1"
    rows = dict(optional_rows(machine(**ON_CPU, packages=without("triton"))))
    assert rows["kernels, CUDA graphs"] == "triton not installed; of use on a GPU only"
    assert "pip" not in rows["attention of flash-attn"] and rows["JSON schemas, grammars"] == "no: pip install llguidance"
    assert {name for name, *_ in OPTIONAL} < set(rows)


def test_least_versions_are_the_project_s() -> None:
    """Keeps out: a doctor that finds a version good which pip would replace."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    least = {name: version for name, _, version in (line.partition(">=") for line in wanted) if version}
    assert {name: ".".join(map(str, numbers)).removesuffix(".0") for name, numbers in MIN_VERSIONS.items()} == least
    assert {re.split(r"\W", line)[0] for line in wanted} - {"regex"} <= set(NEEDED)


def test_what_is_broken_is_told_without_importing_it(tmp_path: Path) -> None:
    """Keeps out: a traceback from inside torch in answer to the question why torch does not work."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from specdec.loading.about import machine\n"
        "machine.package_versions = lambda: {'transformers': '5.1'}\n"
        "from specdec.cli import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "no model yet: torch, tokenizers" in done.stdout
