"""Writes a head of one pass in each published layout, as its publisher's exporter does.  The head is `block_parts.py`'s."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from toolkit.heads.block_parts import BlockParts, Tensors
from toolkit.heads.writers import Files


def _body(parts: BlockParts, **more: Any) -> dict[str, Any]:
    o = parts.options
    types = ["sliding_attention" if window else "full_attention" for window in o.windows or (None,) * o.layers]
    window = next((window for window in o.windows or () if window), None)
    return {
        "model_type": "qwen3", "hidden_size": o.hidden, "intermediate_size": o.mlp, "num_hidden_layers": o.layers,
        "num_attention_heads": o.heads, "num_key_value_heads": o.kv_heads, "head_dim": o.head_dim, "rms_norm_eps": o.eps,
        "vocab_size": o.vocab, "max_position_embeddings": o.max_position, "hidden_act": "silu", "attention_bias": o.bias,
        "attention_dropout": 0.0, "rope_theta": o.theta, "rope_scaling": None, "tie_word_embeddings": False,
        "layer_types": types, "sliding_window": window, "use_sliding_window": window is not None, "max_window_layers": 2,
        "torch_dtype": "float32", "initializer_range": 0.02, "use_cache": True, **more,
    }  # fmt: skip


def _named(parts: BlockParts, *renames: tuple[str, str]) -> Tensors:
    """`.weight` at the end of norms; a Markov head's parts as `markov_head.*`; then renamed by regular expressions."""
    usual = (
        (r"^markov\.(w[12])\.", r"markov_head.markov_\1."), (r"^markov\.(gate|joint)\.", r"markov_head.\1_proj."),
        (r"^confidence\.", "confidence_head.proj."), (r"_conv\.base$", "_conv.base_kernel"),
        (r"_conv\.projection\.", "_conv.kernel_projection."), (r"^selector\.hidden\.", "candidate_selector.hidden_projection."),
        (r"^selector\.(predecessor|successor)$", r"candidate_selector.\1_codebook"),
    )  # fmt: skip
    named = {}
    for name, tensor in parts.tensors.items():
        is_whole = "norm" not in name
        name = name if is_whole else f"{name}.weight"
        for pattern, new in (*usual, *renames):
            name = re.sub(pattern, new, name)
        named[name] = tensor.float()[None, None] if name == "mask_hidden" else tensor.float()
    return named


def _vocabulary(parts: BlockParts, always: bool = False) -> Tensors:
    ids = parts.draft_ids
    if ids is None:
        if not always:
            return {}
        ids = torch.arange(parts.options.vocab)
    marks = torch.zeros(parts.options.vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}


def zlab(parts: BlockParts) -> Files:
    o = parts.options
    nested = {"mask_token_id": o.mask, "target_layer_ids": list(o.aux)}
    name = "DFlash2DraftModel" if o.kind == "dflash2" else "DFlashDraftModel"
    auto = {"AutoModel": f"dflash.{name}"}
    config = _body(parts, architectures=[name], auto_map=auto, block_size=o.size, num_target_layers=4)
    nested |= _selection(parts) if o.kind == "dflash2" else {}
    numbers = (("input_embedding_scale", o.embedding_scale), ("output_multiplier", o.logit_scale))
    nested |= {key: value for key, value in numbers if value != 1}
    nested |= {"final_logit_softcapping": o.softcap} if o.softcap else {}
    return config | {"dflash_config": nested | o.nested} | o.more, _named(parts)


def _selection(parts: BlockParts) -> dict[str, Any]:
    o = parts.options
    convolution = {"conv_kernel_size": o.taps, "conv_group_size": o.group if o.taps else 0}
    return {**convolution, "selector_rank": o.rank, "selector_top_k": o.candidates}


def specforge(parts: BlockParts) -> Files:
    o = parts.options
    if o.kind == "p-eagle":
        eagle = {"eagle_aux_hidden_state_layer_ids": list(o.aux), "use_aux_hidden_state": True}
        config = _body(parts, model_type="llama", architectures=["PEagleDraftModel"], draft_vocab_size=o.draft_vocab) | {
            "eagle_config": eagle, "dflash_config": {"mask_token_id": o.mask}, "norm_before_residual": o.before_residual,
            "target_hidden_size": o.target_hidden,
        }  # fmt: skip
        return config, _named(parts) | _vocabulary(parts, always=True)
    config, tensors = zlab(parts)
    if o.kind == "dspark":
        config["architectures"] = ["DSparkDraftModel"]
        config["dflash_config"] |= {
            "markov_rank": o.rank, "markov_head_type": o.markov, "enable_confidence_head": o.confidence != "none",
            "confidence_head_with_markov": o.confidence == "markov", "projector_type": "dspark",
        }  # fmt: skip
    return config, tensors


