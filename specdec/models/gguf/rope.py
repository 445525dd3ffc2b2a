"""How a GGUF file says that heads are turned: by keys, and for Llama 3.1 and later by a tensor of factors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specdec.models.config import RopeConfig
from specdec.models.gguf.architectures import ROPE_FACTORS, find_architecture
from specdec.models.gguf.file import GgufFile
from specdec.models.layers import inverse_frequencies

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # in all releases


def rope_of(file: GgufFile, own: dict[str, Any], head_dim: Any) -> dict[str, Any]:
    """rope_theta and rope_scaling of a config.json.  own: the architecture's keys, of which those about rope are taken out."""
    where = f"{file.path}: {file.architecture}.rope"
    theta = own.pop("rope.freq_base", 10000.0)
    scaling = _by_keys(own, where)
    if scaling is not None:
        scaling |= find_architecture(file).yarn
    if ROPE_FACTORS in file.tensors:
        if scaling is not None:
            raise ValueError(
                f"{where}.scaling says {scaling}, but the file has factors in {ROPE_FACTORS!r} too; expected one of them"
            )
        scaling = _llama3(file, theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _by_keys(own: dict[str, Any], where: str) -> dict[str, Any] | None:
    """What the keys of scaling say; None: nothing.  A factor without a type is linear, as in llama.cpp."""
    own.pop("rope.scaling.finetuned", None)  # of training
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if (value := own.pop(key, 1.0)) != 1.0:
            raise ValueError(f"{where}{key.removeprefix('rope')} must be 1 or left out, got {value!r}")
    factor, older = own.pop("rope.scaling.factor", None), own.pop("rope.scale_linear", None)
    if factor is not None and older is not None and factor != older:
        raise ValueError(f"{where}.scaling.factor and the older {where}.scale_linear must be equal, got {factor} and {older}")
    factor = older if factor is None else factor
    kind = own.pop("rope.scaling.type", None if factor is None else "linear")
    original = own.pop("rope.scaling.original_context_length", None)
    betas = {name: own.pop(f"rope.scaling.yarn_{name}", None) for name in ("beta_fast", "beta_slow")}
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    named = {name: value for name, value in betas.items() if value is not None}
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **named}


def _llama3(file: GgufFile, theta: Any, head_dim: Any) -> dict[str, Any]:
    """Llama 3.1's scaling, of which the file has the factors of each frequency.  ValueError if they are no such factors."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.type != "F32" or not isinstance(head_dim, int) or tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path}: tensor {ROPE_FACTORS!r} must hold one F32 number for each two values of a head, got "
            f"{tensor.type} of shape {tensor.shape}"
        )
    factors = torch.from_numpy(file.read(ROPE_FACTORS).view(np.float32)).flatten()
    factor = round(float(factors.max()), 4)
    scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if isinstance(theta, float) and theta > 1 and factor > 0:
        low, high, original = _LLAMA3.values()
        scaled = RopeConfig(theta, "llama3", factor, low, high, original)
        turned, unscaled = (inverse_frequencies(rope, head_dim, torch.device("cpu")) for rope in (scaled, RopeConfig(theta)))
        if torch.allclose(factors, unscaled / turned, rtol=1e-4, atol=0):
            return scaling
    raise ValueError(
        f"{file.path}: tensor {ROPE_FACTORS!r} must hold the factors of Llama 3.1's scaling (low_freq_factor 1, "
        f"high_freq_factor 4, over 8,192 positions), got others, up to {factor:g}"
    )
