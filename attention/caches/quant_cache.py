"""KV caches in 8 bits: a quantised value times its scale is the dense value.

fp8: float8_e4m3fn, with one scale for each layer, kv head, and key or value.  The scales come from the checkpoint, or else from
    the largest keys and values of the first pass that stores any.  After that they never change: tokens stored under another
    scale would be misread.
int8: one scale for each token, kv head, and key or value.  A token's quantised values depend on its key and value alone.

This module knows no kernel.  Shapes: T tokens, N slots, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import CacheBuffer, CachedHeads, CacheLayout, LossyView

KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
FP8_MAX, INT8_MAX = 448.0, 127.0
FP8_MIN_ARCHITECTURE = (8, 9)  # the first compute capability with instructions that convert float8
# Later passes may hold larger values than the first pass, so its largest value takes a quarter of float8's range.  That costs
# two of the eighteen powers of two that e4m3 spans.
HEADROOM = 4.0
MIN_INT8_SCALE = (
    2.0**-120
)  # threshold for int8 scales: a head with a smaller scale is stored as 0, since 1 / scale would overflow
# The first prompt may be short and hold none of the model's large values: with this lower bound every head can store +-7.
MIN_FP8_SCALE = 2.0**-6


@dataclass(kw_only=True)
class QuantHeads(CachedHeads):
    """One layer's keys and values in 8 bits, whatever their widths: how they are scaled.

    scale_2K: the layer's fp8 scales, float32.  They are set in place, so kernels and captured graphs read them from the device.
    scales_N2K: the int8 scales of every slot, float32.
    needs_scale: True for fp8 as long as no scale is known and nothing has been stored.
    int8_queries: whether attention rounds queries to int8 too, one scale a query and head; for int8 only.
    """

    scale_2K: Tensor | None = None
    scales_N2K: Tensor | None = None
    needs_scale: bool = False
    int8_queries: bool = False
    is_lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        assert (self.scale_2K is None) != (self.scales_N2K is None), "fp8 has scale_2K, int8 scales_N2K"
        assert self.scale_2K is None or not self.int8_queries, "fp8 keys are not multiplied with int8 queries"

    @property
    def quant(self) -> str:
        return "fp8" if self.scales_N2K is None else "int8"

    @property
    def scales(self) -> Tensor:
        scales = self.scale_2K if self.scales_N2K is None else self.scales_N2K
        assert scales is not None
        return scales

    def set_scale(self, *heads: Tensor) -> None:
        """Sets the fp8 scale so that these keys and values fit with room to spare.

        heads: [T, 2, K, D], or keys [T, 1, K, D] and values [T, 1, K, E].
        This happens once and outside of CUDA graphs: a captured graph would set the scale again at every replay.
        """
        assert self.needs_scale and self.scale_2K is not None
        on_gpu = any(x.is_cuda for x in heads)
        assert not (on_gpu and torch.cuda.is_current_stream_capturing()), "a graph would set the scale in each replay"
        self.scale_2K.copy_(torch.cat([fp8_scale(x) for x in heads]))
        self.needs_scale = False

    def quantise(self, heads: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Quantised keys and values, [T, 2, K, D], and their scales: [2, K] for fp8, [T, 2, K] for int8.

        first: of [T, 1, K, D], whether these are keys (0) or values (1).
        """
        if self.scale_2K is None:
            return to_int8(heads)
        assert not self.needs_scale
        scale = self.scale_2K[first : first + heads.shape[1]]
        return to_fp8(heads, scale), scale


@dataclass
class QuantView(QuantHeads):
    """Keys and values of one width.  kv: [num_slots, 2, K, D], float8_e4m3fn or int8."""

    kv: Tensor

    @cached_property
    def heads(self) -> tuple[Tensor, Tensor]:
        k, v = self.kv.unbind(1)
        return k, v

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        if self.needs_scale:
            self.set_scale(kv_T2KD)
        stored_T2KD, scales = self.quantise(kv_T2KD)
        # Copied as bytes: index_copy_ lacks float8 on some devices.
        self.kv.view(torch.uint8).index_copy_(0, slots_T, stored_T2KD.view(torch.uint8))
        if self.scales_N2K is not None:
            self.scales_N2K.index_copy_(0, slots_T, scales)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        stored = self.kv.view(torch.uint8).index_select(0, slots_N).view(self.kv.dtype)
        scales = self.scales if self.scales_N2K is None else self.scales_N2K.index_select(0, slots_N)
        kv = dequantised(stored, scales, dtype)
        return kv[:, 0], kv[:, 1]

    def as_stored(self, kept: Tensor) -> Tensor:
        """These keys and values [T, 2, K, D] as a later read of the cache would return them: quantised and converted back."""
        return dequantised(*self.quantise(kept), kept.dtype)


