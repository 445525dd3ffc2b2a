"""Names of native families and values of keys for the table of keys that say one thing, and its rows of hybrids.

The table stands in tests/models/checkpoints/test_two_keys_forward.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from toolkit.checkpoints.native import ABSENT

SAME = ""
LLAMAS, QWENS = ("llama", "mistral", "qwen2", "qwen3", "mimo", "diffllama"), ("qwen2", "qwen3", "mimo")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
LITE, GPT = ("glm4_moe_lite",), ("gpt_oss",)
BY_TYPES = (*SPARSE, *LITE)
DEEPSEEKS = ("deepseek_v2", "deepseek_v3", *BY_TYPES)
GLM4, QWEN_MOES = ("glm4_moe",), ("qwen2_moe", "qwen3_moe")
HY3, ERNIE, DOTS, MINIMAX = ("hy_v3",), ("ernie4_5_moe",), ("dots1",), ("minimax_m2",)
OLMOE = ("olmoe",)
MIXTURES = (*OLMOE, *QWEN_MOES, "mixtral", *HY3, *ERNIE, *DOTS, *MINIMAX, *GLM4)  # under ordinary heads
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # in wrappers they are read as outside
LFM2 = ("lfm2", "lfm2_moe")
GRANITE, NEMOTRON, FALCON, BAMBA = ("granitemoehybrid",), ("nemotron_h",), ("falcon_h1",), ("bamba",)
OLMO = ("olmo_hybrid",)
BY_STATES = (*HYBRIDS, *LFM2, *GRANITE, *NEMOTRON, *FALCON, *BAMBA, *OLMO)
ORDINARY = (*LLAMAS, *GPT, *MIXTURES, *BY_STATES)  # heads
KIMI = ("kimi_linear",)
LATENT = (*DEEPSEEKS, *KIMI)
ALL = (*ORDINARY, *LATENT)
TIED = ("qwen2", "mimo", *LFM2)  # the zoo's models whose output layer is the embeddings
UNTIED = tuple(family for family in ALL if family not in TIED)
NEVER_TIED, MAY_BE_TIED = NEMOTRON, tuple(family for family in UNTIED if family not in NEMOTRON)
DEFAULT, LINEAR = {"rope_type": "default", "rope_theta": 5000.0}, {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
WHOLE = DEFAULT | {"partial_rotary_factor": 1.0}
LLAMA3 = LINEAR | {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 8}
FULL, WINDOWED, LINEAR_WORD = "full_attention", "sliding_attention", "linear_attention"
KDA = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4}
LISTED = KDA | {"full_attn_layers": [2], "kda_layers": [1]}
ON = {"sliding_window": 8, "use_sliding_window": True}
MIXED = [WINDOWED, FULL]  # unlike max_window_layers, which windows the last layers
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


class KeyGroup(NamedTuple):
    """keys: those that say one thing.  rows: families, changes, and what comes of them.

    least: how many of the keys a family must know to have rows; 1: the other side is a size or a tensor that every model has.
    """

    keys: str
    rows: list[tuple[tuple[str, ...], dict[str, Any], str]]
    least: int = 2


OF_HYBRIDS = {
    "recurrent layers": KeyGroup(
        "layer_types full_attention_interval full_attn_idxs layers_block_type hybrid_override_pattern attn_layer_indices "
        "linear_attn_config",
        [
            (KIMI, {"layer_types": ABSENT, "linear_attn_config": LISTED}, SAME),
            (KIMI, {"layer_types": [LINEAR_WORD, FULL], "linear_attn_config": LISTED}, SAME),
            (KIMI, {"layer_types": [FULL, LINEAR_WORD], "linear_attn_config": LISTED}, "layer_types must say what the li"),
            (HYBRIDS, {"full_attention_interval": 1}, SAME),
            (HYBRIDS, {"layer_types": ABSENT, "full_attention_interval": 2}, SAME),
            (HYBRIDS, {"layer_types": ABSENT, "full_attention_interval": 3}, "layers must be of both kinds"),
            (("lfm2",), {"full_attn_idxs": [0]}, SAME),  # layer_types count
            (("lfm2",), {"layer_types": ABSENT, "full_attn_idxs": [1]}, SAME),
            (("lfm2",), {"layer_types": ABSENT}, "lacks layer_types and full_attn_idxs"),
            (("lfm2_moe",), {"full_attn_idxs": [1]}, "unknown config keys full_attn_idxs"),
            (GRANITE, {"layers_block_type": ["mamba", "attention"]}, "layers_block_type is another name of layer_types"),
            (GRANITE, {"layer_types": ABSENT, "layers_block_type": ["mamba", "attention"]}, SAME),
            (NEMOTRON, {"hybrid_override_pattern": "M*E"}, SAME),
            (NEMOTRON, {"hybrid_override_pattern": "*ME"}, "must say the same where both are there"),
            (NEMOTRON, {"layers_block_type": ABSENT, "hybrid_override_pattern": "M*E"}, SAME),
            (NEMOTRON, {"layers_block_type": ABSENT, "layer_types": [LINEAR_WORD, FULL, "moe"]}, SAME),
            (FALCON, {"attn_layer_indices": [0]}, "attn_layer_indices must be None"),
            (BAMBA, {"layer_types": [LINEAR_WORD, FULL]}, "unknown config keys layer_types"),
        ],
    ),
    "groups of Mamba-2": KeyGroup(
        "n_groups mamba_n_groups",
        [
            (NEMOTRON, {"mamba_n_groups": 4}, "mamba_n_groups is another name of n_groups, .* got 4 and 2"),
            (NEMOTRON, {"mamba_n_groups": 2, "n_groups": ABSENT}, SAME),
        ],
    ),
    "epsilon": KeyGroup(
        "rms_norm_eps norm_eps layer_norm_epsilon",
        [
            (NEMOTRON, {"norm_eps": 0.5}, "layer_norm_epsilon 1e-05 is the epsilon of all norms"),
            (NEMOTRON, {"rms_norm_eps": 0.5}, "layer_norm_epsilon 1e-05 is the epsilon of all norms"),
            (NEMOTRON, {"rms_norm_eps": 1e-5}, SAME),
            (NEMOTRON, {"norm_eps": 0.5, "layer_norm_epsilon": 0.5}, SAME),
        ],
    ),
    "sizes of recurrent layers": KeyGroup(
        "linear_attn_config linear_head_dim linear_num_heads linear_conv_kernel_dim",
        [
            (KIMI, {"linear_attn_config": KDA, "linear_head_dim": 16}, "linear_head_dim must be what linear_attn_config says"),
            (KIMI, {"linear_attn_config": KDA, "linear_num_heads": 8}, "linear_num_heads must be what linear_attn_config says"),
            (KIMI, {"linear_attn_config": KDA, "linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim must be what linear_att"),
            (KIMI, {"linear_attn_config": {}, "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}, SAME),
        ],
    ),
    "weights of a token's experts": KeyGroup(
        "norm_topk_prob moe_renormalize",
        [(KIMI, {"norm_topk_prob": False}, "moe_renormalize is another name of norm_topk_prob, .* got True and False")],
    ),
    "groups of experts": KeyGroup(
        "n_group num_expert_group",
        [(KIMI, {"n_group": 2}, "num_expert_group is another name of n_group, .* got 1 and 2")],
    ),
    "shared experts": KeyGroup(
        "n_shared_experts num_shared_experts",
        [(KIMI, {"n_shared_experts": 2}, "num_shared_experts is another name of n_shared_experts, .* got 1 and 2")],
    ),
    "width of MLPs": KeyGroup(
        "intermediate_size block_ff_dim block_auto_adjust_ff_dim block_multiple_of block_ffn_dim_multiplier",
        [
            (("lfm2",), {"block_ff_dim": 48, "intermediate_size": 32}, SAME),  # as in a published file
            (("lfm2",), {"block_auto_adjust_ff_dim": False, "intermediate_size": 32}, SAME),
            (("lfm2",), {"block_multiple_of": 16, "block_ffn_dim_multiplier": 0.6}, SAME),
            (("lfm2",), {"block_ff_dim": 96}, "w1.weight' must have shape .64, 32.*, got .32, 32.*intermediate_size"),
        ],
    ),
}
