"""What every cache of latents offers, whatever a slot's bytes are: latents to read and to store, and the parts kernels read.

Shapes: T tokens, N slots, C latent rank, R rotated dim, L = C + R, G groups of a latent that share a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class LatentParts(NamedTuple):
    """What slots hold, part by part: views of one cache, in which only the last dim is contiguous.

    latent_NC: the latents, or their quantised values.
    rope_NR: the rotated parts of keys.
    scales_NG: float32, what a group's quantised values are to be multiplied with; None: latent_NC holds the latents themselves.
    """

    latent_NC: Tensor
    rope_NR: Tensor
    scales_NG: Tensor | None = None


class LatentView(ABC):
    """One layer of a cache of latents.  rank: C.  is_lossy: whether the cache quantises what it stores."""

    rank: int
    is_lossy = False

    def as_stored(self, kept: Tensor) -> Tensor:
        """Latents [T, L] as a later read of the cache would return them."""
        return kept

    @property
    @abstractmethod
    def parts(self) -> LatentParts:
        """All slots, part by part, as kernels read and write them."""

    @abstractmethod
    def put(self, slots_T: Tensor, latent_TL: Tensor) -> None:
        """Stores latents, which are normed and rotated, into their slots (int64 [T])."""

    @abstractmethod
    def latents(self, slots_N: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, L]: the latents of these slots (int64 [N])."""

    @property
    @abstractmethod
    def width(self) -> int:
        """L."""

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, 1, L] and values [N, 1, C] of the slots (int64 [N]).  The values are a view of the keys."""
        k_N1L = self.latents(slots_N, dtype)[:, None]
        return k_N1L, k_N1L[..., : self.rank]