def as_stored(cache: KVCache) -> Callable[[int, Tensor], Tensor] | None:
    """A function (layer, what it keeps of T tokens) -> what a later read of the cache would return of it.

    Ordinary layers keep keys and values [T, 2, K, D], layers of latent attention latents [T, L].  None: the cache keeps both as
    they are.
    """
    views = {layer: cache.view(layer) for layer, kind in enumerate(cache.kinds) if kind.attends}
    lossy = {layer: view for layer, view in views.items() if isinstance(view, LossyView) and view.is_lossy}
    assert len(lossy) in (0, len(views)), "some layers round what they keep, others do not"
    return (lambda layer, kept: lossy[layer].as_stored(kept)) if lossy else None


def dequantised(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored heads [..., D] times their scales ([2, K], or one for each head), multiplied in float32 and converted to that
    dtype.
    """
    return (stored.float() * scales[..., None]).to(dtype)


def to_fp8(kv_T2KD: Tensor, scale_2K: Tensor) -> Tensor:
    """The nearest float8_e4m3fn of kv / scale; values beyond the dtype's range become its largest number of that sign."""
    return (kv_T2KD.float() * (1 / scale_2K)[:, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_scale(kv_T2KD: Tensor) -> Tensor:
    """[2, K] float32 scales, with which each head's largest value takes 1 / HEADROOM of the range.  Infinities and NaN are
    ignored.
    """
    sizes_T2KD = torch.where(kv_T2KD.isfinite(), kv_T2KD, 0).abs().float()
    return (sizes_T2KD.amax((0, 3)) * (HEADROOM / FP8_MAX)).clamp_(min=MIN_FP8_SCALE)


def to_int8(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [..., D] in int8, and their scales [...] float32: the nearest int8 to value / scale (ties go up).

    A head's largest value is stored as 127.  A head of zeros has scale 0.
    """
    heads = heads.float()
    scales = heads.abs().amax(-1) * (1 / INT8_MAX)
    inverse = torch.where(scales > MIN_INT8_SCALE, 1 / scales, 0.0)
    scaled = (heads * inverse[..., None]).clamp_(-INT8_MAX, INT8_MAX)
    return (scaled + 0.5).floor_().to(torch.int8), scales


@dataclass(frozen=True)
class QuantLayout(CacheLayout):
    """kv_cache_dtype: "fp8" or "int8".  num_kv_heads, head_dim: K and D.  device: where the scales of fp8 lie.

    scales: each layer's fp8 scales, [2, K] float32; None for layers whose scales the checkpoint does not hold.
    int8_queries: see QuantView.
    """

    kv_cache_dtype: str
    num_kv_heads: int
    head_dim: int
    device: torch.device | str = "cpu"
    scales: Sequence[Tensor | None] = ()
    int8_queries: bool = False

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        heads = (2, self.num_kv_heads)
        kv = CacheBuffer("kv", (*heads, self.head_dim), KV_CACHE_DTYPES[self.kv_cache_dtype])
        return (kv, CacheBuffer("scales", heads, torch.float32)) if self.kv_cache_dtype == "int8" else (kv,)

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> QuantView:
        if self.kv_cache_dtype == "int8":
            return QuantView(buffers["kv"], scales_N2K=buffers["scales"], int8_queries=self.int8_queries)
        scale_2K = torch.ones(2, self.num_kv_heads, dtype=torch.float32, device=self.device)
        given = self.scales[layer] if layer < len(self.scales) else None
        if given is not None:
            scale_2K.copy_(given)
        return QuantView(buffers["kv"], scale_2K=scale_2K, needs_scale=given is None)
