"""The cache of a decode pass: tensors that the caller owns, one dict for each layer that stores something of its own.

This file knows neither plans nor operators.  Shapes: K kv heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specdec.attention.caches.fp8_latent import FP8_LATENTS, GROUP, Fp8LatentLayout
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import CacheLayout, KVView, UnlikeLayout
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.quant_cache import FP8_MIN_ARCHITECTURE, QuantLayout, QuantView
from specdec.attention.caches.sparse_cache import SparseLatentLayout
from specdec.attention.caches.split_cache import SplitLayout
from specdec.attention.kinds import LayerKind
from specdec.checks import require_choice
from specdec.models.config import ModelConfig

LayerTensors = dict[str, Tensor]  # one layer's part of a cache: by buffer, a tensor [num_slots, ...]; and "scale", see below
SCALE = "scale"  # beside the keys and values in fp8 of a layer: their scales [2, K] float32
LAYOUTS = (  # what operators read and write
    HeadsLayout, QuantLayout, SplitLayout, LatentLayout, Fp8LatentLayout, SparseLatentLayout,
)  # fmt: skip


def layout_of(layout: CacheLayout, layer: int) -> CacheLayout:
    """That of one layer, where layers have unlike ones."""
    return layout.layouts[layout.numbers[layer]] if isinstance(layout, UnlikeLayout) else layout


def layouts_in(layout: CacheLayout) -> tuple[CacheLayout, ...]:
    """Those of all layers."""
    return layout.layouts if isinstance(layout, UnlikeLayout) else (layout,)


def check_cache_dtype(
    config: ModelConfig,
    kv_cache_dtype: str,
    device: torch.device,
    capability: Callable[[torch.device], tuple[int, int]] = torch.cuda.get_device_capability,
) -> None:
    """ValueError for a format in which a pass over such a target can't keep its cache on that device."""
    require_choice("kv_cache_dtype", kv_cache_dtype, ("auto", "fp8", "int8", FP8_LATENTS), "auto")
    allowed: tuple[str, ...] = ("auto",)
    if config.keeps_latents and config.latent_rank % GROUP == 0:
        allowed = ("auto", FP8_LATENTS)
    elif not (config.keeps_latents or config.value_width):
        allowed = ("auto", "fp8", "int8")
    if kv_cache_dtype in ("fp8", FP8_LATENTS) and device.type == "cuda" and capability(device) < FP8_MIN_ARCHITECTURE:
        needed, got = (".".join(map(str, version)) for version in (FP8_MIN_ARCHITECTURE, capability(device)))
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} needs a GPU of compute capability {needed} or later, got {got}; nearest "
            "setting that works: kv_cache_dtype='auto'"
        )
    if kv_cache_dtype not in allowed:
        raise ValueError(
            f"kv_cache_dtype must be {' or '.join(map(repr, allowed))} for a target of family {config.family!r}, got "
            f"{kv_cache_dtype!r}; nearest setting that works: kv_cache_dtype='auto'"
        )


def new_layers(layout: CacheLayout, kv_layers: Sequence[int], num_slots: int, device: torch.device) -> list[LayerTensors]:
    """Memory for so many tokens, for each layer that stores its own.  What the memory holds is arbitrary.

    kv_layers: see `GivenCache`.
    Only scales of fp8 are set: to those of the checkpoint, and to NaN where it has none.
    """
    layers: list[LayerTensors] = []
    for layer in sorted(set(kv_layers)):
        own = layout_of(layout, layer)
        held = [buffer for buffer in own.buffers if buffer.held_by(layer)]
        tensors = {each.name: torch.empty(num_slots, *each.shape, dtype=each.dtype, device=device) for each in held}
        if isinstance(own, QuantLayout) and own.kv_cache_dtype == "fp8":
            given = given_scale(own, layer)
            shape = (2, own.num_kv_heads)
            tensors[SCALE] = (
                torch.full(shape, torch.nan, dtype=torch.float32, device=device) if given is None else given.clone()
            )
        layers.append(tensors)
    return layers


def given_scale(layout: QuantLayout, layer: int) -> Tensor | None:
    """The fp8 scales [2, K] that the checkpoint has for a layer."""
    return layout.scales[layer] if layer < len(layout.scales) else None


class GivenCache(KVCache):
    """A cache whose layers' tensors are given.

    kv_layers: for each layer, the layer whose keys and values it reads.  layers: the tensors of those that store their own.
    sets_scales: whether layers in fp8 whose scales the checkpoint lacks take them from the keys and values that are stored.
    In a traced pass each of these tensors must be an input of its own.  If they were views of one tensor whose number of slots
    may vary, inductor (torch 2.13) would lose the views' offsets and store every layer in the first one's place.
    """

    def __init__(
        self,
        layout: CacheLayout,
        kinds: Sequence[LayerKind],
        kv_layers: Sequence[int],
        layers: Sequence[Mapping[str, Tensor]],
        sets_scales: bool = False,
    ) -> None:
        self.layout, self.kinds, self.kv_layers = layout, tuple(kinds), tuple(kv_layers)
        self.groups, self.group_numbers = (0,) * len(kinds), (0,)
        self.layers, self.sets_scales = dict(zip(sorted(set(kv_layers)), layers, strict=True)), sets_scales

    def view(self, layer: int) -> KVView:
        source = self.kv_layers[layer]
        tensors, own = self.layers[source], layout_of(self.layout, source)
        if SCALE not in tensors:
            return own.view(source, tensors)
        assert isinstance(own, QuantLayout), own
        unknown = self.sets_scales and layer == source and given_scale(own, source) is None
        return QuantView(tensors["kv"], scale_2K=tensors[SCALE], needs_scale=unknown)
