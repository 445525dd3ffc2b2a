"""The tensors of one matrix, in each format: what is not as the format says is refused by name, and never read as numbers."""

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toolkit.oracles.quantised import SCHEMES, compressed
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import fill_linear
from specdec.models.linear import Linear
from specdec.models.schemes.config import parse_quantization
from specdec.models.schemes.rows import QuantisedRows

ROWS, COLUMNS = 64, 128


def written(name: str, rows: int = ROWS, columns: int = COLUMNS) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return SCHEMES[name].write(rows, columns, torch.Generator().manual_seed(0))


def read(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], shape: tuple[int, int] = (ROWS, COLUMNS)
) -> QuantisedRows:
    """The matrix of the name "m", after all that headers show to be wrong was refused."""
    save_file({f"m.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}, folder / "model.safetensors")
    scheme = parse_quantization(config, "config.json: quantization_config")
    checkpoint = Checkpoint(folder, quantization=scheme)
    format = checkpoint.format_of("m")
    assert format is not None
    assert format.read(checkpoint.headers(), "m", shape, torch.device("meta")) is None
    rows = format.read(checkpoint, "m", shape, torch.device("cpu"))
    assert rows is not None
    checkpoint.finish()
    return rows


DTYPES = {
    "w4a16 g32 asym": {"weight_packed": "I32", "weight_zero_point": "I32"},
    "w8a16 g64": {"weight_packed": "I32"},
    "awq": {"qweight": "I32", "qzeros": "I32"},
    "gptq4 v1 asym": {"qweight": "I32", "qzeros": "I32"},
    "nvfp4": {"weight_packed": "U8"},
    "mxfp4": {"weight_packed": "U8", "weight_scale": "U8"},
    "modelopt nvfp4": {"weight": "U8"},
}
OTHERS = {"I64": torch.int64, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


@pytest.mark.parametrize(
    ("scheme", "ending", "expected"), [(name, *pair) for name, qvalues in DTYPES.items() for pair in qvalues.items()]
)
def test_quantised_values_are_read_in_the_dtype_of_their_format_alone(
    tmp_path: Path, scheme: str, ending: str, expected: str
) -> None:
    """Keeps out: words cut to 8 or 16 bits, and bytes with a sign, which were shifted and gave other weights in silence."""
    tensors, _ = written(scheme)
    for found, dtype in OTHERS.items():
        if found != expected:
            with pytest.raises(ValueError, match=rf"tensor 'm\.{ending}' must hold {expected}( or \S+)?, got {found}$"):
                read(tmp_path, {**tensors, ending: tensors[ending].to(dtype)}, SCHEMES[scheme].config)


@pytest.mark.parametrize(("scheme", "scale", "says"), [
    ("modelopt nvfp4", torch.tensor(3e38), "weight_scale_2' makes scales that float32 can't hold, got 3e.38"),
    ("nvfp4", torch.tensor([1e-42]), "weight_global_scale' makes scales that float32 can't hold, got 1"),
    ("nvfp4", torch.full((1,), 1e300, dtype=torch.float64), "weight_global_scale' must be a number that float32 can"),
    ("nvfp4", torch.tensor([0.0]), "weight_global_scale' divides all scales of the matrix, so it must be above 0, got 0"),
])  # fmt: skip
def test_a_scale_of_the_whole_matrix_is_blamed_itself(tmp_path: Path, scheme: str, scale: torch.Tensor, says: str) -> None:
    """Keeps out: an error that names another tensor, with advice that does not help; weights that are all 0 in silence."""
    ending = "weight_scale_2" if scheme == "modelopt nvfp4" else "weight_global_scale"
    with pytest.raises(ValueError, match=says):
        read(tmp_path, {**written(scheme)[0], ending: scale}, SCHEMES[scheme].config)


def test_symmetric_gptq_has_one_zero(tmp_path: Path) -> None:
    """Keeps out: files with zero points of their own that a wrong "sym" changed, and symmetric files that are refused."""
    for name, add in (("gptq4 v1", 0), ("gptq4 v1", 0x11111111), ("gptq8 v2", 0), ("gptq8 v2", -0x01010101)):
        tensors, matrix = written(name)
        rows = read(tmp_path, {**tensors, "qzeros": tensors["qzeros"] + add}, SCHEMES[name].config)
        torch.testing.assert_close(rows.dense(torch.float32), matrix, rtol=2e-7, atol=0)
    for name in ("gptq4 v1 asym", "gptq4 v2 asym", "gptq8 v1 asym"):
        with pytest.raises(ValueError, match=r"'m\.qzeros' must hold \d+ alone, or \d+ in the older format.* sym true, got"):
            read(tmp_path, written(name)[0], {**SCHEMES[name].config, "sym": True})


def test_act_order_needs_its_order(tmp_path: Path) -> None:
    """Keeps out: columns read in order where the file should say their order and does not."""
    tensors, matrix = written("gptq4 v1")
    config = {**SCHEMES["gptq4 v1"].config, "desc_act": True}
    torch.testing.assert_close(read(tmp_path, tensors, config).dense(torch.float32), matrix, rtol=2e-7, atol=0)
    del tensors["g_idx"]
    with pytest.raises(ValueError, match=r"tensor 'm\.g_idx' is missing, .* says act order \(desc_act\)"):
        read(tmp_path, tensors, config)
    read(tmp_path, tensors, {**config, "desc_act": False})


@pytest.mark.parametrize("name", ["gptq4 in act order", "gptq8 asym in act order", "w4a16 g32 asym in act order"])
def test_numbers_of_act_order_are_in_the_matrix_order(tmp_path: Path, name: str) -> None:
    """Keeps out: latents expanded with columns sorted by their groups, and an order undone by itself, not its inverse."""
    tensors, matrix = written(name, 64, 256)
    rows = read(tmp_path, tensors, SCHEMES[name].config, (64, 256))
    assert rows.order_K is not None
    torch.testing.assert_close(rows.dense(torch.float32), matrix, rtol=2e-7, atol=0)
    torch.testing.assert_close(rows.run(0, 8, 16).dense(torch.float32), matrix[8:24], rtol=2e-7, atol=0)


def test_an_order_goes_where_its_columns_go(tmp_path: Path) -> None:
    """Keeps out: an order that stays on another device, or is lost, when a matrix is moved or saved."""
    tensors, matrix = written("gptq4 in act order", 64, 256)
    linear = Linear(256, 64)
    linear.fill("", read(tmp_path, tensors, SCHEMES["gptq4 in act order"].config, (64, 256)))
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x), x @ matrix.T, rtol=1e-5, atol=1e-4)
    assert "quantised.order_K" in linear.state_dict()
    moved = deepcopy(linear).to("meta")
    assert moved.quantised is not None and moved.quantised.order_K is not None and moved.quantised.order_K.is_meta


def test_what_changes_no_layout_needs_no_order(tmp_path: Path) -> None:
    """Keeps out: ranks and experts refused for GPTQ's static groups, and tensors missed that nobody writes."""
    tensors, matrix = written("gptq4 v1")
    config = {**SCHEMES["gptq4 v1"].config, "desc_act": True, "static_groups": True}
    assert not parse_quantization(config, "here").in_act_order(["m"])
    torch.testing.assert_close(read(tmp_path, tensors, config).dense(torch.float32), matrix, rtol=2e-7, atol=0)
    tensors, matrix = written("w4a16 g32 asym")
    for order, more in (("weight", {}), ("static", {}), ("group", {"weight_g_idx": torch.full((COLUMNS,), -1).int()})):
        keys = dict(num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)
        rows = read(tmp_path, {**tensors, **more}, compressed("pack-quantized", **keys, actorder=order))
        torch.testing.assert_close(rows.dense(torch.float32), matrix, rtol=2e-7, atol=0)


def test_an_order_that_changes_nothing_is_no_order(tmp_path: Path) -> None:
    """Keeps out: a refusal of files that say of each column that it is in its own group, or that no order was chosen."""
    tensors, matrix = written("w4a16 g32 asym")
    for order in (torch.arange(COLUMNS) // 32, torch.full((COLUMNS,), -1)):
        rows = read(tmp_path, {**tensors, "weight_g_idx": order.int()}, SCHEMES["w4a16 g32 asym"].config)
        torch.testing.assert_close(rows.dense(torch.float32), matrix, rtol=2e-7, atol=0)


@pytest.mark.parametrize("columns", [256, 384])
def test_fp8_blocks_are_what_transformers_makes_of_them(tmp_path: Path, columns: int) -> None:
    """transformers' own dequantisation, with scales of 32 bits and of powers of two in a byte each (scale_fmt ue8m0)."""
    config, shape = SCHEMES["deepseek fp8"].config, (256, columns)
    tensors, _ = written("deepseek fp8", *shape)
    powers = tensors["weight_scale_inv"].to(torch.float8_e8m0fnu)
    for scale, fmt in ((tensors["weight_scale_inv"], "float"), (powers, "ue8m0"), (powers, "float")):
        wanted = Fp8Dequantize(None)._dequantize_one(tensors["weight"], scale.float())
        rows = read(tmp_path, {**tensors, "weight_scale_inv": scale}, {**config, "scale_fmt": fmt}, shape)
        torch.testing.assert_close(rows.dense(torch.float32), wanted, rtol=0, atol=0)
    broken = powers.view(torch.uint8).clone().fill_(255).view(torch.float8_e8m0fnu)
    with pytest.raises(ValueError, match="'m.weight_scale_inv' holds NaN or infinity"):
        read(tmp_path, {**tensors, "weight_scale_inv": broken}, config, shape)
    with pytest.raises(ValueError, match=r"'m.weight_scale_inv' must have shape \(2, \d\), got \(2,\)"):
        read(tmp_path, {**tensors, "weight_scale_inv": powers[:, 0]}, config, shape)


def test_a_scale_for_each_matrix_has_either_name(tmp_path: Path) -> None:
    """Keeps out: a refusal of what transformers' fp8 writes without blocks, and two scales of which one is not read."""
    tensors, matrix = written("fp8 tensor")
    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    other = {
        "weight": tensors["weight"],
        "weight_scale_inv": tensors["weight_scale"][0].clone(),
        "activation_scale": torch.ones(()),
    }
    for stored in (tensors, other):
        torch.testing.assert_close(read(tmp_path, stored, config).dense(torch.float32), matrix, rtol=2e-7, atol=0)
    with pytest.raises(ValueError, match="not part of this architecture: m.weight_scale_inv"):
        read(tmp_path, {**tensors, **other}, config)


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_part_without_bias_has_none_in_the_file_either(tmp_path: Path, bias: float) -> None:
    """Keeps out: a bias passed over in silence, or AutoGPTQ's zeros refused, of a part beside parts with biases."""
    tensors = {f"q.{ending}": tensor.contiguous() for ending, tensor in written("gptq4 v1")[0].items()}
    tensors |= {f"k.{name.removeprefix('q.')}": tensor.clone() for name, tensor in tensors.items()}
    tensors |= {"q.bias": torch.full((ROWS,), bias), "k.bias": torch.ones(ROWS)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, quantization=parse_quantization(SCHEMES["gptq4 v1"].config, "config.json"))
    matrix = Linear(COLUMNS, {"q": ROWS, "k": ROWS}, bias=True)
    with pytest.raises(ValueError, match="'q.bias' must hold zeros alone") if bias else nullcontext():
        fill_linear(matrix, checkpoint, {"q": "q", "k": "k"}, without_bias={"q"})
        checkpoint.finish()
        assert matrix.bias is not None and matrix.bias.tolist() == [0.0] * ROWS + [1.0] * ROWS
