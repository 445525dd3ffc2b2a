"""The config.json of LFM2 and LFM2-MoE, read strictly.

Most layers are a gated short convolution, the others ordinary attention; every layer has an MLP, or, in LFM2-MoE, a mixture.
What a key that is absent means is what transformers' class of the family means.  This module knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

from specdec.attention.kinds import FULL, RECURRENT, LayerKind
from specdec.models.checkpoints.config_values import NotComputedHere, flag, number, whole
from specdec.models.config import ModelConfig, OutputNames
from specdec.models.keys.names import by_own_names, expect_repeated
from specdec.models.keys.shared import check_types, refuse_unknown
from specdec.models.mixtures.keys import TOP_K, layer_numbers, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.recurrent.sizes import RecurrentConfig
from specdec.ops.products.routing import RouterRule

DENSE, MIXTURE = "lfm2", "lfm2_moe"
CONVOLUTION = "conv"  # in a config's layer_types
_OTHER_NAMES = {"tie_embedding": "tie_word_embeddings", "norm_eps": "rms_norm_eps"}
_COMMON = "conv_L_cache conv_bias layer_types"
# Sizes that published files say twice, and what transformers never reads: how weights were made, and what all of them have.
_REPEATED = {"block_dim": "hidden_size", "conv_dim": "hidden_size", "conv_dim_out": "hidden_size"} | {
    "num_heads": "num_attention_heads"
}
_UNREAD = "block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_use_xavier_init"
_ONLY = {"block_use_swiglu": True, "use_pos_enc": True}
_WIDTHS = "block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of"
_DENSE_KEYS = f"block_norm_eps full_attn_idxs {_WIDTHS} {_UNREAD} {' '.join((*_REPEATED, *_ONLY))}"
_MIXTURE_KEYS = "moe_intermediate_size norm_topk_prob num_dense_layers num_experts routed_scaling_factor use_expert_bias"
ADDED_SUM = 1e-6  # to the weights of a token's experts, before they are divided by their sum


@dataclass(frozen=True)
class Lfm2Config(ModelConfig):
    """conv_bias: whether the convolutions and the projections around them have biases."""

    conv_bias: bool = False


def parse_lfm2(raw: dict[str, Any], where: str) -> Lfm2Config:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    if "rms_norm_eps" in raw:
        refuse_unknown({"rms_norm_eps": raw["rms_norm_eps"]}, frozenset(), where)  # the family's name of it is norm_eps
    is_dense = raw["model_type"] == DENSE
    said = by_own_names(raw, _OTHER_NAMES, where)
    if said.get("tie_word_embeddings") is None:
        said["tie_word_embeddings"] = True
    if is_dense:
        said["intermediate_size"] = _width(said, where)
    config = read_decoder(
        said, where, f"{_COMMON} {_DENSE_KEYS if is_dense else _MIXTURE_KEYS}", eps=1e-5, positions=128000, theta=1e6
    )
    if is_dense:
        only(said, where, **_ONLY)
        for key, other in _REPEATED.items():
            expect_repeated(said, key, whole(said, other, where), other, where)
        only(said, where, block_norm_eps=config.rms_norm_eps)
    taps, biased = whole(said, "conv_L_cache", where, 3, least=2), flag(said, "conv_bias", where)
    config = replace(
        config, qk_norm=True, recurrent=RecurrentConfig(taps, width=config.hidden_size),
        layer_kinds=_layer_kinds(said, config.num_layers, where),
        output_names=OutputNames("self_attn.out_proj", "feed_forward.w2", "conv.out_proj"),
    )  # fmt: skip
    if not is_dense:
        config = _with_experts(config, said, where)
    return Lfm2Config(**{each.name: getattr(config, each.name) for each in fields(ModelConfig)}, conv_bias=biased)


def _width(said: dict[str, Any], where: str) -> int:
    """Of the MLPs: block_ff_dim, or intermediate_size where that is absent; adjusted, two thirds of it, and rounded up."""
    key = "block_ff_dim" if said.get("block_ff_dim") is not None else "intermediate_size"
    width = whole(said, key, where, 12288)
    if not flag(said, "block_auto_adjust_ff_dim", where, True):
        return width
    step = whole(said, "block_multiple_of", where, 256)
    width = int(number(said, "block_ffn_dim_multiplier", where, 1.0) * int(2 * width / 3))
    if not width:
        raise ValueError(f"{where}: {key} must leave a width when it is adjusted, got {said.get(key)}")
    return ceil(width / step) * step


def _layer_kinds(said: dict[str, Any], count: int, where: str) -> tuple[LayerKind, ...]:
    """By layer_types, or else by the numbers of the layers of attention."""
    types = said.get("layer_types")
    if types is None and said["model_type"] == DENSE:
        if said.get("full_attn_idxs") is None:
            raise NotComputedHere(
                f"{where} lacks layer_types and full_attn_idxs: transformers takes all layers for attention then; expected "
                "layers of both kinds"
            )
        attend = layer_numbers(said, "full_attn_idxs", count, where)
        types = ["full_attention" if layer in attend else CONVOLUTION for layer in range(count)]
    if types is None:
        raise ValueError(f"{where} lacks layer_types")
    check_types(types, count, where, CONVOLUTION)
    if len(set(types)) == 1:
        raise NotComputedHere(f"{where}: layers must be of both kinds, by layer_types, got {count} of {types[0]}")
    return tuple(RECURRENT if kind == CONVOLUTION else FULL for kind in types)


def _with_experts(config: ModelConfig, said: dict[str, Any], where: str) -> ModelConfig:
    rule = RouterRule(
        whole(said, TOP_K, where, 4), "sigmoid", corrected=flag(said, "use_expert_bias", where, True),
        normed=flag(said, "norm_topk_prob", where, True), added_sum=ADDED_SUM,
        scaling=number(said, "routed_scaling_factor", where, 1.0),
    )  # fmt: skip
    experts = ExpertsConfig(
        whole(said, "num_experts", where, 32),
        whole(said, "moe_intermediate_size", where, 1792),
        rule,
        dense_layers=frozenset(range(whole(said, "num_dense_layers", where, 2, least=0))),
    )
    return with_experts(config, experts, where, "num_experts")
