"""What a pair of models and its settings need of attention, and what the device and its packages are.

This module knows no backend; attention/capabilities.py says which backend meets which needs.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from specdec.attention.capability import SCORINGS, Feature
from specdec.attention.flash.rule import MEASURED, AttentionShape
from specdec.attention.kinds import FULL, LayerKind


@dataclass(frozen=True)
class AttentionNeeds:
    """What a pair of models and its settings need of attention.

    architecture: the GPU's compute capability; None on a CPU.
    gpu: the kind of GPU, as gpu_kind names it.
    head_dims, kinds: of all layers of both models.  A layer of latent attention has no head dim here.
    value_dims: the width of the values that are not as wide as the keys that they go with; empty: there are none.
    latents: the rank and the rotated dim of the latents that the target's layers keep; None: they keep none.
    draft_latents: the same of drafters that keep some.
    kv_cache_dtype, page_size: as in EngineOptions.
    features: what else models and settings ask for; `asked` adds those that follow from widths and latents.
    largest: the most sequences of a batch, tokens of one, and queries x heads a key of the target's verify pass.
    """

    device: torch.device
    dtype: torch.dtype
    architecture: tuple[int, int] | None = None
    gpu: str = ""
    head_dims: tuple[int, ...] = (128,)
    value_dims: tuple[int, ...] = ()
    kinds: tuple[LayerKind, ...] = (FULL,)
    latents: tuple[int, int] | None = None
    draft_latents: tuple[tuple[int, int], ...] = ()
    kv_cache_dtype: str = "auto"
    page_size: int = 16
    features: frozenset[Feature] = frozenset()
    largest: AttentionShape = AttentionShape(1, 1, 1, 0)

    @property
    def asked(self) -> frozenset[Feature]:
        """All features that a backend must have."""
        follow = {Feature.LATENTS if self.latents else Feature.HEADS}
        if self.draft_latents:
            follow.add(Feature.LATENTS)
        if self.latents and self.features & SCORINGS:
            follow.add(Feature.SCORED_LATENTS)
        if self.value_dims and Feature.DIFFERENTIAL not in self.features:
            follow.add(Feature.SPLIT_HEADS)
        return self.features | follow

    def without(self, *features: Feature) -> AttentionNeeds:
        return replace(self, features=self.features.difference(features))


def architecture_of(device: torch.device) -> tuple[int, int] | None:
    """The GPU's compute capability (major, minor); None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@cache
def gpu_kind(device: torch.device) -> str:
    """The kind of GPU by which measured rules are kept: "H100" or "H200"; the empty string for any other device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
    return next((kind for kind in MEASURED if kind in re.split(r"\W+", name)), "")


def installed(package: str) -> str | None:
    """The version of an installed package, or None.

    Nothing is imported: flash-attn 2 and 4 share a module name, so only the package's metadata tells them apart.
    """
    try:
        return version(package)
    except PackageNotFoundError:  # some builds of torch bring triton under another name
        return "0.0" if package == "triton" and importlib.util.find_spec(package) else None
