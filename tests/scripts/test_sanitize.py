"""`scripts/sanitize`: no kernel is forgotten, and what compute-sanitizer prints is told by kernel."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from toolkit.paths import ROOT
from toolkit.sanitize.chosen import CHOSEN, OF_RANKS, chosen_tests, kernels_in
from toolkit.sanitize.explained import REASONS, Reason
from toolkit.sanitize.findings import findings

PRINTED = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at linear_kernel+0x1230 in linear_triton.py:61
=========     by thread (3,0,0) in block (1,0,0)
=========     Access at 0x7f0000000204 is out of bounds
=========         Host Frame: launch [0x1] in somewhere_kernel_free.so
=========
========= Invalid __global__ read of size 4 bytes
=========     at linear_kernel+0x1230 in linear_triton.py:61
=========     by thread (4,0,0) in block (1,0,0)
========= Error: Race reported between Write access at scan_kernel+0x40 in topk_triton.py:99
=========     and Read access at scan_kernel+0x50 in topk_triton.py:101 [8 hazards]
========= Program hit cudaErrorInvalidValue (error 1) due to "invalid argument" on CUDA API call to cudaMemcpy.
=========     Saved host backtrace up to driver entry point at error
========= ERROR SUMMARY: 4 errors
"""


def test_every_kernel_has_a_test_to_be_run_under_the_sanitizer(collected: frozenset[str]) -> None:
    """Keeps out: a new kernel that nobody checks for reads past the end and races; a test that was renamed."""
    assert kernels_in(ROOT) == CHOSEN.keys() | OF_RANKS.keys() and not CHOSEN.keys() & OF_RANKS.keys()
    assert len(set(chosen_tests())) == len(chosen_tests())
    texts = {test: (ROOT / test.split("::")[0]).read_text() for test in chosen_tests()}
    assert all(f"def {test.split('::')[1].split('[')[0]}(" in text for test, text in texts.items())
    known = collected | {test.partition("[")[0] for test in collected}
    here = [  # others are collected on their GPUs alone
        test for test, text in texts.items() if "allow_module_level" not in text and test not in known
    ]
    if not here:
        return
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0"]
    found = subprocess.run([*command, *here], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]  # a case that is renamed stops all of its job


def test_a_new_kernel_is_seen(tmp_path: Path) -> None:
    """Keeps out: a list of kernels that overlooks one kind of decorator, or takes helpers for kernels."""
    (tmp_path / "draft").mkdir()
    lines = ("@triton.jit", "def a_kernel(x):", "    pass", "@gluon.jit(a=1)", "def b_kernel(x):", "    pass")
    (tmp_path / "draft" / "new.py").write_text("\n".join([*lines, "@triton.jit", "def helper(x):", "    pass"]))
    assert kernels_in(tmp_path) == {"a_kernel", "b_kernel"}


def test_findings_are_told_by_kernel() -> None:
    """Keeps out: a finding that is lost, counted for another kernel, or for the one in a host's backtrace."""
    found = findings(PRINTED, ROOT)
    assert found.open == {
        "linear_kernel": {"Invalid __global__ read of size N bytes": 2},
        "scan_kernel": {
            "Error: Race reported between Write access at scan_kernel+N in topk_triton.py:99 "
            "and Read access at scan_kernel+N in topk_triton.py:101 [N hazards]": 1
        },
        "": {'Program hit cudaErrorInvalidValue (error N) due to "invalid argument" on CUDA API call to cudaMemcpy.': 1},
    }
    assert not found.explained
    assert findings("========= ERROR SUMMARY: 0 errors\nInvalid here is no line of the tool's\n", ROOT) == ({}, {})


RACE = """\
========= Error: Race reported between Read access at a_kernel+0x160 in new.py:{0}
=========     and Write access at a_kernel+0x7bb0 in new.py:{1} [6 hazards]
=========     and Write access at a_kernel+0xe960 in new.py:{1} [11 hazards]
"""


@pytest.mark.parametrize(
    ("line", "other", "is_explained"),
    [(2, 3, True), (3, 3, True), (3, 4, False), (4, 5, True), (5, 4, True), (5, 5, False), (4, 4, False), (9, 3, False)],
)
def test_a_race_is_explained_by_the_lines_of_all_its_accesses(
    tmp_path: Path, line: int, other: int, is_explained: bool
) -> None:
    """Keeps out: a real race that counts as explained since one of its accesses is, since each of them would be in another
    race, or since a line has moved."""
    (tmp_path / "draft").mkdir()
    lines = ("@gluon.jit", "def a_kernel(", "    gl.warp_specialize(", "    sums.store(acc)", "    acc += sums.load(layout)")
    (tmp_path / "draft" / "new.py").write_text("\n".join(lines))
    found = findings(RACE.format(line, other), tmp_path)
    assert (not found.open) == is_explained and bool(found.explained) == is_explained
    (tmp_path / "draft" / "more").mkdir()
    (tmp_path / "draft" / "more" / "new.py").write_text("\n".join(lines))
    assert findings(RACE.format(line, other), tmp_path).open  # nobody knows which of two files is named


def test_only_kernels_whose_warps_have_jobs_are_told_jobs(tmp_path: Path) -> None:
    """Keeps out: a race between the arguments' reads of an ordinary kernel that counts as explained."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "new.py").write_text("@triton.jit\ndef a_kernel(\n    x,\n")
    assert findings(RACE.format(2, 2), tmp_path).open


JOBS, SUMS, STEPS, LENGTHS = REASONS
JOB_LINES = JOBS.one.split("|")


@pytest.mark.parametrize(
    ("kernel", "reason", "lines"),
    [
        ("gated_hopper", JOBS, JOB_LINES[:2]),
        ("warp_hopper", JOBS, JOB_LINES[:2]),
        ("warpgroup_hopper", JOBS, JOB_LINES[:3]),
        ("warpgroup_hopper", SUMS, [SUMS.one, SUMS.other]),
        ("step_triton", STEPS, [STEPS.one, STEPS.other]),
        ("nodes_triton", LENGTHS, LENGTHS.one.split("|")),
    ],
)
def test_lines_that_explain_races_are_lines_of_kernels(kernel: str, reason: Reason, lines: list[str]) -> None:
    """Keeps out: reasons that outlive the code that they are about."""
    text = "".join(path.read_text() for path in (ROOT / "specdec" / "ops").rglob(f"{kernel}.py"))
    assert reason.within in text
    assert all(re.search(rf"^ *(?:{line})$", text, re.MULTILINE) for line in lines)
