"""The shipped pair with heads twice as wide: the same function, for libraries that have no kernel for its narrow heads.

A head's new numbers are zeros, in queries, keys and values.  They stand between the old ones, so that every old pair of numbers
keeps its rotary frequency: number i of a head's half becomes number 2i of the wider half.  The softmax's scale shrinks with the
root of the width, which the queries make up for.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def widened(source: Path, folder: Path) -> Path:
    """Writes the target or the head of `source`, with heads twice as wide and float32 weights, to a folder."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    head_dim = config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 2 * head_dim}))
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        part = name.split(".")[-2] if name.count(".") > 1 else ""
        if part in ("q_proj", "k_proj", "v_proj"):
            wide = spread(weight.float(), head_dim)
            tensors[name] = wide * math.sqrt(2) if part == "q_proj" else wide
        elif part == "o_proj":
            tensors[name] = spread(weight.float().t(), head_dim).t().contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def spread(rows: Tensor, head_dim: int) -> Tensor:
    """[heads * head_dim, ...] with a row of zeros after each."""
    return torch.stack((rows, torch.zeros_like(rows)), dim=1).flatten(0, 1)
