"""The config.json of Nemotron-H and Nemotron 3, read strictly.

A layer is one block: Mamba-2, attention that knows no positions, an MLP without a gate, or a mixture of such.  What a key that
is absent means is what transformers' class means.  One thing is as in the published code, and not as there: steps have no
floor.  transformers 5.23 makes those of prompts at least time_step_min, but not those of single tokens.  This module knows no
weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.attention.kinds import FULL, RECURRENT, LayerKind
from specdec.models.checkpoints.config_values import DTYPE_NAMES, MAX_LAYERS, NotComputedHere, flag, number, text, whole
from specdec.models.config import NO_ROPE, OutputNames, RopeConfig
from specdec.models.keys.names import by_own_names, expect_repeated, telling_names, with_unsaid
from specdec.models.keys.shared import MTP_COUNT
from specdec.models.mamba.config import LIMIT, MambaConfig, refuse_limits, sizes_of
from specdec.models.mixtures.keys import TOP_K, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.recurrent.sizes import RecurrentConfig
from specdec.ops.products.experts import Relu2
from specdec.ops.products.routing import RouterRule

MAMBA, ATTENTION, MIXTURE, MLP_BLOCK = "linear_attention", "full_attention", "moe", "mlp"
_WORDS = {"mamba": MAMBA, "attention": ATTENTION}  # other names of these
_LETTERS = {"M": MAMBA, "*": ATTENTION, "E": MIXTURE, "-": MLP_BLOCK}
_UNSAID = [MAMBA, MIXTURE, ATTENTION, MLP_BLOCK]
TYPES, PATTERN = "layers_block_type", "hybrid_override_pattern"
MTP_TYPES, MTP_PATTERN = f"mtp_{TYPES}", f"mtp_{PATTERN}"
MTP_WORDS = [ATTENTION, MIXTURE]
_OTHER_NAMES = {
    "layer_types": TYPES, "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand", "mamba_dt_min": "time_step_min", "mamba_dt_max": "time_step_max", "mamba_dt_limit": LIMIT,
    "mamba_dt_init_floor": "time_step_floor", "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size",
}  # fmt: skip
# Read here, or of training, kernels and MTP alone; expand is passed over by transformers, too.
_KEYS = (
    f"{TYPES} {PATTERN} {LIMIT} {MTP_COUNT} attention_bias chunk_size conv_kernel expand hidden_dropout intermediate_size "
    "layer_norm_epsilon mamba_head_dim mamba_hidden_act mamba_num_heads mamba_proj_bias mamba_ssm_cache_dtype mlp_bias "
    "mlp_hidden_act moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap "
    "mtp_hybrid_override_pattern mtp_layers_block_type n_group n_groups n_routed_experts n_shared_experts norm_eps "
    "norm_topk_prob num_logits_to_keep rescale_prenorm_residual residual_in_fp32 routed_scaling_factor sliding_window "
    "ssm_state_size time_step_floor time_step_max time_step_min topk_group use_bias use_conv_bias use_mamba_kernels"
)
# What transformers' class means by sizes that a config does not say.
_SIZES = {"conv_kernel": 4, "n_groups": 8, "mamba_num_heads": 128, "ssm_state_size": 128, "mamba_head_dim": 64}
_DECODER = {"hidden_size": 4096, "vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 21504}  # fmt: skip
_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, TOP_K: 2}
_FIXED = dict(attention_bias=False, mamba_proj_bias=False, mlp_bias=False, residual_in_fp32=False, n_shared_experts=1,
              tie_word_embeddings=False, sliding_window=None, mlp_hidden_act="relu2", mamba_hidden_act="silu")  # fmt: skip


@telling_names(_OTHER_NAMES)
def parse_nemotron_h(raw: dict[str, Any], where: str) -> MambaConfig:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    raw = by_own_names(raw, _OTHER_NAMES, where)
    only(raw, where, **_FIXED)
    refuse_limits(raw, where)
    _expect_unread(raw, where)
    types = _types(raw, where)
    expect_repeated(raw, "num_hidden_layers", len(types), f"as many as {TYPES} or {PATTERN} has", where)
    said = with_unsaid(raw, _DECODER)
    eps = number(raw, "layer_norm_epsilon", where, 1e-5)
    said |= {"num_hidden_layers": len(types), "rms_norm_eps": eps}
    if any(number(raw, key, where, eps) != eps for key in ("norm_eps", "rms_norm_eps")):
        raise NotComputedHere(
            f"{where}: layer_norm_epsilon {eps:g} is the epsilon of all norms, but norm_eps or rms_norm_eps says another; "
            "nearest thing that works: layer_norm_epsilon alone"
        )
    base = read_decoder(said, where, _KEYS, positions=4096, head_dim=128)
    biased = flag(raw, "use_bias", where)
    quantization = base.quantization and replace(base.quantization, names=(("backbone.", "model."),))
    own = {
        "quantization": quantization, "rope": RopeConfig(kind=NO_ROPE), "one_block": True, "recurrent": _recurrent(raw, where),
        "output_names": OutputNames("mixer.o_proj", "mixer.down_proj", "mixer.out_proj"),
        "layer_kinds": tuple(map(_kind_of, types)), "conv_bias": flag(raw, "use_conv_bias", where, True), "in_bias": biased,
        "out_bias": biased, "mtp_layers": whole(raw, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS),
    }  # fmt: skip
    config = MambaConfig(**{**vars(base), **own})
    return config if MIXTURE not in types else _with_experts(config, types, raw, where)


def mtp_words(raw: dict[str, Any], where: str) -> list[str]:
    """What the blocks of an MTP layer are, one after the other."""
    return _said_types(raw, where, MTP_TYPES, MTP_PATTERN) or MTP_WORDS


def _expect_unread(raw: dict[str, Any], where: str) -> None:
    """ValueError for values of another kind of keys that change nothing: states are float32 whatever their dtype is to be."""
    whole(raw, "chunk_size", where, 128)
    whole(raw, "expand", where, 2)
    if (states := text(raw, "mamba_ssm_cache_dtype", where)) not in (None, *DTYPE_NAMES):
        raise ValueError(f"{where}: mamba_ssm_cache_dtype must be null or one of {', '.join(DTYPE_NAMES)}, got {states!r}")
    for key in ("time_step_min", "time_step_max", "time_step_floor"):
        number(raw, key, where, 0.0, or_zero=True)
    for key in ("moe_shared_expert_overlap", "rescale_prenorm_residual", "use_mamba_kernels"):
        flag(raw, key, where, True)


def _types(raw: dict[str, Any], where: str) -> list[str]:
    """What each layer is."""
    types = _said_types(raw, where, TYPES, PATTERN) or _UNSAID
    if ATTENTION not in types or MAMBA not in types:
        said = f"{TYPES} (or {PATTERN}) must have layers of {ATTENTION} and of {MAMBA}"
        raise NotComputedHere(f"{where}: {said}, got {types}"[:500])
    if len(types) > MAX_LAYERS:
        raise ValueError(f"{where}: {TYPES} must have at most {MAX_LAYERS} layers, got {len(types)}")
    return types


def _said_types(raw: dict[str, Any], where: str, listing: str, pattern: str) -> list[str]:
    """What blocks are, by a list of words, or by a letter each; empty if neither is there.  listing, pattern: the keys."""
    listed, letters = raw.get(listing), text(raw, pattern, where)
    for key, value in ((listing, listed), (pattern, letters)):
        if value in ([], ""):  # which would be taken for a key that is absent
            raise ValueError(f"{where}: {key} must name a block or more, or be absent, got {value!r}")
    if letters is not None and (unknown := [letter for letter in letters if letter not in _LETTERS]):
        raise NotComputedHere(f"{where}: {pattern} must be of the letters {', '.join(_LETTERS)}, got {unknown[0]!r}")
    spelled = None if letters is None else [_LETTERS[letter] for letter in letters]
    if listed is not None and not isinstance(listed, list):
        raise ValueError(f"{where}: {listing} must be null or a list of {', '.join(_UNSAID)}, got {listed!r}"[:500])
    types = None if listed is None else [_WORDS.get(each, each) if isinstance(each, str) else each for each in listed]
    if types is not None and spelled is not None and types != spelled:
        said = f"{listing} and {pattern} must say the same where both are there"
        raise ValueError(f"{where}: {said}, got {listed} and {letters!r}; nearest thing that works: {listing} alone"[:500])
    types = types or spelled or []
    if unknown := [each for each in types if each not in _UNSAID]:
        raise NotComputedHere(f"{where}: {listing} must be a list of {', '.join(_UNSAID)}, got {unknown[0]!r}"[:500])
    return types


def _kind_of(word: str) -> LayerKind:
    return {MAMBA: RECURRENT, ATTENTION: FULL}.get(word, LayerKind(attends=False))


def _recurrent(raw: dict[str, Any], where: str) -> RecurrentConfig:
    taps, groups, heads, state, width = (whole(raw, key, where, size) for key, size in _SIZES.items())
    return sizes_of(where, taps, groups, heads, state, width, ("mamba_num_heads", "n_groups", "conv_kernel"))


def _with_experts(config: MambaConfig, types: list[str], raw: dict[str, Any], where: str) -> MambaConfig:
    count, width, shared, top_k = (whole(raw, key, where, size) for key, size in _EXPERTS.items())
    groups, top_groups = (whole(raw, key, where, 1) for key in ("n_group", "topk_group"))
    if count % groups or top_groups > groups:
        raise ValueError(
            f"{where}: n_group must divide n_routed_experts {count}, and topk_group be at most n_group, "
            f"got {groups}, {top_groups}"
        )
    if groups > 1 and (count // groups < 2 or top_k > top_groups * (count // groups)):
        raise ValueError(
            f"{where}: n_group {groups} must leave two experts in each group, and topk_group {top_groups} of them at least "
            f"{TOP_K} {top_k} experts, got {count // groups} in each"
        )
    rule = RouterRule(
        top_k, "sigmoid", corrected=True, groups=groups if groups > 1 else None, top_groups=top_groups if groups > 1 else None,
        group_best=2, normed=flag(raw, "norm_topk_prob", where, True),
        scaling=number(raw, "routed_scaling_factor", where, 1.0),
    )  # fmt: skip
    latents = 0 if raw.get("moe_latent_size") is None else whole(raw, "moe_latent_size", where)
    dense = frozenset(layer for layer, word in enumerate(types) if word != MIXTURE)
    experts = ExpertsConfig(
        count, width, rule, Relu2(), shared_size=shared, latent_size=latents, dense_layers=dense,
    )  # fmt: skip
    made = with_experts(config, experts, where, "n_routed_experts")
    assert isinstance(made, MambaConfig)
    return made
