"""The config.json of gpt-oss models, whose experts are stored in mxfp4 or unquantised, read strictly.  Knows no weights."""

from __future__ import annotations

from typing import Any

from specdec.attention.kinds import LayerKind
from specdec.models.checkpoints.config_values import MAX_LAYERS, flag, number, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.names import by_own_names, expect_repeated
from specdec.models.keys.rope import rope_keys
from specdec.models.keys.shared import (
    NATIVE_KEYS,
    WINDOWED,
    check_heads,
    check_types,
    refuse_unknown,
    require,
    shared_values,
    sliding_window,
    windowed_kinds,
)
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.schemes.config import KEYS, scheme_of
from specdec.models.schemes.formats import MX_BLOCK, ExpertBlocks
from specdec.models.schemes.rules import Quantization, Rule, only, refuse_keys
from specdec.models.yarn import parse_rope_with_yarn
from specdec.ops.products.experts import SwiGLU
from specdec.ops.products.routing import RouterRule

METHOD = "mxfp4"  # the quant_method of its own checkpoints


def parse_gpt_oss(raw: dict[str, Any], where: str) -> ModelConfig:
    """ValueError names `where` (the file), the key, what was expected and what was found."""
    raw = by_own_names(raw, {"num_experts": "num_local_experts"}, where)
    refuse_unknown(raw, _KNOWN, where)
    require(raw, _REQUIRED, where)
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act must be 'silu', got {raw['hidden_act']!r}")
    hidden, width, heads, kv_heads, head_dim, vocab_size, count, top_k = (whole(raw, key, where) for key in _SIZES)
    layers = whole(raw, "num_hidden_layers", where, most=MAX_LAYERS)
    check_heads(heads, kv_heads, where)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim must be even for rotary embeddings, got {head_dim}")
    scheme = _quantization(raw, count, where)
    for key, size in (("hidden_size", hidden), ("intermediate_size", width)):
        if scheme is not None and size % MX_BLOCK:
            raise ValueError(f"{where}: {key} must be a multiple of {MX_BLOCK}, the columns of a scale in mxfp4, got {size}")
    if top_k > count:
        raise ValueError(f"{where}: num_experts_per_tok must be at most num_local_experts {count}, got {top_k}")
    expect_repeated(raw, "experts_per_token", top_k, "num_experts_per_tok", where)
    rope = rope_keys(raw, where)
    if not rope or (rope.get("rope_theta") is None and raw.get("rope_theta") is None):
        raise ValueError(f"{where} lacks rope_theta, or rope_parameters (rope_scaling), without which positions mean nothing")
    biased = flag(raw, "attention_bias", where, True)
    return ModelConfig(
        **shared_values(raw, where, vocab_size, eps=1e-5, positions=131072),
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=parse_rope_with_yarn(raw, where),
        qkv_bias=biased,
        o_bias=biased,
        layer_kinds=_layer_kinds(raw, layers, where),
        has_sinks=True,
        has_experts=True,
        quantization=scheme,
        experts=ExpertsConfig(
            count,
            width,
            RouterRule(top_k, "softmax of chosen", biased=True),
            activation=SwiGLU(number(raw, "swiglu_alpha", where, 1.702), number(raw, "swiglu_limit", where, 7.0)),
            biased=True,
            kept_float32=True,
        ),
    )


def _quantization(raw: dict[str, Any], count: int, where: str) -> Quantization | None:
    """Experts in mxfp4, all else unquantised: nothing of the scheme is free."""
    if all(raw.get(key) is None for key in KEYS):
        return None
    scheme, where = scheme_of(raw, where)
    if scheme.get("quant_method") != METHOD:
        raise ValueError(
            f"{where}: quant_method must be {METHOD!r} for gpt-oss, as in its own checkpoints, got "
            f"{scheme.get('quant_method')!r}; nearest thing that works: openai's checkpoint, or one in bfloat16"
        )
    refuse_keys(scheme, "quant_method modules_to_not_convert dequantize", where)
    only(scheme, "dequantize", where, False)
    kept = [] if scheme.get("modules_to_not_convert") is None else scheme["modules_to_not_convert"]
    if not isinstance(kept, list) or any(not isinstance(name, str) or "expert" in name for name in kept):
        raise ValueError(f"{where}: modules_to_not_convert must be null or a list of names without experts, got {kept!r}")
    experts = Rule("regex", r".*\.mlp\.experts\.(gate_up|down)_proj$")
    return Quantization(METHOD, ((experts, ExpertBlocks(count)),))


def _layer_kinds(raw: dict[str, Any], layers: int, where: str) -> tuple[LayerKind, ...]:
    """Windows in every other layer, the first among them, where layer_types says nothing."""
    types = raw.get("layer_types")
    if types is None:
        types = [WINDOWED if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    check_types(types, layers, where)
    window = sliding_window({"sliding_window": 128, **raw}, where)
    return windowed_kinds(types, window, raw, where)


_SIZES = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size num_local_experts "
    "num_experts_per_tok"
).split()
_REQUIRED = (*_SIZES, "num_hidden_layers")
# Read above, or known not to change what a forward pass computes.
_KNOWN = NATIVE_KEYS | frozenset(
    "experts_per_token initial_context_length num_experts_per_tok num_local_experts output_router_logits "
    "router_aux_loss_coef swiglu_alpha swiglu_limit".split()
)
