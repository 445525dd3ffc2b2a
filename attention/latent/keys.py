"""A cache of latents as its kernels take it: pointers, and what is fixed for all slots.  This module knows no kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from specdec.attention.caches.latent_view import LatentView


class LatentKeys(NamedTuple):
    """What every kernel over latents is told of their cache.

    pointers: latents (or quantised latents), rotated parts, and scales.  A cache without scales gives its latents in their
        place: kernels need some pointer, and do not read it.
    options: the kernels' constants.  Strides are among them, so that the compiler knows how far rows are aligned: 656 bytes
        are 328 elements of a rotated part, which Triton would otherwise take to lie anywhere.
    """

    pointers: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]

    @classmethod
    def of(cls, view: LatentView) -> LatentKeys:
        """The keys of one layer's view."""
        latent, rope, scales = view.parts
        assert latent.stride(1) == rope.stride(1) == 1
        other = latent if scales is None else scales
        names = ("LATENT_STRIDE", "ROPE_STRIDE", "SCALES_STRIDE")
        options: dict[str, Any] = {name: x.stride(0) for name, x in zip(names, (latent, rope, other), strict=True)}
        return cls((latent, rope, other), {**options, "SCALED": scales is not None})
