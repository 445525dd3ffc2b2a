"""The config.json of DeepSeek V2, V3, V3.2, GLM-5 and GLM-4.7-Flash (multi-head latent attention), read strictly.

Knows no weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import MAX_LAYERS, flag, number, whole
from specdec.models.deepseek.indexer_config import REQUIRED, SHARING, SPARSE, first_dense_layers, parse_indexer
from specdec.models.keys.names import by_own_names, expect_repeated
from specdec.models.keys.shared import MTP_COUNT, refuse_unknown, require, shared_values
from specdec.models.latent.config import LatentConfig
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.schemes.config import quantization_of
from specdec.models.schemes.rules import Quantization, Rule
from specdec.models.yarn import parse_rope_with_yarn
from specdec.ops.products.routing import RouterRule

LITE = "glm4_moe_lite"  # GLM-4.7-Flash


def said(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The config by the names that are read here, with what a family means by not saying it."""
    return _UNSAID.get(raw["model_type"], {}) | by_own_names(raw, OTHER_NAMES, where)


def parse_deepseek(raw: dict[str, Any], where: str) -> LatentConfig:
    """ValueError names `where` (the file), the key, what was expected and what was found."""
    family, raw = raw["model_type"], said(raw, where)
    refuse_unknown(raw, _KNOWN | _KNOWN_BY.get(family, frozenset()), where)
    for key, allowed in _ONLY[family].items():
        if raw.get(key) not in (None, *allowed):
            raise ValueError(f"{where}: {key} must be {' or '.join(map(repr, allowed))}, got {raw[key]!r}")
    missing = [key for key in _required(raw) if raw.get(key) is None]
    if missing or "q_lora_rank" not in raw:  # which may be null where attention is dense
        raise ValueError(f"{where} lacks {', '.join(missing or ['q_lora_rank'])}")
    hidden, intermediate, heads, vocab_size, rank, nope, rope_dim, value = (whole(raw, key, where) for key in _SIZES)
    layers = whole(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    for key in _UNREAD_SIZES:
        whole(raw, key, where, 1)
    if family in ("deepseek_v3", LITE):  # transformers' other classes don't read it, and GLM-5.2 says 192
        expect_repeated(raw, "head_dim", rope_dim, "qk_rope_head_dim", where)
    expect_repeated(raw, "qk_head_dim", nope + rope_dim, "qk_nope_head_dim + qk_rope_head_dim", where)
    expect_repeated(raw, "num_key_value_heads", heads, "num_attention_heads", where)
    is_sparse = family in SPARSE
    by_types = is_sparse or family == LITE
    if family == LITE and raw.get("mlp_layer_types") is None:
        raw = {"first_k_dense_replace": 1} | raw
    first_dense = first_dense_layers(raw, layers, where) if by_types else whole(raw, "first_k_dense_replace", where, least=0)
    if rope_dim % 2:
        raise ValueError(f"{where}: qk_rope_head_dim must be even for rotary embeddings, got {rope_dim}")
    if value > nope + rope_dim:
        raise ValueError(f"{where}: v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim, got {value}")
    bias = flag(raw, "attention_bias", where)
    return LatentConfig(
        **shared_values(raw, where, vocab_size, 1e-5 if family in ("glm_moe_dsa", LITE) else 1e-6, _POSITIONS[family]),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=rope_dim,
        rope=parse_rope_with_yarn(raw, where),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(raw, "mlp_bias", where),
        quantization=_quantization(raw, where),
        latent_rank=rank,
        q_rank=None if raw["q_lora_rank"] is None else whole(raw, "q_lora_rank", where),
        nope_dim=nope,
        value_dim=value,
        interleaved=family == "deepseek_v2" or is_sparse or flag(raw, "rope_interleave", where, True),
        experts=parse_experts(raw, where, first_dense) if first_dense < layers else None,
        has_experts=first_dense < layers,
        mtp_layers=whole(raw, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS),
        indexer=parse_indexer(raw, layers, rope_dim, where) if is_sparse else None,
    )


def _quantization(raw: dict[str, Any], where: str) -> Quantization | None:
    """The checkpoint's weight scheme.  The weights of an indexer's heads are in it only where tensors say so.

    DeepSeek V3.2's own fp8 checkpoints store them unquantised, and name them nowhere.
    """
    scheme = quantization_of(raw, where)
    if scheme is None:
        return None
    return replace(scheme, optional=(*scheme.optional, Rule("wildcard", "*.indexer.weights_proj")))


def _required(raw: dict[str, Any]) -> tuple[str, ...]:
    """The keys without which a config of that model_type is refused."""
    family = raw["model_type"]
    is_known = family == LITE or (raw.get("mlp_layer_types") is not None and family in BY_TYPES)  # LITE: one layer unsaid
    first = () if is_known else ("first_k_dense_replace",)
    return (*_SIZES, "num_hidden_layers", *first, *(("q_lora_rank", *REQUIRED) if family in SPARSE else ()))


def parse_experts(raw: dict[str, Any], where: str, first_dense: int = 0) -> ExpertsConfig:
    """The mixture of DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), and of others whose configs have the same keys.

    first_dense: layers before the first with experts.
    """
    is_v3 = raw["model_type"] != "deepseek_v2"  # V3, or a model with the same experts
    grouped = is_v3 or raw.get("topk_method") == "group_limited_greedy"
    needed = [*_EXPERTS, *(("n_group", "topk_group") if grouped else ())]
    require(raw, needed, where)
    count, top_k, intermediate, shared = (whole(raw, key, where) for key in _EXPERTS)
    groups, top_groups = (whole(raw, key, where) if grouped else None for key in ("n_group", "topk_group"))
    if top_k > count:
        raise ValueError(f"{where}: num_experts_per_tok must be at most n_routed_experts {count}, got {top_k}")
    if groups and top_groups and (count % groups or top_groups > groups or top_groups * (count // groups) < top_k):
        raise ValueError(
            f"{where}: n_routed_experts must be a multiple of n_group, and topk_group groups must hold num_experts_per_tok "
            f"experts; got {count} experts in {groups} groups, {top_k} of {top_groups}"
        )
    if is_v3 and count == groups:
        raise ValueError(f"{where}: n_group must leave two experts a group, whose best two rank it, got {groups} of {count}")
    return ExpertsConfig(
        count,
        intermediate,
        RouterRule(
            top_k,
            "sigmoid" if is_v3 else "softmax",
            corrected=is_v3,
            groups=groups,
            top_groups=top_groups,
            group_best=2 if is_v3 else 1,
            normed=is_v3 and flag(raw, "norm_topk_prob", where, True),
            scaling=number(raw, "routed_scaling_factor", where, 2.5 if is_v3 else 1.0),
        ),
        shared_size=shared * intermediate,
        dense_layers=frozenset(range(first_dense)),
    )


_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
_SIZES = (
    "hidden_size intermediate_size num_attention_heads vocab_size kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
).split()
_UNREAD_SIZES = ("ep_size", "head_dim", "moe_layer_freq", "pretraining_tp")
OTHER_NAMES = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts", "num_mtp_layers": MTP_COUNT}
BY_TYPES = (*SPARSE, LITE)  # whose mlp_layer_types are read
# transformers' defaults
_POSITIONS = {"deepseek_v2": 2048, "deepseek_v3": 4096, "deepseek_v32": 163840, "glm_moe_dsa": 202752, LITE: 202752}
_UNSAID = {LITE: {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}}
_V3_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "mlp_bias": (False,),
}
_SPARSE_ONLY = {**_V3_ONLY, "rope_interleave": (True,), "moe_router_dtype": ("float32",)}
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {  # the values that mean what we compute, besides null
    "deepseek_v2": {
        "hidden_act": ("silu",),
        "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),  # transformers ignores this key, DeepSeek's own code obeys it
        "num_nextn_predict_layers": (0,),
    },
    "deepseek_v3": _V3_ONLY,
    LITE: _V3_ONLY,
    **{family: _SPARSE_ONLY for family in SPARSE},
}
# Read above, or known not to change what a forward pass computes.
_KNOWN = frozenset(
    "architectures attention_bias attention_dropout auto_map aux_loss_alpha bos_token_id do_sample dtype eos_token_id ep_size "
    "first_k_dense_replace head_dim hidden_act hidden_size initializer_range intermediate_size kv_lora_rank "
    "max_position_embeddings mlp_bias model_type moe_intermediate_size moe_layer_freq n_group n_routed_experts "
    "n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads "
    "num_nextn_predict_layers output_router_logits pad_token_id pretraining_tp q_lora_rank qk_head_dim qk_nope_head_dim "
    "qk_rope_head_dim quantization_config return_dict rms_norm_eps rope_interleave rope_parameters rope_scaling rope_theta "
    "routed_scaling_factor scoring_func seq_aux temperature tie_word_embeddings tokenizer_class top_k top_p topk_group "
    "topk_method torch_dtype transformers_version use_cache v_head_dim vocab_size".split()
)
_SPARSE_KEYS = frozenset("indexer_rope_interleave layer_types mlp_layer_types moe_router_dtype".split()) | frozenset(REQUIRED)
_KNOWN_BY = {
    LITE: frozenset({"mlp_layer_types", "partial_rotary_factor"}),
    "deepseek_v32": _SPARSE_KEYS,
    "glm_moe_dsa": _SPARSE_KEYS | {*SHARING, "index_share_for_mtp_iteration"},
}
