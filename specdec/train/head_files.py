"""Writes a trained EAGLE-3 head as the folder that SafeAILab's heads have: config.json and model.safetensors.

This file knows names of tensors and keys.  It knows no training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.draft.eagle.head import Eagle3Head
from specdec.models.config import RopeConfig


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16).  head: with a draft vocabulary."""
    from safetensors.torch import save_file

    model, Vd = head.config.model, head.config.draft_vocab_size
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab_size, "draft_vocab_size": Vd, "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position, **rope_keys(model.rope), "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(head.config.aux_layers), "use_aux_hidden_state": True,
            "norm_before_residual": False, "norm_output": False,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    tensors = {name: tensor.to(torch.bfloat16).contiguous().cpu() for name, tensor in split_weights(head).items()}
    assert head.d2t_V is not None
    tensors["d2t"] = head.d2t_V.cpu()
    tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool)
    tensors["t2d"][tensors["d2t"] + torch.arange(Vd)] = True
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """The rotary settings by the names of transformers 4, which all readers of heads know."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }  # fmt: skip
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def split_weights(head: Eagle3Head) -> dict[str, Tensor]:
    """The head's weights by the tensor names of SafeAILab's heads, with fused projections split into their parts."""
    attention, mlp = head.self_attn, head.mlp
    matrices = {"fc": head.fc, "lm_head": head.lm_head}
    matrices |= {"midlayer.self_attn.o_proj": attention.o_proj, "midlayer.mlp.down_proj": mlp.down_proj}
    weights = {name: matrix.tensors()["weight"].tensor for name, matrix in matrices.items()}
    for prefix, fused in {"midlayer.self_attn": attention.qkv_proj, "midlayer.mlp": mlp.gate_up_proj}.items():
        weights |= {f"{prefix}.{part}": fused.tensors(part)["weight"].tensor for part in fused.parts.sizes}
    weights |= {"norm": head.norm.weight.detach()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{name}"] = getattr(head, name).weight.detach()
    return {f"{name}.weight": weight for name, weight in weights.items()}
