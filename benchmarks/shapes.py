"""Shapes of published models, whose weights the scripts of these rooms draw at random, and small ones to try scripts with.

This file knows configs alone: no weights, no GPU, and nothing of what is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from specdec.models.causal_lm import MakeLayer, decoder_layer
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.gpt_oss.modules import gpt_oss_layer
from specdec.models.latent.attention import LatentLayer
from specdec.models.latent.config import LatentConfig
from specdec.models.mixtures.loader import mixture_layer
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.experts import SwiGLU
from specdec.ops.products.routing import RouterRule


class Shape(NamedTuple):
    """A model's config, and what makes its layers."""

    config: ModelConfig
    layer: MakeLayer = decoder_layer

    def of_layers(self, count: int) -> Shape:
        """Its first `count` layers; 0: all of them."""
        return self._replace(config=replace(self.config, num_layers=count or self.config.num_layers, **OF_LAYERS))

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Whose outputs an EAGLE-3 head reads, as published heads have it: near the beginning, in the middle, near the end."""
        count = self.config.num_layers
        return (1, count // 2 - 1, count - 4) if count > 6 else (0, count // 2, count - 1)

    @property
    def head_layer(self) -> ModelConfig | None:
        """The layer of an EAGLE-3 head where the model has no ordinary ones of its width; None: one like the model's."""
        return ordinary_layer(self.config) if isinstance(self.config, LatentConfig) else None


OF_LAYERS: dict[str, Any] = {"layer_kinds": (), "kv_source": ()}  # what a config works out again for another number of layers


def ordinary_layer(target: ModelConfig) -> ModelConfig:
    """The layer of a head as wide as the target."""
    return ModelConfig(
        family="llama", hidden_size=target.hidden_size, intermediate_size=4 * target.hidden_size, num_layers=1, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=target.vocab_size, rms_norm_eps=target.rms_norm_eps,
        max_position=target.max_position,
    )  # fmt: skip


TARGET = ModelConfig(
    family="llama", hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, rms_norm_eps=1e-5, rope=RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192), max_position=131072,
)  # fmt: skip
_QWEN = ModelConfig(
    family="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128,
    vocab_size=151936, rms_norm_eps=1e-6, rope=RopeConfig(1e6), max_position=40960, qk_norm=True, has_experts=True,
    experts=ExpertsConfig(128, 768, RouterRule(8, "softmax", normed=True)),
)  # fmt: skip
_OSS_EXPERTS = ExpertsConfig(
    32, 2880, RouterRule(4, "softmax of chosen", biased=True), activation=SwiGLU(1.702, 7.0), biased=True, kept_float32=True
)
_OSS = ModelConfig(
    family="gpt_oss", hidden_size=2880, intermediate_size=2880, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64,
    vocab_size=201088, rms_norm_eps=1e-5, rope=RopeConfig(150000.0), max_position=131072, qkv_bias=True, o_bias=True,
    has_sinks=True, has_experts=True, experts=_OSS_EXPERTS,
)  # fmt: skip
SHAPES = {
    "8B": Shape(TARGET),
    "70B": Shape(replace(TARGET, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, **OF_LAYERS)),
    "SmolLM2-135M": Shape(
        ModelConfig(
            family="llama", hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
            vocab_size=49152, rms_norm_eps=1e-5, rope=RopeConfig(1e5), max_position=8192, tie_embeddings=True,
        )
    ),
    "Qwen3-30B-A3B": Shape(_QWEN, mixture_layer),
    "Qwen3-235B-A22B": Shape(
        replace(
            _QWEN, hidden_size=4096, intermediate_size=12288, num_layers=94, num_heads=64, **OF_LAYERS,
            experts=ExpertsConfig(128, 1536, RouterRule(8, "softmax", normed=True)),
        ),
        mixture_layer,
    ),
    "gpt-oss-20b": Shape(_OSS, gpt_oss_layer),
    "gpt-oss-120b": Shape(replace(_OSS, num_layers=36, experts=replace(_OSS_EXPERTS, count=128), **OF_LAYERS), gpt_oss_layer),
    "GLM-4.7-Flash": Shape(
        LatentConfig(
            family="glm4_moe_lite", hidden_size=2048, intermediate_size=10240, num_layers=47, num_heads=20, num_kv_heads=20,
            head_dim=64, vocab_size=154880, rms_norm_eps=1e-5, rope=RopeConfig(1e6), max_position=202752, latent_rank=512,
            q_rank=768, nope_dim=192, value_dim=256, has_experts=True,
            experts=ExpertsConfig(
                64, 1536, RouterRule(4, "sigmoid", True, groups=1, top_groups=1, group_best=2, normed=True, scaling=1.8),
                shared_size=1536, dense_layers=frozenset({0}),
            ),
        ),
        LatentLayer,
    ),
    "DeepSeek-V3": Shape(
        LatentConfig(
            family="deepseek_v3", hidden_size=7168, intermediate_size=18432, num_layers=61, num_heads=128, num_kv_heads=128,
            head_dim=64, vocab_size=129280, rms_norm_eps=1e-6, max_position=163840, latent_rank=512, q_rank=1536, nope_dim=128,
            value_dim=128, has_experts=True,
            experts=ExpertsConfig(
                256, 2048, RouterRule(8, "sigmoid", True, groups=8, top_groups=4, group_best=2, normed=True, scaling=2.5),
                shared_size=2048, dense_layers=frozenset({0, 1, 2}),
            ),
        ),
        LatentLayer,
    ),
}  # fmt: skip


def tiny(shape: Shape) -> Shape:
    """A small one of the same kind, which 8 ranks can share, with every rule of its experts."""
    own, experts = shape.config, shape.config.experts
    latents = {"latent_rank": 32, "q_rank": 32, "nope_dim": 16, "value_dim": 16} if isinstance(own, LatentConfig) else {}
    heads = {"num_heads": 16, "num_kv_heads": 16 if latents else min(own.num_kv_heads, 4)}
    small = experts and replace(
        experts, count=16, intermediate_size=128, shared_size=128 if experts.shared_size else 0,
        dense_layers=experts.dense_layers & {0},
    )  # fmt: skip
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_layers": 3, "head_dim": 16, "vocab_size": 2048}
    return shape._replace(config=replace(own, experts=small, **heads, **sizes, **latents, **OF_LAYERS))
