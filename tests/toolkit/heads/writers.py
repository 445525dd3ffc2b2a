"""Writes a head in each published layout, as its publisher's exporter does.  Knows names and keys; the head is `parts.py`'s."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from toolkit.heads.parts import Parts, Tensors

Files = tuple[dict[str, Any], Tensors]  # config.json, and the tensors


def save(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = files
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _body(parts: Parts, **more: Any) -> dict[str, Any]:
    """What every layout's config says of the layers."""
    o = parts.options
    config = {
        "model_type": "llama", "hidden_size": o.hidden, "intermediate_size": o.mlp, "num_hidden_layers": o.layers,
        "num_attention_heads": o.heads, "num_key_value_heads": o.kv_heads, "head_dim": o.head_dim, "rms_norm_eps": o.eps,
        "vocab_size": o.vocab, "max_position_embeddings": o.max_position, "hidden_act": "silu", "attention_bias": o.bias,
        "tie_word_embeddings": False, "torch_dtype": "float32", "initializer_range": 0.02, "use_cache": True, **more,
    }  # fmt: skip
    return config | ({"sliding_window": o.window} if o.window else {})


def _old_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4 writes it."""
    rest = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if rest == {"rope_type": "default"} else rest}


def _named(parts: Parts, *renames: tuple[str, str]) -> Tensors:
    """The tensors with `.weight` at the end of norms, and renamed by regular expressions."""
    named = {}
    for name, tensor in parts.tensors.items():
        name = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        for pattern, new in renames:
            name = re.sub(pattern, new, name)
        named[name] = tensor.float()
    return named


def _vocabulary(parts: Parts, t2d: bool, always: bool) -> Tensors:
    """d2t holds offsets.  t2d, always: whether the layout has t2d, and both where there is one vocabulary."""
    o, ids = parts.options, parts.draft_ids
    if ids is None:
        if not always:
            return {}
        ids = torch.arange(o.vocab)
    marks = torch.zeros(o.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids))} | ({"t2d": marks} if t2d else {})


def safeailab(parts: Parts) -> Files:
    o = parts.options
    config = _body(parts, **_old_rope(o.rope), target_hidden_size=o.target_hidden)
    if not o.aux:
        return config | {"bias": o.fc_bias}, _named(parts)
    eagle = {"eagle_aux_hidden_state_layer_ids": list(o.aux), "norm_before_residual": o.before_residual}
    config |= {"draft_vocab_size": o.draft_vocab, "eagle_config": eagle}
    return config, _named(parts, (r"^layers\.0\.", "midlayer.")) | _vocabulary(parts, t2d=True, always=False)


def specforge(parts: Parts) -> Files:
    o = parts.options
    config = _body(parts, **_old_rope(o.rope), rope_parameters=o.rope, target_hidden_size=o.target_hidden) | {
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": o.draft_vocab, "norm_output": o.norms_logits,
        "fc_norm": o.feature_norm == "each",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(o.aux), "use_aux_hidden_state": True},
    }  # fmt: skip
    tensors = _named(parts, (r"^layers\.0\.", "midlayer."), (r"^feature_norm\.", "fc_norm."))
    return config, tensors | _vocabulary(parts, t2d=True, always=True)


def speculators(parts: Parts) -> Files:
    o = parts.options
    types = ["sliding_attention" if o.window else "full_attention"] * o.layers
    inner = _body(parts, model_type="qwen3" if o.qk_norm else "llama", rope_parameters=o.rope, layer_types=types)
    config = {
        "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": o.draft_vocab, "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in o.aux],
        "embed_requires_grad": False, "fc_norm": o.feature_norm == "each", "norm_before_fc": o.feature_norm == "joint",
        "norm_before_residual": o.before_residual, "norm_output": o.recycles_normed,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "target_hidden_size": None,
        "transformer_layer_config": inner, "transformers_version": "5.2.0",
    }  # fmt: skip
    joint = (r"^feature_norm\.0\.", "input_norm.") if o.feature_norm == "joint" else (r"^feature_norm\.", "fc_norm.")
    return config, _named(parts, joint) | _vocabulary(parts, t2d=True, always=False)


def modelopt(parts: Parts, generation: str = "layers") -> Files:
    """generation: how the layers are called: "midlayer", "midlayer.0", "layers", or "deep" for Megatron's export."""
    o = parts.options
    rope = {"rope_theta": o.rope["rope_theta"]} if o.rope["rope_type"] == "default" else _old_rope(o.rope)
    config = _body(parts, **rope, target_hidden_size=o.target_hidden) | {
        "architectures": ["LlamaForCausalLMEagle3Deep" if generation == "deep" else "LlamaForCausalLMEagle3"],
        "draft_vocab_size": o.draft_vocab, "quantization_config": None, "pad_token_id": None, "some_unset_key": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(o.aux)[::-1], "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None,
        },
    }  # fmt: skip
    renames = {
        "midlayer": [(r"^layers\.0\.", "midlayer.")], "midlayer.0": [(r"^layers\.", "midlayer.")], "layers": [],
        "deep": [(r"^layers\.([1-9])\.input_layernorm", r"layers.\1.hidden_norm"), (r"^layers\.", "midlayer.")],
    }[generation]  # fmt: skip
    return config, _named(parts, *renames) | _vocabulary(parts, t2d=False, always=False)


def _latent_body(parts: Parts, **more: Any) -> dict[str, Any]:
    """A config of latent attention, copied from a target's, its experts included."""
    o, latent = parts.options, parts.options.latent
    assert latent is not None
    body = {key: value for key, value in _body(parts).items() if key not in ("head_dim", "num_key_value_heads")}
    return body | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "num_key_value_heads": o.heads,
        "q_lora_rank": latent.q, "kv_lora_rank": latent.kv, "qk_nope_head_dim": latent.nope, "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.value, "first_k_dense_replace": 1, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "scoring_func": "sigmoid", "num_nextn_predict_layers": 0, **more,
    } | ({} if latent.interleaved else {"rope_interleave": False})  # fmt: skip


def modelopt_latent(parts: Parts, generation: str = "layers") -> Files:
    """generation: as of `modelopt`."""
    config, tensors = modelopt(parts, generation)
    kept = {key: config[key] for key in ("draft_vocab_size", "eagle_config", "rope_theta", "target_hidden_size")}
    return _latent_body(parts, **kept, rope_scaling=config.get("rope_scaling"), num_return_sequences=1), tensors


def torchspec(parts: Parts, for_vllm: bool = False) -> Files:
    """for_vllm: whether it is the export that vLLM reads, which counts layers from 1."""
    o = parts.options
    ids = [layer + for_vllm for layer in o.aux]
    config = _latent_body(parts, **_old_rope(o.rope), draft_vocab_size=o.draft_vocab, _torchspec_version="0.1") | {
        "norm_output": o.recycles_normed, "fc_norm": o.feature_norm == "each", "target_hidden_size": o.target_hidden,
        "norm_before_residual": o.before_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True, "use_mtp_layernorm": False},
    }  # fmt: skip
    renames = [(r"^feature_norm\.", "fc_norm.")] + ([] if for_vllm else [(r"^layers\.0\.", "midlayer.")])
    return config, _named(parts, *renames) | _vocabulary(parts, t2d=True, always=False)


WRITERS: dict[str, Callable[[Parts], Files]] = {
    "safeailab": safeailab, "specforge": specforge, "speculators": speculators, "modelopt": modelopt,
}  # fmt: skip
