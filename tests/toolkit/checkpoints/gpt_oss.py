"""Tiny random gpt-oss targets as their own checkpoints are published: experts in mxfp4, written number by number.

Shapes: E experts, O rows, I columns.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.families import save_family

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES = dict(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
SCHEME = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def save_gpt_oss(folder: Path, seed: int = 7, **changes: Any) -> tuple[Path, Path]:
    """(a target in mxfp4, the same target unquantised, as transformers saves it)."""
    plain, quantised = save_family(folder / "plain", "gpt_oss", seed, **{**SIZES, **changes}), folder / "mxfp4"
    numbers, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(seed)
    stored: dict[str, Tensor] = {}
    for name in sorted(numbers):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = numbers[name]
            continue
        E, I, O = numbers[name].shape  # transformers holds experts' matrices transposed
        blocks, scales, values_EOI = random_blocks(E, O, I, generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers[name] = values_EOI.transpose(1, 2).contiguous()
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    quantised.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": SCHEME}
    (quantised / "config.json").write_text(json.dumps(config))
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    return quantised, plain


def random_blocks(E: int, O: int, I: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [E, O, I / 32, 16], exponents [E, O, I / 32], and the numbers [E, O, I] that they stand for."""
    qvalues = torch.randint(0, 16, (E, O, I // 32, 32), generator=generator)
    exponents = torch.randint(121, 126, (E, O, I // 32), generator=generator)
    blocks = qvalues[..., 0::2] + 16 * qvalues[..., 1::2]  # the first of two in the low nibble
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    values = table[qvalues] * torch.pow(2.0, exponents - 127)[..., None]
    return blocks.to(torch.uint8), exponents.to(torch.uint8), values.flatten(2)
