"""The tensors of one matrix, in each format: what is not as the format says is refused by name, and never read as numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toolkit.oracles.quantised import SCHEMES

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.schemes.config import parse_quantization
from specdec.models.schemes.rows import CodedRows

ROWS, COLUMNS = 64, 128


def written(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return SCHEMES[name].write(ROWS, COLUMNS, torch.Generator().manual_seed(0))


def read(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> CodedRows:
    """The matrix of the name "m", after all that headers show to be wrong was refused."""
    save_file({f"m.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}, folder / "model.safetensors")
    scheme = parse_quantization(config, "config.json: quantization_config")
    checkpoint = Checkpoint(folder, quantization=scheme)
    format = checkpoint.format_of("m")
    assert format is not None
    assert format.read(checkpoint.headers(), "m", (ROWS, COLUMNS), torch.device("meta")) is None
    rows = format.read(checkpoint, "m", (ROWS, COLUMNS), torch.device("cpu"))
    assert rows is not None
    checkpoint.finish()
    return rows


CODES = {
    "w4a16 g32 zeros": {"weight_packed": "I32", "weight_zero_point": "I32"},
    "w8a16 g64": {"weight_packed": "I32"},
    "awq": {"qweight": "I32", "qzeros": "I32"},
    "gptq4 v1 zeros": {"qweight": "I32", "qzeros": "I32"},
    "nvfp4": {"weight_packed": "U8"},
    "mxfp4": {"weight_packed": "U8", "weight_scale": "U8"},
    "modelopt nvfp4": {"weight": "U8"},
}
OTHERS = {"I64": torch.int64, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


@pytest.mark.parametrize(
    ("scheme", "ending", "expected"), [(name, *pair) for name, codes in CODES.items() for pair in codes.items()]
)
def test_codes_are_read_in_the_dtype_of_their_format_alone(tmp_path: Path, scheme: str, ending: str, expected: str) -> None:
    """Keeps out: words cut to 8 or 16 bits, and bytes with a sign, which were shifted and gave other weights in silence."""
    tensors, _ = written(scheme)
    for found, dtype in OTHERS.items():
        if found != expected:
            with pytest.raises(ValueError, match=rf"tensor 'm\.{ending}' must hold {expected}( or \S+)?, got {found}$"):
                read(tmp_path, {**tensors, ending: tensors[ending].to(dtype)}, SCHEMES[scheme].config)


def test_symmetric_gptq_has_one_zero(tmp_path: Path) -> None:
    """Keeps out: files with zeros of their own that a wrong "sym" made others, and symmetric files refused for their format."""
    for name, add in (("gptq4 v1", 0), ("gptq4 v1", 0x11111111), ("gptq8 v2", 0), ("gptq8 v2", -0x01010101)):
        tensors, matrix = written(name)
        rows = read(tmp_path, {**tensors, "qzeros": tensors["qzeros"] + add}, SCHEMES[name].config)
        torch.testing.assert_close(rows.numbers(torch.float32), matrix, rtol=2e-7, atol=0)
    for name in ("gptq4 v1 zeros", "gptq4 v2 zeros", "gptq8 v1 zeros"):
        with pytest.raises(ValueError, match=r"'m\.qzeros' must hold \d+ alone, or \d+ in the older format.* sym true, got"):
            read(tmp_path, written(name)[0], {**SCHEMES[name].config, "sym": True})


def test_act_order_needs_its_order(tmp_path: Path) -> None:
    """Keeps out: columns read in order where the file should say their order and does not."""
    tensors, matrix = written("gptq4 v1")
    config = {**SCHEMES["gptq4 v1"].config, "desc_act": True}
    torch.testing.assert_close(read(tmp_path, tensors, config).numbers(torch.float32), matrix, rtol=2e-7, atol=0)
    del tensors["g_idx"]
    with pytest.raises(ValueError, match=r"tensor 'm\.g_idx' is missing"):
        read(tmp_path, tensors, config)
    read(tmp_path, tensors, {**config, "desc_act": False})
