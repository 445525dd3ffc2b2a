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
