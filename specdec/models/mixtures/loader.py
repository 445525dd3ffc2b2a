"""The families of this room, by model_type: how each is read, and what its checkpoints call the tensors of its mixtures.

A layer of theirs has ordinary heads.  DeepSeek's and gpt-oss's mixtures are of the same frame, under attention of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.models.causal_lm import PreNormLayer
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import expect_attention, fill_attention, fill_mlp
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, SelfAttention
from specdec.models.mixtures.families import dots1, ernie4_5_moe, glm4_moe, hy_v3, minimax_m2, mixtral, olmoe, qwen_moe
from specdec.models.mixtures.fill import MixtureNames, expect_mixture, fill_mixture
from specdec.models.mixtures.layer import MixtureOfExperts, mlp_of
from specdec.models.mixtures.wide_norms import WideNormAttention, fill_wide_norms


def mixture_layer(config: ModelConfig, index: int) -> PreNormLayer:
    """The layer of that number, or the MTP layer of that number."""
    wide = config.norms_all_heads
    attention = WideNormAttention(config) if wide else SelfAttention(config, config.hidden_size)
    return PreNormLayer(config, attention, mlp_of(config, index))


def _family(parse: Callable[[dict[str, Any], str], ModelConfig], *tables: MixtureNames) -> Family:
    """tables: of names, as of `fill_mixture`."""

    def expect(checkpoint: Checkpoint, config: ModelConfig) -> None:
        expect_attention(checkpoint, config)
        expect_mixture(checkpoint, config, *tables)

    def fill(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
        fill_mixture(moe, checkpoint, prefix, *tables)

    heads = {WideNormAttention: fill_wide_norms, SelfAttention: fill_attention}
    return Family(parse, mixture_layer, expect, {**heads, MLP: fill_mlp, MixtureOfExperts: fill})


FAMILIES = {
    "qwen2_moe": _family(qwen_moe.parse_qwen2_moe, qwen_moe.NAMES),
    "qwen3_moe": _family(qwen_moe.parse_qwen3_moe, qwen_moe.NAMES),
    "mixtral": _family(mixtral.parse_mixtral, mixtral.NAMES, mixtral.FUSED),
    "glm4_moe": _family(glm4_moe.parse_glm4_moe, glm4_moe.NAMES),
    "dots1": _family(dots1.parse_dots1, dots1.NAMES),
    "ernie4_5_moe": _family(ernie4_5_moe.parse_ernie4_5_moe, ernie4_5_moe.NAMES),
    "olmoe": _family(olmoe.parse_olmoe, olmoe.NAMES),
    "minimax_m2": _family(minimax_m2.parse_minimax_m2, minimax_m2.NAMES, minimax_m2.FUSED),
    "hy_v3": _family(hy_v3.parse_hy_v3, hy_v3.NAMES, hy_v3.FUSED),
}
