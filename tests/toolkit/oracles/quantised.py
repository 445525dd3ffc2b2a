"""Checkpoints of 8 and 4 bits, written value by value as their formats' documents say, and the dense weights that they stand
for.

Nothing here comes from the code under test: quantised values are drawn at random, packed by plain loops, and dequantised by a
formula.

Shapes: N rows, K columns, G groups of a row's columns.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.models import save_target

SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Written = tuple[dict[str, Tensor], Tensor]  # tensors by their endings, and the matrix that they stand for


class Scheme(NamedTuple):
    """config: of config.json.  write: a matrix of that size in this format, as small as weights are."""

    config: dict[str, Any]
    write: Callable[[int, int, torch.Generator], Written]


def words(qvalues: Tensor, bits: int) -> Tensor:
    """Quantised values of each row in int32 words, the first in the lowest bits."""
    pack_factor, rows = 32 // bits, []
    for row in qvalues.tolist():
        runs = (row[i : i + pack_factor] for i in range(0, len(row), pack_factor))
        packed = [sum(value << (bits * at) for at, value in enumerate(run)) for run in runs]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def draw(most: int, *shape: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, most, shape, generator=generator)


def scales(*shape: int, generator: torch.Generator) -> Tensor:
    """Of very unlike sizes, so that a scale in another one's place shows."""
    return 0.002 * 10.0 ** torch.rand(*shape, generator=generator)


