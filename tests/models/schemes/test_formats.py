"""Checkpoints of 8 and 4 bits: what is loaded is what the file stands for, and anything else is refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.models import save_target
from toolkit.oracles.quantised import SCHEMES, SIZES, packed, save_quantised

from specdec.loading.plan import tensor_bytes
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import open_target
from specdec.models.linear import Linear
from specdec.models.registry import choose_target, load_chosen
from specdec.models.schemes.integers import PackedInts
from specdec.models.target import Target


def load(folder: Path) -> Target:
    return load_chosen(choose_target(folder), folder, 64, torch.device("cpu"), torch.float32, False)


def numbers(matrix: Linear) -> torch.Tensor:
    return matrix.rows(torch.arange(matrix.out_features)).detach()


def planned(folder: Path, quantize: str = "none") -> tuple[int, int]:
    """Bytes of a target's weights: as planned from headers, and as they are."""
    chosen = choose_target(folder, quantize=quantize)
    model = load_chosen(chosen, folder, 64, torch.device("cpu"), torch.bfloat16, False)
    foreseen = tensor_bytes(open_target(folder, chosen.config), chosen.config, torch.bfloat16, set())
    return foreseen, sum(weight.nbytes for weight in model.parameters())


@pytest.mark.parametrize("name", ["deepseek fp8", "w4a16 g32 asym", "awq", "gptq8 v2", "nvfp4"])
def test_bytes_are_known_before_weights_are_read(tmp_path: Path, name: str) -> None:
    """Keeps out: a plan that counts words of quantised values as 16-bit values."""
    foreseen, taken = planned(save_quantised(tmp_path, SCHEMES[name])[0])
    assert foreseen == taken


def test_bytes_of_scales_in_a_byte_are_known(tmp_path: Path) -> None:
    """Keeps out: a plan that counts powers of two as they are stored, where parameters hold them in 32 bits."""
    folder, _ = save_quantised(tmp_path, SCHEMES["deepseek fp8"])
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: scale.to(torch.float8_e8m0fnu) for name, scale in tensors.items() if name.endswith("weight_scale_inv")}
    save_file(tensors, folder / "model.safetensors")
    foreseen, taken = planned(folder)
    assert foreseen == taken


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_bytes_of_rounded_weights_are_known(tmp_path: Path, quantize: str) -> None:
    foreseen, taken = planned(save_target(tmp_path, "llama", **SIZES), quantize)
    assert foreseen == taken


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_are_what_the_file_stands_for(tmp_path: Path, name: str) -> None:
    """Keeps out: nibbles in another order, zero points off by one, a scale that divides, parts of a fused matrix with one
    scale; and columns of a product in another order than the groups of the matrix.
    """
    quantised, plain = map(load, save_quantised(tmp_path, SCHEMES[name]))
    wanted = {where: module for where, module in plain.named_modules() if isinstance(module, Linear)}
    assert len(wanted) == 4 * 2 + 1
    for where, want in wanted.items():
        own = quantised.get_submodule(where)
        assert isinstance(own, Linear)
        assert (own.quantised is None) == (where == "lm_head")
        torch.testing.assert_close(numbers(own), numbers(want), rtol=2e-7, atol=0)
        torch.testing.assert_close(own(torch.eye(own.in_features)), numbers(want).T, rtol=2e-7, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_and_columns_need_not_fill_a_word(tmp_path: Path, bits: int) -> None:
    """Keeps out: numbers of the padding taken for those of the last rows' zero points, or of the last columns."""
    tensors, matrix = packed(bits, 0, False)(13, 37, torch.Generator().manual_seed(0))
    save_file({f"m.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    rows = PackedInts(bits, 0, False).read(Checkpoint(tmp_path), "m", (13, 37), torch.device("cpu"))
    torch.testing.assert_close(rows.dense(torch.float32), matrix, rtol=2e-7, atol=0)
