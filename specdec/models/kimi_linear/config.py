"""The config.json of Kimi Linear, read strictly.

Three of four layers keep a state in place of keys (KDA); the fourth keeps latents, and turns nothing with positions.  Published
files have names of their own, and count layers from 1; transformers 5 saves both its names and theirs.  This module knows no
weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.attention.kinds import FULL, RECURRENT, LayerKind
from specdec.models.checkpoints.config_values import MAX_LAYERS, NotComputedHere, flag, mapping, whole
from specdec.models.config import NO_ROPE, OutputNames, RopeConfig
from specdec.models.deepseek.config import parse_experts
from specdec.models.keys.names import by_own_names, expect_repeated, telling_names
from specdec.models.keys.shared import MTP_COUNT, check_types, refuse_unknown, require, shared_values
from specdec.models.latent.config import LatentConfig
from specdec.models.mixtures.keys import dense_by_types, only
from specdec.models.recurrent.sizes import RecurrentConfig, RuleSizes
from specdec.models.schemes.config import quantization_of
from specdec.models.yarn import parse_rope_with_yarn

LINEAR = "linear_attention"  # in a config's layer_types
LISTS = "full_attn_layers", "kda_layers"  # in linear_attn_config, of numbers that count from 1
OTHER_NAMES = {
    "num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
    "model_max_length": "max_position_embeddings",
}  # fmt: skip
_REQUIRED = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim"
).split()
# By the names of linear_attn_config, those beside it, and what transformers means by neither.
_SIZES = {"head_dim": ("linear_head_dim", 128), "num_heads": ("linear_num_heads", 32)} | {
    "short_conv_kernel_size": ("linear_conv_kernel_dim", 4)
}
_UNSAID = {
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "n_shared_experts": 1, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
}  # fmt: skip
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mla_use_nope": True, "moe_layer_freq": 1, MTP_COUNT: 0} | {
    "moe_router_activation_func": "sigmoid"
}
_KNOWN = frozenset(
    "architectures attention_dropout auto_map bos_token_id compression_config do_sample dtype eos_token_id "
    "first_k_dense_replace head_dim initializer_range layer_types linear_attn_config max_position_embeddings mlp_layer_types "
    "model_type norm_topk_prob num_key_value_heads output_router_logits pad_token_id pretraining_tp q_lora_rank qk_head_dim "
    "quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings torch_dtype "
    "transformers_version use_cache use_grouped_topk".split()
) | {*_REQUIRED, *_UNSAID, *_ONLY, *(name for name, _ in _SIZES.values())}


@telling_names(OTHER_NAMES)
def parse_kimi_linear(raw: dict[str, Any], where: str) -> LatentConfig:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    said = by_own_names(raw, OTHER_NAMES, where)
    if "moe_renormalize" in raw:
        said.setdefault("norm_topk_prob", None)  # null, which transformers takes for false, is no absence
    said = {**said, **{key: value for key, value in _UNSAID.items() if said.get(key) is None}}
    refuse_unknown(said, _KNOWN, where)
    require(said, _REQUIRED, where)
    only(said, where, **_ONLY)
    hidden, intermediate, layers, heads, vocab_size, rank, nope, rope_dim, value = (
        whole(said, key, where, most=MAX_LAYERS if key == "num_hidden_layers" else 2**31 - 1) for key in _REQUIRED
    )
    expect_repeated(said, "num_key_value_heads", heads, "num_attention_heads", where)
    expect_repeated(said, "qk_head_dim", nope + rope_dim, "qk_nope_head_dim + qk_rope_head_dim", where)
    for key in ("head_dim", "pretraining_tp"):  # not read
        whole(said, key, where, 1)
    flag(said, "use_grouped_topk", where)  # topk_group says it
    parse_rope_with_yarn(said, where)  # nothing is turned, but a broken value is refused all the same
    if rope_dim % 2:
        raise ValueError(f"{where}: qk_rope_head_dim must be even, got {rope_dim}")
    if value > nope + rope_dim:
        raise ValueError(f"{where}: v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim, got {value}")
    inner = _linear_config(said, where)
    dense = _dense_layers(said, layers, where)
    sizes = _recurrent(said, inner, where)
    return LatentConfig(
        **shared_values(said, where, vocab_size, 1e-5, 1048576),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=rope_dim,
        rope=RopeConfig(kind=NO_ROPE),
        layer_kinds=_layer_kinds(said, inner, layers, where),
        recurrent=sizes,
        output_names=OutputNames(recurrent="self_attn.o_proj"),
        quantization=quantization_of(said, where),
        latent_rank=rank,
        q_rank=None if said.get("q_lora_rank") is None else whole(said, "q_lora_rank", where),
        nope_dim=nope,
        value_dim=value,
        interleaved=False,
        experts=replace(parse_experts(said, where), dense_layers=dense) if len(dense) < layers else None,
        has_experts=len(dense) < layers,
    )


def _linear_config(said: dict[str, Any], where: str) -> dict[str, Any]:
    inner = mapping(said, "linear_attn_config", where)
    refuse_unknown(inner, frozenset((*_SIZES, *LISTS)), f"{where}: linear_attn_config")
    return inner


def _recurrent(said: dict[str, Any], inner: dict[str, Any], where: str) -> RecurrentConfig:
    width, heads, taps = (
        whole(inner, key, f"{where}: linear_attn_config", whole(said, beside, where, unsaid), least=1 + (unsaid == 4))
        for key, (beside, unsaid) in _SIZES.items()
    )
    for (beside, _), size in zip(_SIZES.values(), (width, heads, taps), strict=True):
        expect_repeated(said, beside, size, "what linear_attn_config says", where)
    return RecurrentConfig(taps, RuleSizes(heads, heads, width, width, by_channel=True))


def _layer_kinds(said: dict[str, Any], inner: dict[str, Any], count: int, where: str) -> tuple[LayerKind, ...]:
    """By layer_types, and by the lists of linear_attn_config, which must agree where both are there."""
    types, listed = said.get("layer_types"), _listed(inner, count, where)
    if types is None and listed is None:
        raise NotComputedHere(f"{where} lacks layer_types, and in linear_attn_config {' and '.join(LISTS)}: one must be there")
    if types is not None:
        check_types(types, count, where, LINEAR)
    if types is not None and listed is not None and types != listed:
        raise NotComputedHere(
            f"{where}: layer_types must say what the lists of linear_attn_config say where both are there, got {types!r}"[:400]
            + "; nearest thing that works: either of the two alone"
        )
    kinds = listed if types is None else types
    assert kinds is not None
    if len(set(kinds)) == 1:
        raise NotComputedHere(f"{where}: layers must be of both kinds, got {count} of {kinds[0]}")
    return tuple(RECURRENT if kind == LINEAR else FULL for kind in kinds)


def _listed(inner: dict[str, Any], count: int, where: str) -> list[str] | None:
    """layer_types by the two lists; None: they are not there."""
    if all(inner.get(key) is None for key in LISTS):
        return None
    attend, recurrent = (inner.get(key) for key in LISTS)
    both = [*attend, *recurrent] if isinstance(attend, list) and isinstance(recurrent, list) else []
    if any(type(each) is not int for each in both) or sorted(both) != list(range(1, count + 1)):
        raise ValueError(
            f"{where}: linear_attn_config: {' and '.join(LISTS)} must together hold each number from 1 to num_hidden_layers "
            f"{count} once, got {attend!r} and {recurrent!r}"[:500]
        )
    assert isinstance(attend, list)
    return ["full_attention" if layer + 1 in attend else LINEAR for layer in range(count)]


def _dense_layers(said: dict[str, Any], count: int, where: str) -> frozenset[int]:
    """By mlp_layer_types, and by first_k_dense_replace, which must agree where both are there."""
    first = min(count, whole(said, "first_k_dense_replace", where, 1, least=0))
    dense = dense_by_types(said, "mlp_layer_types", count, where, unsaid=range(first))
    if said.get("first_k_dense_replace") is not None and dense != frozenset(range(first)):
        raise NotComputedHere(
            f"{where}: first_k_dense_replace must say what mlp_layer_types says where both are there, got {first}; nearest "
            "thing that works: mlp_layer_types alone"
        )
    return dense
