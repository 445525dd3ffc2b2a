"""Checkpoints of 8 and 4 bits: what is loaded is what the file stands for, and anything else is refused by name."""

from pathlib import Path

import pytest
import torch
from toolkit.oracles.quantised import SCHEMES, save_quantised

from specdec.models.linear import Linear
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.ops.quantised.codes import dequantise


def load(folder: Path) -> Target:
    return load_chosen(choose_target(folder), folder, 64, torch.device("cpu"), torch.float32, False)


def numbers(matrix: Linear) -> torch.Tensor:
    return matrix.weight.detach() if matrix.planes is None else dequantise(matrix.planes.weight, torch.float32)


@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_are_what_the_file_stands_for(tmp_path: Path, name: str) -> None:
    """Keeps out: nibbles in another order, zeros off by one, a scale that divides, parts of a fused matrix with one scale."""
    quantised, plain = map(load, save_quantised(tmp_path, SCHEMES[name]))
    wanted = {where: module for where, module in plain.named_modules() if isinstance(module, Linear)}
    assert len(wanted) == 4 * 2 + 1
    for where, want in wanted.items():
        own = quantised.get_submodule(where)
        assert isinstance(own, Linear)
        assert (own.planes is None) == (where == "lm_head")
        torch.testing.assert_close(numbers(own), numbers(want), rtol=2e-7, atol=0)
