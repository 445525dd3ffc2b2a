"""What has to be done to fresh queries and latents of latent attention (MLA) before they are stored and attended to.

This module knows neither pages nor plans.  A model config's `head_dim` is R for these models, because rotary tables are made
for it.

Shapes: T tokens, H heads, C latent rank, R rotated dim, L = C + R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.rope import Rotation


@dataclass(frozen=True)
class LatentPrep:
    """What has to be done to a layer's fresh queries and latents before they are stored and attended to.

    rotation: rotary positions, for the last R elements of queries and latents.
    norm_C, eps: the RMSNorm of a latent's first C elements.
    """

    rotation: Rotation
    norm_C: Tensor
    eps: float

    def apply_(self, q_THR: Tensor, latent_TL: Tensor) -> Tensor:
        """Rotates queries [T, H, R] in place, and returns the latents [T, L], normed and rotated.  Both inputs are changed."""
        C = self.norm_C.shape[0]
        normed_TC = F.rms_norm(latent_TL[:, :C], (C,), self.norm_C, self.eps)
        self.rotation.rotate_(latent_TL[:, None, C:])
        self.rotation.rotate_(q_THR)
        return torch.cat((normed_TC, latent_TL[:, C:]), dim=1)
