"""The rule that chooses paged_hopper.py's kernel and its tiles, and that the kernel compiles; neither needs a GPU."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from toolkit.paths import ROOT

pytest.importorskip("triton")

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels.hopper_tiles import _tiles, hopper_tiles
from specdec.attention.kinds import PLAIN
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment

SHARED_MEMORY = 232_448 - 1024  # bytes of a program alone on an SM, without what the system keeps


def test_tiles_fit_the_shared_memory_of_an_sm() -> None:
    """Keeps out: tiles of which fewer programs fit an SM than `splits_for` plans for."""
    taken = 0
    for packed, D, branches, pairs, keys in itertools.product(
        (1, 4, 16, 24, 64, 128, 240, 1024), (64, 128, 256), (False, True), (1, 8, 64, 256), (16, 1100, 32_768)
    ):
        tiles = _tiles(packed, D, branches, pairs, keys, 132)
        if tiles is None:
            continue
        taken += 1
        assert tiles.hopper and tiles.block_n * D * 4 * tiles.stages + tiles.block_m * D * 2 <= SHARED_MEMORY // tiles.an_sm
    assert taken > 100


def test_another_gpu_or_none_keeps_its_kernel() -> None:
    """Keeps out: a kernel that only Hopper GPUs can compile, chosen elsewhere."""
    view = MHAView(torch.zeros(64, 2, 2, 128, dtype=torch.bfloat16))
    segment = causal_segment(PageTable(torch.zeros(1, 4, dtype=torch.int32), 16), torch.ones(1, dtype=torch.int32), 1)
    assert hopper_tiles(torch.zeros(1, 8, 128, dtype=torch.bfloat16), view, segment, PLAIN, 132) is None


@pytest.mark.slow
def test_the_kernel_compiles_for_hopper() -> None:
    """Keeps out: code that this Triton does not compile, and tiles that take more shared memory than there is."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), *sys.path))
    script = ROOT / "tests" / "toolkit" / "attention" / "compiled" / "paged.py"
    done = subprocess.run([sys.executable, "-P", str(script)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["paged_hopper_kernel"]
