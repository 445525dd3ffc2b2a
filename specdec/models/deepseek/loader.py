"""What DeepSeek and GLM-5 targets have of their own in checkpoints: latent attention beside experts."""

from __future__ import annotations

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, fill_mlp
from specdec.models.deepseek.config import BY_TYPES, parse_deepseek
from specdec.models.latent.attention import LatentAttention, LatentLayer
from specdec.models.latent.config import LatentConfig
from specdec.models.latent.weights import expect_latents, fill_latents
from specdec.models.layers import MLP
from specdec.models.mixtures.fill import USUAL, expect_mixture, fill_mixture
from specdec.models.mixtures.layer import MixtureOfExperts


def _expect(checkpoint: Checkpoint, config: LatentConfig) -> None:
    expect_latents(checkpoint, config)
    by_types = config.family in BY_TYPES
    expect_mixture(checkpoint, config, USUAL._replace(layer_keys="mlp_layer_types") if by_types else USUAL)


PARTS: Parts = {LatentAttention: fill_latents, MixtureOfExperts: fill_mixture, MLP: fill_mlp}
FAMILY = Family(parse_deepseek, LatentLayer, _expect, PARTS)
