"""Weights as compressed-tensors itself writes them: scales by its own rule, packed and named by its compressors.

Shapes: N rows, K columns.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """The least and the largest number of each run of numbers that has a scale."""
    N, K = weight.shape
    rows, columns = {
        "tensor": (N, K), "channel": (1, K), "group": (1, args.group_size), "tensor_group": (1, args.group_size),
        "block": tuple(args.block_structure or ()),
    }[args.strategy]  # fmt: skip
    runs = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return runs.amin(dim=(1, 3)), runs.amax(dim=(1, 3))


def compressed_by_its_own(
    matrices: dict[str, Tensor], preset: str, ignore: list[str], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """(tensors by name, the quantization_config, the matrices as the library reads them back), for matrices by dotted names.

    Numbers are in bfloat16 where quantised values have 4 bits, with nvfp4's scales rounded before they multiply.
    ignore: which matrices stay.  folder: where the library writes a config.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = nn.Module()
    for name, weight in matrices.items():
        *path, last = name.split(".")
        at = model
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.add_module(last, nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype))
    model.requires_grad_(False)
    apply_quantization_config(model, QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=ignore))
    for name, weight in matrices.items():
        module = model.get_submodule(name)
        module.weight.copy_(weight)
        if name in ignore:
            continue
        args, more = module.quantization_scheme.weights, {}
        if args.strategy == "tensor_group":
            more["global_scale"] = generate_gparam(weight.min(), weight.max())
            module.weight_global_scale.copy_(more["global_scale"])
        scale, zero = calculate_qparams(*ranges(weight, args), args, **more)
        module.weight_scale.copy_(scale.view_as(module.weight_scale))
        if hasattr(module, "weight_zero_point") and zero is not None:
            module.weight_zero_point.copy_(zero.view_as(module.weight_zero_point))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    (folder / "config.json").write_text("{}")
    compressor.update_config(str(folder))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    written = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compressor.decompress_model(model)
    return written, config, {name: model.get_submodule(name).weight.detach().clone() for name in matrices}
