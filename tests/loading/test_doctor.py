"""What doctor says of a GPU's kernels."""

import pytest

from specdec.loading.about.doctor import kernels_line

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("capability", "said", "not_said"),
    [
        ((8, 0), ("cuBLAS", "no float8"), ("Hopper",)),
        ((8, 9), ("cuBLAS", "; float8"), ("Hopper",)),
        ((9, 0), ("products too", "Hopper's own", "; float8"), ("cuBLAS", "none")),
        ((12, 0), ("products too", "; float8"), ("Hopper", "cuBLAS")),
    ],
)
def test_a_gpu_is_told_its_kernels(capability: tuple[int, int], said: tuple[str, ...], not_said: tuple[str, ...]) -> None:
    """Keeps out: a GPU that seems to get kernels that are written for another one."""
    line = kernels_line(capability)
    assert all(words in line for words in said) and not any(words in line for words in not_said)
