"""The kernels of a layer of sparse latent attention pass the compiler for a Hopper GPU, with or without such a GPU."""

import pytest
from toolkit.paths import compiler_s_output


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """Keeps out: what only Triton's interpreter accepts, and tiles that take more shared memory than there is."""
    latent = "latent_attention_kernel latent_hopper_kernel latent_merge_kernel store_latent_kernel upconvert_kernel "
    rows = "merge_rows_kernel rows_hopper_kernel "
    chosen = "filter_kernel row_scores_kernel rows_scores_kernel select_kernel store_index_kernel"
    assert set(compiler_s_output("attention/compiled/sparse.py").split()) == set((latent + rows + chosen).split())
