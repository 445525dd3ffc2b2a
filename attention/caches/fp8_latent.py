"""Latents in 8 bits: the bytes in which a cache of latents keeps one token ("fp8_ds_mla", 656 bytes with DeepSeek's dims).

A row holds, one after the other:
- C bytes: the normed latent divided by its scales, as float8_e4m3fn;
- 4 * C / 128 bytes: the scales, float32, one for each 128 elements of the latent;
- 2 * R bytes: the rotated part of the key in bfloat16.  It is not quantised: its error would go into every head's logits.

With C = 512 and R = 64, float32 items 128 to 131 of a row are its scales, and bfloat16 items 264 to 327 its rotated part.  The
rotated part is bfloat16 in models of any dtype, because the layout is one that other programs read and write too: a model in
float32 or float16 loses by it at most 1 part in 256 of a rotated element, where e4m3 costs the others 1 part in 16.

Every token has scales of its own, so its bytes depend on its latent alone.  This module knows no kernel.

Shapes: N tokens or slots, C latent rank, R rotated dim, L = C + R, G = C / 128 groups, X bytes of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.attention.caches.latent_view import LatentParts, LatentView
from specdec.attention.caches.layout import CacheBuffer, CacheLayout
from specdec.attention.caches.quant_cache import FP8_MAX

FP8_LATENTS = "fp8_ds_mla"  # the kv_cache_dtype that asks for these rows
GROUP = 128  # elements of a latent that share a scale
MIN_LATENT_SCALE = torch.finfo(torch.float32).tiny  # the smallest normal float32, so that a latent of zeros divides to zeros


def row_bytes(rank: int, rope_dim: int) -> int:
    """X, the bytes of a token: 656 for rank 512 and 64 rotated elements."""
    assert rank % GROUP == 0 and rope_dim % 2 == 0, (rank, rope_dim)
    return rank + 4 * (rank // GROUP) + 2 * rope_dim


def parts_of(rows_NX: Tensor, rank: int) -> LatentParts:
    """The three parts of rows (uint8): views, through which rows can be written too."""
    groups = rank // GROUP
    return LatentParts(
        rows_NX[:, :rank].view(torch.float8_e4m3fn),
        rows_NX[:, rank + 4 * groups :].view(torch.bfloat16),
        rows_NX[:, rank : rank + 4 * groups].view(torch.float32),
    )


def quantise_latents(latent_NL: Tensor, rank: int) -> Tensor:
    """[N, X] uint8: the rows of these latents, which are normed and rotated.

    A group's scale is its largest absolute value / 448, at least MIN_LATENT_SCALE; the quantised value is the nearest e4m3 to
    value / scale, ties to even.
    """
    latent_NC, rope_NR = latent_NL[:, :rank].float(), latent_NL[:, rank:]
    latent_NGE = latent_NC.unflatten(1, (-1, GROUP))
    scales_NG = (latent_NGE.abs().amax(2) / FP8_MAX).clamp_(min=MIN_LATENT_SCALE)
    rows_NX = torch.empty(len(latent_NL), row_bytes(rank, rope_NR.shape[1]), dtype=torch.uint8, device=latent_NL.device)
    to = parts_of(rows_NX, rank)
    quantised_NGE = (latent_NGE / scales_NG[..., None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    rows_NX[:, :rank] = quantised_NGE.flatten(1).view(torch.uint8)
    assert to.scales_NG is not None
    to.scales_NG.copy_(scales_NG)
    to.rope_NR.copy_(rope_NR)
    return rows_NX


def dequantise_latents(rows_NX: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """[N, L]: the dequantised latents of rows (uint8), multiplied in float32 and converted to that dtype."""
    quantised_NC, rope_NR, scales_NG = parts_of(rows_NX, rank)
    assert scales_NG is not None
    latent_NC = (quantised_NC.float().unflatten(1, (-1, GROUP)) * scales_NG[..., None]).flatten(1)
    return torch.cat((latent_NC.to(dtype), rope_NR.to(dtype)), dim=1)


@dataclass(frozen=True)
class Fp8LatentView(LatentView):
    """One layer of a cache of such rows.  rows: [num_slots, X] uint8.  rank: C."""

    rows: Tensor
    rank: int
    is_lossy = True

    @property
    def width(self) -> int:
        return self.rank + (self.rows.shape[1] - row_bytes(self.rank, 0)) // 2

    @cached_property
    def parts(self) -> LatentParts:
        return parts_of(self.rows, self.rank)

    def put(self, slots_T: Tensor, latent_TL: Tensor) -> None:
        self.rows.index_copy_(0, slots_T, quantise_latents(latent_TL, self.rank))

    def as_stored(self, kept: Tensor) -> Tensor:
        return dequantise_latents(quantise_latents(kept, self.rank), self.rank, kept.dtype)

    def latents(self, slots_N: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantise_latents(self.rows.index_select(0, slots_N), self.rank, dtype)


@dataclass(frozen=True)
class Fp8LatentLayout(CacheLayout):
    """rank, rope_dim: C and R."""

    rank: int
    rope_dim: int

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        return (CacheBuffer("latent", (row_bytes(self.rank, self.rope_dim),), torch.uint8),)

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> Fp8LatentView:
        return Fp8LatentView(buffers["latent"], self.rank)
