"""The layout of `speculators`, which has all kinds of heads: the config and the tensors of a head that is saved in it.

This file knows names of tensors and keys.  It knows no training and no files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.eagle.head import Eagle3Head
from specdec.models.causal_lm import DecoderLayer
from specdec.models.layers import MLP, RMSNorm, SelfAttention
from specdec.models.linear import Linear

NAMES = {"eagle3": "eagle3", "p-eagle": "peagle", "dflash": "dflash", "dspark": "dspark"}


class Verifier(NamedTuple):
    """The head's target.  name: its folder or hub id.  architectures: what its config says."""

    name: str
    architectures: list[str]


def config_of(head: Eagle3Head | DFlashHead, rope: dict[str, Any], verifier: Verifier) -> dict[str, Any]:
    """config.json.  rope: the keys that say the head's rope, as a transformers config has them."""
    spec, model, block = head.config, head.config.model, head.config.block
    assert not any(kind.window for kind in model.layer_kinds)
    inner = {
        "model_type": "qwen3" if model.qk_norm else "llama", "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab_size, "rms_norm_eps": model.rms_norm_eps, "max_position_embeddings": model.max_position,
        "hidden_act": "silu", "attention_bias": model.qkv_bias, "tie_word_embeddings": False, **rope,
    }  # fmt: skip
    proposals: dict[str, Any] = {"proposal_type": "greedy"}
    if block is not None:
        proposals["speculative_tokens"] = block.size - block.skips_anchor
    raw: dict[str, Any] = {
        "architectures": [type(head).__name__.replace("Head", "Speculator")], "speculators_model_type": NAMES[spec.kind],
        "speculators_version": "0.9.0", "draft_vocab_size": spec.draft_vocab_size, "target_hidden_size": None,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": NAMES[spec.kind], "default_proposal_method": "greedy",
            "proposal_methods": [proposals],
            "verifier": {"name_or_path": verifier.name, "architectures": verifier.architectures},
        },
    }  # fmt: skip
    ids = [layer + 1 for layer in spec.aux_layers]
    if block is not None:
        raw["mask_token_id"] = block.mask_id
    if isinstance(head, Eagle3Head):
        return raw | {
            "eagle_aux_hidden_state_layer_ids": ids, "embed_requires_grad": block is not None,
            "norm_output": spec.recycles_normed,
            "fc_norm": spec.feature_norm == "each", "norm_before_fc": spec.feature_norm == "joint",
            "norm_before_residual": spec.norm_before_residual,
        }  # fmt: skip
    assert block is not None and not block.anchored_windows
    raw |= {
        "aux_hidden_state_layer_ids": ids, "block_size": block.size, "sample_from_anchor": not block.skips_anchor,
        "sliding_window_non_causal": False,
    }  # fmt: skip
    if isinstance(head, DSparkHead):
        raw |= {
            "markov_rank": block.markov_rank, "markov_head_type": block.markov,
            "enable_confidence_head": block.confidence != "none",
            "confidence_head_with_markov": block.confidence == "markov",
        }  # fmt: skip
    return raw


def tensors_of(head: Eagle3Head | DFlashHead) -> dict[str, Tensor]:
    """Every tensor of the layout, by name; the ranks' shares of a head can't be written."""
    spec, named = head.config, dict[str, Tensor]()
    if isinstance(head, PEagleHead):
        named["mask_hidden"] = head.mask_hidden_F[None, None]
    if isinstance(head, Eagle3Head):
        named["embed_tokens.weight"] = head.embed_tokens.weight
        for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            named[f"layers.0.{part}.weight"] = getattr(head, part).weight
        named |= _attention(head.self_attn, "layers.0") | _mlp(head.mlp, "layers.0")
        joint = ["input_norm"] if spec.feature_norm == "joint" else [f"fc_norm.{i}" for i in range(len(head.feature_norms))]
        for name, norm in zip(joint, head.feature_norms, strict=True):
            assert isinstance(norm, RMSNorm)
            named[f"{name}.weight"] = norm.weight
    else:
        named["hidden_norm.weight"] = head.hidden_norm.weight
    first = 1 if isinstance(head, Eagle3Head) else 0
    for index, layer in enumerate(head.layers, first):
        assert isinstance(layer, DecoderLayer)
        at = f"layers.{index}"
        named |= _attention(layer.self_attn, at) | _mlp(layer.mlp, at)
        named[f"{at}.input_layernorm.weight"] = layer.input_layernorm.weight
        named[f"{at}.post_attention_layernorm.weight"] = layer.post_attention_layernorm.weight
    named |= {"norm.weight": head.norm.weight, **_parts(head.fc, {"": "fc"})}
    if isinstance(head, Eagle3Head) or spec.draft_vocab_size != spec.model.vocab_size:
        named |= _parts(head.lm_head, {"": "lm_head"})
    if isinstance(head, DSparkHead):
        named["markov_head.markov_w1.weight"] = head.markov.w1.weight
        named |= _parts(head.markov.w2, {"": "markov_head.markov_w2"})
        named |= _parts(head.markov.gate, {"": "markov_head.gate_proj"}) if head.markov.gate else {}
        named |= _parts(head.markov.joint, {"": "markov_head.joint_proj"}) if head.markov.joint else {}
        named |= _parts(head.confidence, {"": "confidence_head.proj"}) if head.confidence else {}
    if spec.draft_vocab_size != spec.model.vocab_size:
        assert head.d2t_V is not None
        named["d2t"] = head.d2t_V
        ids_V = head.d2t_V + torch.arange(len(head.d2t_V), dtype=torch.int64, device=head.d2t_V.device)
        named["t2d"] = torch.zeros(spec.model.vocab_size, dtype=torch.bool, device=ids_V.device).index_fill_(0, ids_V, True)
    return named


def _attention(attention: SelfAttention, at: str) -> dict[str, Tensor]:
    parts = {name: f"{at}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    named = _parts(attention.qkv_proj, parts) | _parts(attention.o_proj, {"": f"{at}.self_attn.o_proj"})
    if attention.qk_norm is not None:  # heads trained here have a norm each; files have one for all
        weight, Q = attention.qk_norm.weight, attention.num_heads
        named |= {f"{at}.self_attn.q_norm.weight": weight[0], f"{at}.self_attn.k_norm.weight": weight[Q]}
    return named


def _mlp(mlp: MLP, at: str) -> dict[str, Tensor]:
    parts = {name: f"{at}.mlp.{name}" for name in ("gate_proj", "up_proj")}
    return _parts(mlp.gate_up_proj, parts) | _parts(mlp.down_proj, {"": f"{at}.mlp.down_proj"})


def _parts(matrix: Linear, names: dict[str, str]) -> dict[str, Tensor]:
    return {
        f"{name}.{ending}": stored.tensor for part, name in names.items() for ending, stored in matrix.tensors(part).items()
    }
