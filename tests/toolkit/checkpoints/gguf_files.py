"""GGUF files of small models, written with the package `gguf`, whose own names, blocks and numbers are the oracle.

Rows of queries and keys are brought into llama.cpp's order here by the rule of its converter, and not by that of the reader.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt_oss": "gpt-oss"}
NAMES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
BLOCK_COLUMNS = 256  # of the types with sub-blocks
# Where scales in float16 lie in a block: at its beginning alone, if nothing else is said.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=16)
# gpt-oss's kind of rope, over few positions; `truncate` is what no key of a GGUF file says.
GPT_OSS_ROPE: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=15000.0, factor=8.0, original_max_position_embeddings=32, truncate=False
)
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def write_gguf(
    folder: Path,
    path: Path,
    types: Callable[[str], str] = lambda name: "F32",
    vocabulary: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """The model of a folder as a GGUF file.

    types: ggml's name of the type of each matrix, by Hugging Face's name; vectors are F32.  vocabulary: keys below
    tokenizer.ggml.  keys: below the architecture's name, with __ for a dot; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[config["model_type"]]
    writer, names = gguf.GGUFWriter(path, name), gguf.get_tensor_name_map(NAMES[name], config["num_hidden_layers"])
    own = own_keys(config) | {key.replace("__", "."): value for key, value in keys.items()}
    for key, value in own.items():
        if value is not None:
            put(writer, f"{name}.{key}", value)
    for key, value in (vocabulary or {}).items():
        put(writer, key if "." in key else f"tokenizer.ggml.{key}", value)
    for other, tensor in load_file(folder / "model.safetensors").items():
        if name == "gpt-oss" and ".experts." in other:
            continue
        stem, _, ending = other.rpartition(".")
        if other.endswith("sinks"):
            stem, ending = other, "weight"
        found = names.get_name(stem)
        assert found is not None, other
        kind = gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 else types(other)]
        rows = torch.from_numpy(stored_rows(tensor, kind))
        rows = turned(rows, other, config) if name == "llama" else rows
        writer.add_tensor(f"{found}.{ending}", rows.numpy(), raw_dtype=kind)
    if name == "gpt-oss":
        add_experts(writer, load_file(folder / "model.safetensors"))
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(rope, config["head_dim"]))
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def own_keys(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    keys = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": float(rope["rope_theta"]),
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"], "vocab_size": config["vocab_size"],
    }  # fmt: skip
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        keys |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        keys |= {f"rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow") if name in rope}
    if config["model_type"] == "gpt_oss":
        keys |= {
            "expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["intermediate_size"], "attention.sliding_window": config["sliding_window"],
        }  # fmt: skip
    return keys


def put(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def stored_rows(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """A matrix as its rows of blocks; of types that `gguf` can only read, any blocks, the same ones for the same matrix."""
    if kind.name not in ("Q4_K", "Q5_K", "Q6_K"):
        return quantize(tensor.float().numpy(), kind)
    seed = int(tensor.float().abs().sum() * 1e3)
    return random_blocks(kind.name, tensor.numel() // BLOCK_COLUMNS, seed, 1e-4).reshape(len(tensor), -1)


def random_blocks(type: str, count: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """Any bytes, uint8 [count, bytes of a block], but that scales are numbers of about this size."""
    random, size = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][1]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for place in HALVES.get(type, (0,)):
        scales = (scale * random.normal(size=count)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(count, 2)
    if type == "MXFP4":
        blocks[:, 0] = random.integers(90, 160, count)
    return blocks


def turned(tensor: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """llama.cpp's order of the rows of queries and keys."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    rows = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return rows.swapaxes(1, 2).reshape(tensor.shape)


def as_stored(tensor: Tensor, type: str) -> Tensor:
    """What `gguf` reads again of a matrix that it wrote in a type."""
    kind = gguf.GGMLQuantizationType[type]
    return torch.from_numpy(dequantize(stored_rows(tensor, kind), kind)).view(tensor.shape)


def save_as_stored(folder: Path, out: Path, types: Callable[[str], str]) -> Path:
    """The model of a folder with the dequantised values of its GGUF file."""
    out.mkdir()
    (out / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    found = {name: each if each.dim() == 1 else as_stored(each, types(name)) for name, each in tensors.items()}
    save_file({name: each.contiguous() for name, each in found.items()}, out / "model.safetensors", {"format": "pt"})
    return out


def rope_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """What Llama 3.1's scaling divides each frequency by, as llama.cpp's converter writes it."""
    factor, low, high, original = (rope[key] for key in LLAMA3_KEYS)
    found = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (index / head_dim)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def add_experts(writer: gguf.GGUFWriter, tensors: dict[str, Tensor]) -> None:
    """gpt-oss's experts, of which openai's checkpoints alternate rows of gate and up, and columns within bytes."""
    for name, tensor in tensors.items():
        if ".experts." not in name or name.endswith("_scales"):
            continue
        layer, projection = name.split(".")[2], name.split(".experts.")[1]
        parts = (
            {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if projection.startswith("gate_up") else {"down": slice(None)}
        )
        for part, rows in parts.items():
            own = f"blk.{layer}.ffn_{part}_exps"
            if projection.endswith("_bias"):
                writer.add_tensor(f"{own}.bias", tensor[:, rows].float().numpy())
                continue
            exponents = tensors[name.replace("_blocks", "_scales")][:, rows]
            writer.add_tensor(
                f"{own}.weight", ggml_blocks(tensor[:, rows], exponents), raw_dtype=gguf.GGMLQuantizationType.MXFP4
            )


def ggml_blocks(blocks: Tensor, exponents: Tensor) -> np.ndarray:
    """openai's blocks of 16 bytes, two neighbouring columns in each, as ggml's: column j beside column j + 16."""
    columns = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    halves = columns[..., :16] | columns[..., 16:] << 4
    return torch.cat((exponents[..., None], halves), dim=-1).flatten(-2).numpy()
