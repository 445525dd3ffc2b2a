"""What layers of latent attention (MLA) ask of one forward pass, and an answer that needs no cache: expanding every head.

This module knows neither pages nor plans; attention/latent/mla.py answers from a paged cache of latents.

A head's query and key have Q = N + R numbers: N that are not rotated and R that are.  A model config's `head_dim` is R for
these models, because rotary tables are made for it; a query's width is Q.

Shapes: T tokens, H heads, C latent rank, R rotated dim, N not rotated dim, V value dim, L = C + R, Q = N + R, X = N + V, E
expanded keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.kinds import PLAIN, Scoring
from specdec.ops.rope import HeadPrep, Rotation


@dataclass(frozen=True)
class LatentPrep:
    """What has to be done to a layer's fresh queries and latents before they are stored and attended to.

    rotation: rotary positions, for the last R numbers of queries and latents.
    norm_C, eps: the RMSNorm of a latent's first C numbers.
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


class LatentFn(Protocol):
    """One forward pass's latent attention: each layer calls `attn(layer, q_THQ, latent_TL, up_HXC, prep) -> out_THV`.

    q_THQ: queries, whose last R numbers are to be rotated and are not rotated yet.  The call changes them.
    latent_TL: latents, neither normed nor rotated.
    up_HXC: each head's projection from latents to keys (first N rows) and values (last V rows).
    rows_R: int64.  If given, only these tokens are answered: [R, H, V].
    """

    def __call__(
        self,
        layer: int,
        q_THQ: Tensor,
        latent_TL: Tensor,
        up_HXC: Tensor,
        prep: LatentPrep,
        rows_R: Tensor | None = None,
        scoring: Scoring = PLAIN,
    ) -> Tensor: ...


class HasLatent(Protocol):
    """One forward pass's attention (AttentionFn) that also serves models of latent attention."""

    def latent(self) -> LatentFn: ...


class ExpandedHeads:
    """A LatentFn on top of an attention without a latent cache (dense attention in checks): every head gets keys of its own."""

    def __init__(self, attn: Callable[..., Tensor]) -> None:
        self.attn = attn

    def __call__(
        self,
        layer: int,
        q_THQ: Tensor,
        latent_TL: Tensor,
        up_HXC: Tensor,
        prep: LatentPrep,
        rows_R: Tensor | None = None,
        scoring: Scoring = PLAIN,
    ) -> Tensor:
        H, X, C = up_HXC.shape
        N = q_THQ.shape[2] - (latent_TL.shape[1] - C)
        kv_T2HQ = expand(prep.apply_(q_THQ[..., N:], latent_TL), up_HXC, N)
        qkv_TXQ = torch.cat((q_THQ, kv_T2HQ.flatten(1, 2)), dim=1)
        return self.attn(layer, qkv_TXQ, HeadPrep(None, H), rows_R, scoring)[..., : X - N]


def expand(latent_EL: Tensor, up_HXC: Tensor, N: int) -> Tensor:
    """[E, 2, H, Q]: every head's keys and values of these latents.  Values have V numbers; the rest up to Q is junk."""
    E, (H, _, C) = latent_EL.shape[0], up_HXC.shape
    both_EHX = F.linear(latent_EL[:, :C], up_HXC.flatten(0, 1)).view(E, H, -1)
    kv_E2HQ = latent_EL.new_empty(E, 2, H, N + latent_EL.shape[1] - C)
    kv_E2HQ[:, 0, :, :N] = both_EHX[..., :N]
    kv_E2HQ[:, 0, :, N:] = latent_EL[:, None, C:]
    kv_E2HQ[:, 1, :, : both_EHX.shape[2] - N] = both_EHX[..., N:]
    return kv_E2HQ