def spread(groups_NG: Tensor, columns: int) -> Tensor:
    return groups_NG.repeat_interleave(columns // groups_NG.shape[1], dim=1)


def fp8(ending: str, per: str, block: tuple[int, int] = (128, 128)) -> Callable[[int, int, torch.Generator], Written]:
    def write(N: int, K: int, generator: torch.Generator) -> Written:
        qvalues = (20 * torch.randn(N, K, generator=generator)).to(torch.float8_e4m3fn)
        if per == "tensor":
            scale = scales(1, generator=generator)
            factors = scale.expand(N, K)
        elif per == "channel":
            scale = scales(N, 1, generator=generator)
            factors = scale.expand(N, K)
        else:
            scale = scales(-(-N // block[0]), -(-K // block[1]), generator=generator)
            factors = scale.repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
        return {"weight": qvalues, ending: 0.2 * scale}, qvalues.float() * (0.2 * factors)

    return write


def groups_of(K: int, group: int, in_act_order: bool) -> Tensor:
    """The group of each column: at random, and the same in all matrices of that width, as matrices of one input have it."""
    columns = torch.randperm(K, generator=torch.Generator().manual_seed(K)) if in_act_order else torch.arange(K)
    return columns // group


def packed(
    bits: int, group: int, symmetric: bool, in_act_order: bool = False
) -> Callable[[int, int, torch.Generator], Written]:
    def write(N: int, K: int, generator: torch.Generator) -> Written:
        G, middle = K // (group or K), 1 << (bits - 1)
        qvalues, scale = draw(1 << bits, N, K, generator=generator), scales(N, G, generator=generator) / middle * 8
        zero_points = torch.full((N, G), middle) if symmetric else draw(1 << bits, N, G, generator=generator)
        tensors = {"weight_packed": words(qvalues, bits), "weight_scale": scale, "weight_shape": torch.tensor([N, K])}
        if not symmetric:
            tensors["weight_zero_point"] = words(zero_points.T, bits).T.contiguous()
        groups_K = groups_of(K, group or K, in_act_order)
        if in_act_order:
            tensors["weight_g_idx"] = groups_K.int()
        return tensors, (qvalues - zero_points[:, groups_K]).float() * scale[:, groups_K]

    return write


def awq(group: int) -> Callable[[int, int, torch.Generator], Written]:
    def in_order(qvalues: Tensor) -> Tensor:
        return words(qvalues.unflatten(1, (-1, 8))[:, :, list(AWQ_ORDER)].flatten(1), 4)

    def write(N: int, K: int, generator: torch.Generator) -> Written:
        qvalues_KN, zero_points_GN = draw(16, K, N, generator=generator), draw(16, K // group, N, generator=generator)
        scale_GN = scales(K // group, N, generator=generator)
        dense = (qvalues_KN - zero_points_GN.repeat_interleave(group, 0)).float() * scale_GN.repeat_interleave(group, 0)
        return {"qweight": in_order(qvalues_KN), "qzeros": in_order(zero_points_GN), "scales": scale_GN}, dense.T.contiguous()

    return write


def gptq(
    bits: int, group: int, symmetric: bool, version: int, in_act_order: bool = False
) -> Callable[[int, int, torch.Generator], Written]:
    def write(N: int, K: int, generator: torch.Generator) -> Written:
        middle, G = 1 << (bits - 1), K // group
        qvalues_NK, scale_GN = draw(2 * middle, N, K, generator=generator), scales(G, N, generator=generator) / middle * 8
        zero_points_GN = torch.full((G, N), middle) if symmetric else draw(2 * middle, G, N, generator=generator)
        stored = (zero_points_GN - 1) % (2 * middle) if version == 1 else zero_points_GN  # which wraps around
        groups_K = groups_of(K, group, in_act_order)
        tensors = {
            "qweight": words(qvalues_NK, bits).T.contiguous(), "qzeros": words(stored, bits), "scales": scale_GN,
            "g_idx": groups_K.int(),
        }  # fmt: skip
        return tensors, (qvalues_NK - zero_points_GN[groups_K].T).float() * scale_GN[groups_K].T

    return write


def fp4(kind: str) -> Callable[[int, int, torch.Generator], Written]:
    def write(N: int, K: int, generator: torch.Generator) -> Written:
        qvalues, group = draw(16, N, K, generator=generator), 32 if kind == "mxfp4" else 16
        dense = torch.tensor([[(-E2M1[c - 8] if c > 7 else E2M1[c]) for c in row] for row in qvalues.tolist()])
        bytes_ = torch.tensor([[a | b << 4 for a, b in zip(row[::2], row[1::2])] for row in qvalues.tolist()]).to(torch.uint8)
        if kind == "mxfp4":
            exponents = 119 + draw(4, N, K // group, generator=generator)
            factors = 2.0 ** (exponents - 127)
            return {"weight_packed": bytes_, "weight_scale": exponents.to(torch.uint8)}, dense * spread(factors, K)
        scale = (100 * torch.rand(N, K // group, generator=generator) + 1).to(torch.float8_e4m3fn)
        if kind == "nvfp4":
            beside = {"weight_global_scale": torch.tensor([3000.0]), "input_global_scale": torch.tensor([200.0])}
            tensors = {"weight_packed": bytes_, "weight_scale": scale, **beside}
            return tensors, dense * spread(scale.float() / torch.tensor(3000.0), K)
        tensors = {
            "weight": bytes_,
            "weight_scale": scale,
            "weight_scale_2": torch.tensor(0.0004),
            "input_scale": torch.ones(()),
        }
        return tensors, dense * spread(scale.float() * torch.tensor(0.0004), K)

    return write


def compressed(kind: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it."""
    weights = {"dynamic": False, "symmetric": True, "observer": "minmax", "actorder": None, "block_structure": None, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, "format": kind}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed", "version": "0.20.0",
        "config_groups": {"group_0": group}, "ignore": list(ignore), "kv_cache_scheme": None,
        "global_compression_ratio": None, "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip


def _ct_fp8(strategy: str, **more: Any) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", strategy=strategy, **more)


def _ct_int(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **strategy, **more)


def _gptq_config(bits: int, group: int, symmetric: bool, version: int) -> dict[str, Any]:
    layout = "gptq" if version == 1 else "gptq_v2"
    common = {"quant_method": "gptq", "desc_act": False, "lm_head": False, "true_sequential": True, "damp_percent": 0.01}
    return {**common, "bits": bits, "group_size": group, "sym": symmetric, "checkpoint_format": layout}


_AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_FP4 = {"num_bits": 4, "type": "float"}
SCHEMES: dict[str, Scheme] = {
    "fp8 tensor": Scheme(_ct_fp8("tensor"), fp8("weight_scale", "tensor")),
    "fp8 channel": Scheme(_ct_fp8("channel"), fp8("weight_scale", "channel")),
    "fp8 block": Scheme(_ct_fp8("block", block_structure=[48, 32]), fp8("weight_scale", "block", (48, 32))),
    "deepseek fp8": Scheme(_BLOCKS, fp8("weight_scale_inv", "block")),
    "modelopt fp8": Scheme({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8("weight_scale", "tensor")),
    **{
        f"w{bits}a16 g{group}{'' if symmetric else ' asym'}": Scheme(
            _ct_int(bits, group, symmetric), packed(bits, group, symmetric)
        )
        for bits, group, symmetric in ((4, 128, True), (4, 32, False), (4, 0, True), (8, 64, True), (8, 0, False))
    },
    "awq": Scheme(_AWQ, awq(32)),
    **{
        f"gptq{bits} v{version}{'' if symmetric else ' asym'}": Scheme(
            _gptq_config(bits, 64, symmetric, version), gptq(bits, 64, symmetric, version)
        )
        for bits, symmetric, version in ((4, True, 1), (4, False, 1), (4, False, 2), (8, True, 2), (8, False, 1))
    },
    "w4a16 g32 asym in act order": Scheme(_ct_int(4, 32, False, actorder="group"), packed(4, 32, False, True)),
    "gptq4 in act order": Scheme(_gptq_config(4, 64, True, 1) | {"desc_act": True}, gptq(4, 64, True, 1, True)),
    "gptq8 asym in act order": Scheme(_gptq_config(8, 32, False, 2) | {"desc_act": True}, gptq(8, 32, False, 2, True)),
    "mxfp4": Scheme(compressed("mxfp4-pack-quantized", strategy="group", group_size=32, **_FP4), fp4("mxfp4")),
    "nvfp4": Scheme(compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **_FP4), fp4("nvfp4")),
    "modelopt nvfp4": Scheme({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, fp4("modelopt")),
}


def save_quantised(folder: Path, scheme: Scheme, **changes: Any) -> tuple[Path, Path]:
    """A tiny target in that format, and the same target unquantised."""
    plain = save_target(folder / "plain", "llama", **(SIZES | changes))
    return as_quantised(plain, folder / "quantised", scheme), plain


def as_quantised(plain: Path, quantised: Path, scheme: Scheme, left: str = "^$") -> Path:
    """Draws quantised values for all projections of a target, and changes its dense weights to what they stand for.

    left: an expression for the names of those that stay as they are.
    """
    tensors, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    for key in sorted(tensors):
        is_matrix = re.search(
            r"(_proj(_with_mqa)?|in_proj_\w+|shared_mlp\.\w+_linear|\.w[123]|indexer\.w(q_b|k))\.weight$", key
        )
        if is_matrix is None or re.search(left, key):
            stored[key] = tensors[key]
            continue
        own, dense = scheme.write(*tensors[key].shape, generator)
        stored |= {f"{key.removesuffix('.weight')}.{ending}": tensor.contiguous() for ending, tensor in own.items()}
        tensors[key] = dense
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    quantised.mkdir()
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": scheme.config}
    (quantised / "config.json").write_text(json.dumps(config))
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    return quantised
