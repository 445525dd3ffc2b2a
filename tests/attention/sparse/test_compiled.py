"""The kernels of a layer of sparse latent attention pass the compiler for a Hopper GPU, with or without such a GPU."""

import os
import subprocess
import sys

import pytest
from toolkit.paths import ROOT


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """Keeps out: what only Triton's interpreter accepts, and tiles that take more shared memory than there is."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), *sys.path))
    script = ROOT / "tests" / "toolkit" / "attention" / "compiled" / "sparse.py"
    done = subprocess.run([sys.executable, "-P", str(script)], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    latent = "latent_attention_kernel latent_hopper_kernel latent_merge_kernel store_latent_kernel upconvert_kernel "
    rows = "merge_rows_kernel rows_hopper_kernel "
    chosen = "filter_kernel row_scores_kernel rows_scores_kernel select_kernel store_index_kernel"
    assert set(done.stdout.split()) == set((latent + rows + chosen).split())