def modelopt(parts: BlockParts) -> Files:
    """Windows of all layers alike stand in dflash_config."""
    o = parts.options
    window = next((window for window in o.windows or () if window), None)
    nested = {
        "mask_token_id": o.mask, "target_layer_ids": list(o.aux), "causal": bool(o.causal and o.causal[0]),
    } | ({"use_swa": True, "swa_window_size": window} if window else {})  # fmt: skip
    if o.kind == "dspark":
        nested |= {
            "projector_type": "dspark", "markov_rank": o.rank, "markov_head_type": o.markov, "shift_label": True,
            "use_confidence_head": o.confidence != "none",
        }  # fmt: skip
    config = _body(parts, architectures=["DFlashDraftModel"], block_size=o.size, num_target_layers=4, some_unset_key=None)
    config |= {"dflash_config": nested, "layer_types": ["full_attention"] * o.layers, "sliding_window": None}
    config["use_sliding_window"] = False
    flat = (r"^markov_head\.", ""), (r"^confidence_head\.proj", "confidence_proj")
    return config, _named(parts, *flat)


def deepspec(parts: BlockParts) -> Files:
    o = parts.options
    config = _body(parts, architectures=["Qwen3DSparkModel"], block_size=o.size, num_target_layers=4, num_anchors=512) | {
        "target_layer_ids": list(o.aux), "mask_token_id": o.mask, "markov_rank": o.rank, "enable_confidence_head": False,
        "draft_num_hidden_layers": o.layers,
    }  # fmt: skip
    if o.kind == "dspark":
        config |= {
            "markov_head_type": o.markov, "enable_confidence_head": o.confidence != "none",
            "confidence_head_with_markov": o.confidence == "markov",
        }  # fmt: skip
    return config, _named(parts)


def speculators(parts: BlockParts) -> Files:
    o = parts.options
    inner = _body(parts, model_type="qwen3" if o.qk_norm else "llama")
    name = o.kind.replace("-", "")
    config = {
        "architectures": ["Speculator"], "auto_map": {"": "config"}, "draft_vocab_size": o.draft_vocab,
        "speculators_config": {
            "algorithm": name, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": o.size - o.skips}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "speculators_model_type": name, "speculators_version": "0.9.0", "target_hidden_size": None,
        "transformer_layer_config": inner, "transformers_version": "5.2.0", "mask_token_id": o.mask,
    }  # fmt: skip
    ids = [layer + 1 for layer in o.aux]
    if o.kind == "p-eagle":
        config |= {
            "eagle_aux_hidden_state_layer_ids": ids, "embed_requires_grad": True, "fc_norm": o.feature_norm == "each",
            "norm_before_fc": o.feature_norm == "joint", "norm_before_residual": o.before_residual, "norm_output": False,
        }  # fmt: skip
        joint = (r"^feature_norm\.0\.", "input_norm.") if o.feature_norm == "joint" else (r"^feature_norm\.", "fc_norm.")
        return config, _named(parts, joint) | _vocabulary(parts)
    is_causal = any(causal for causal in o.causal or ())
    config |= {
        "aux_hidden_state_layer_ids": ids, "block_size": o.size, "sample_from_anchor": not o.skips,
        "sliding_window_non_causal": bool(o.windows) and not is_causal,
    }  # fmt: skip
    config |= _selection(parts) if o.kind == "dflash2" else {}
    if o.kind == "dspark":
        config |= {
            "markov_rank": o.rank, "markov_head_type": o.markov, "enable_confidence_head": o.confidence != "none",
            "confidence_head_with_markov": o.confidence == "markov",
        }  # fmt: skip
    return config, _named(parts) | _vocabulary(parts)


BLOCK_WRITERS: dict[str, Callable[[BlockParts], Files]] = {
    "z-lab": zlab, "specforge": specforge, "modelopt": modelopt, "deepspec": deepspec, "speculators": speculators,
}  # fmt: skip
