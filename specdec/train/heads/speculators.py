"""The layout of `speculators`, which has all kinds of heads: the config and the tensors of a head that is saved in it.

This file knows names of tensors and keys.  It knows no training and no files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from specdec.draft.formats.parts import Part
from specdec.draft.formats.reading import PartNames
from specdec.draft.head import DraftHead

NAMES = {"eagle3": "eagle3", "p-eagle": "peagle", "dflash": "dflash", "dflash2": "dflash2", "dspark": "dspark"}


class Verifier(NamedTuple):
    """The head's target.  name: its folder or hub id.  architectures: what its config says."""

    name: str
    architectures: list[str]


def config_of(head: DraftHead, rope: dict[str, Any], verifier: Verifier) -> dict[str, Any]:
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
    if spec.reads_pairs:
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
    if block.selection is not None:
        taps, group = block.convolution or (0, 0)
        raw |= {
            "conv_kernel_size": taps, "conv_group_size": group, "selector_rank": block.selection.rank,
            "selector_top_k": block.selection.candidates,
        }  # fmt: skip
    if block.markov != "none":
        raw |= {
            "markov_rank": block.markov_rank, "markov_head_type": block.markov,
            "enable_confidence_head": block.confidence != "none",
            "confidence_head_with_markov": block.confidence == "markov",
        }  # fmt: skip
    return raw


def parts_of(head: DraftHead) -> list[Part]:
    """What the layout holds of a head, beside the map of its vocabulary; the ranks' shares of a head can't be written."""
    spec = head.config
    norms = {"none": (), "joint": ("input_norm",), "each": tuple(f"fc_norm.{index}" for index in range(len(spec.aux_layers)))}
    named = [*head.parts(PartNames.numbered(spec.model.num_layers, feature_norms=norms[spec.feature_norm]))]
    named += [("embed_tokens", head.embed_tokens)] if spec.reads_pairs else []
    named += [("lm_head", head.lm_head)] if spec.reads_pairs or has_map(head) else []
    return named


def has_map(head: DraftHead) -> bool:
    """Whether the layout has a map of the head's vocabulary: not of the target's whole one."""
    return head.config.draft_vocab_size != head.config.model.vocab_size
