"""What llama.cpp calls the tensors and keys of each architecture that is read here, and what Hugging Face calls them.

Facts alone: names, and which rows were brought into another order when the file was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec.models.gguf.file import GgufFile

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"  # what divides the frequencies of Llama 3.1 and later: see rope.py
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GPT_OSS = {
    **{name: other for name, other in _LAYER.items() if name.startswith("attn")},
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate",
    "ffn_up_exps": "mlp.experts.up",
    "ffn_down_exps": "mlp.experts.down_proj",
}

# Keys below the architecture's name, and what config.json calls them.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "intermediate_size",
    "attention.sliding_window": "sliding_window",
}


_BIASED = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}


class Architecture(NamedTuple):
    """model_type, model_class: Hugging Face's.  layer: names of tensors of a layer.  sizes: names of keys.

    turned: whether rows of queries and keys lie in pairs that rope turns together, not in two halves of each head.
    biased: keys of config.json that say whether there are biases, and the tensor by which a file says so.
    also: what config.json says besides, of every such model.  yarn: likewise, of a scaling of positions.
    """

    model_type: str
    model_class: str
    layer: dict[str, str]
    sizes: dict[str, str]
    turned: bool = False
    biased: Mapping[str, str] = _BIASED
    also: Mapping[str, Any] = {}
    yarn: Mapping[str, Any] = {}


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYER, _SIZES, turned=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER, _SIZES, biased={}),  # queries, keys and values always have some
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _QK_NORMS, _SIZES),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _GPT_OSS,
        _SIZES | _EXPERTS,
        biased={"attention_bias": "blk.0.attn_q.bias"},
        also={"quantization_config": {"quant_method": "mxfp4"}},
        yarn={"truncate": False},  # the ends of its blend are no whole dimensions, which no key says
    ),
}


def find_architecture(file: GgufFile) -> Architecture:
    """ValueError for any other."""
    if file.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture must be one of {', '.join(ARCHITECTURES)} in a GGUF file, got "
            f"{file.architecture!r}; nearest thing that works: the model's own folder in Hugging Face layout"
        )
    return ARCHITECTURES[file.architecture]


def other_name(architecture: Architecture, name: str) -> str | None:
    """What Hugging Face calls a tensor of the file; None if it is not known."""
    place, _, ending = name.rpartition(".")
    if ending not in ("weight", "bias"):
        return None
    if place in TOP:
        return f"{TOP[place]}.{ending}" if ending == "weight" else None
    parts = place.split(".", 2)
    if len(parts) != 3 or parts[0] != "blk" or not parts[1].isdecimal() or parts[2] not in architecture.layer:
        return None
    matrix = f"model.layers.{int(parts[1])}.{architecture.layer[parts[2]]}"
    return matrix if matrix.endswith(".sinks") else f"{matrix}.{ending}"
