"""KV caches of 8-bit numbers: a stored number times its scale is the value.

fp8: float8_e4m3fn, with one scale for each layer, kv head, and key or value.  The scales come from the checkpoint, or else from
    the largest keys and values of the first pass that stores any.  After that they never change: tokens stored under another
    scale would be misread.
int8: one scale for each token, kv head, and key or value.  A token's stored numbers depend on its key and value alone.

This module knows no kernel.  Shapes: T tokens, N slots, K kv heads, D head dim, B sequences, E moved tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.caches.kv_cache import move_slots
from specdec.attention.kinds import FULL, LayerKind

KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
FP8_MAX, INT8_MAX = 448.0, 127.0
FP8_LEAST_ARCHITECTURE = (8, 9)  # the first compute capability with instructions that convert float8
# Later passes may hold larger values than the first pass, so its largest value takes a quarter of float8's range.  That costs
# two of the eighteen powers of two that e4m3 spans.
HEADROOM = 4.0
LEAST_STEP = 2.0**-120  # threshold for int8 scales: a head with a smaller scale is stored as 0, since 1 / scale would overflow
# The first prompt may be short and hold none of the model's large values: with this lower bound every head can store +-7.
LEAST_SCALE = 2.0**-6


def kv_bytes_per_token(kv_cache_dtype: str, dtype: torch.dtype, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's keys and values in all layers, scales included.

    kv_cache_dtype: "auto" (the models' own dtype, given by `dtype`), "fp8" or "int8".
    """
    heads = num_layers * 2 * num_kv_heads
    if kv_cache_dtype == "auto":
        return heads * head_dim * dtype.itemsize
    return heads * (head_dim + (torch.float32.itemsize if kv_cache_dtype == "int8" else 0))


@dataclass
class QuantView:
    """One layer of a QuantCache.

    kv: [num_slots, 2, K, D], float8_e4m3fn or int8.
    scale_2K: the layer's fp8 scales, float32.  They are set in place, so kernels and captured graphs read them from the device.
    scales_N2K: the int8 scales of every slot, float32.
    needs_scale: True for fp8 as long as no scale is known and nothing has been stored.
    """

    kv: Tensor
    scale_2K: Tensor | None = None
    scales_N2K: Tensor | None = None
    needs_scale: bool = False

    def __post_init__(self) -> None:
        assert (self.scale_2K is None) != (self.scales_N2K is None), "fp8 has scale_2K, int8 scales_N2K"

    def set_scale(self, kv_T2KD: Tensor) -> None:
        """Sets the fp8 scale so that these keys and values fit with room to spare.

        This happens once and outside of CUDA graphs: a captured graph would set the scale again at every replay.
        """
        assert self.needs_scale and self.scale_2K is not None
        assert not (kv_T2KD.is_cuda and torch.cuda.is_current_stream_capturing()), "a graph would set the scale in each replay"
        self.scale_2K.copy_(fp8_scale(kv_T2KD))
        self.needs_scale = False

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
        scales = self.scale_2K if self.scales_N2K is None else self.scales_N2K.index_select(0, slots_N)
        assert scales is not None
        kv = dequantised(stored, scales, dtype)
        return kv[:, 0], kv[:, 1]

    def quantise(self, kv_T2KD: Tensor) -> tuple[Tensor, Tensor]:
        """The stored form of these keys and values, [T, 2, K, D], and its scales: [2, K] for fp8, [T, 2, K] for int8."""
        if self.scale_2K is None:
            return to_int8(kv_T2KD)
        assert not self.needs_scale
        return to_fp8(kv_T2KD, self.scale_2K), self.scale_2K


def dequantised(stored_N2KD: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored numbers times their scales ([2, K] or [N, 2, K]), multiplied in float32 and converted to that dtype."""
    return (stored_N2KD.float() * scales[..., None]).to(dtype)


def to_fp8(kv_T2KD: Tensor, scale_2K: Tensor) -> Tensor:
    """The nearest float8_e4m3fn of kv / scale; values beyond the dtype's range become its largest number of that sign."""
    return (kv_T2KD.float() * (1 / scale_2K)[:, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_scale(kv_T2KD: Tensor) -> Tensor:
    """[2, K] float32 scales, with which each head's largest value takes 1 / HEADROOM of the range.  Infinities and NaN are
    ignored.
    """
    sizes_T2KD = torch.where(kv_T2KD.isfinite(), kv_T2KD, 0).abs().float()
    return (sizes_T2KD.amax((0, 3)) * (HEADROOM / FP8_MAX)).clamp_(min=LEAST_SCALE)


def to_int8(kv_T2KD: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest int8 of kv / scale (ties go up), and the scales [T, 2, K] float32.

    A head's largest value is stored as 127.  A head of zeros has scale 0.
    """
    kv_T2KD = kv_T2KD.float()
    scales_T2K = kv_T2KD.abs().amax(-1) * (1 / INT8_MAX)
    inverse_T2K = torch.where(scales_T2K > LEAST_STEP, 1 / scales_T2K, 0.0)
    steps_T2KD = (kv_T2KD * inverse_T2K[..., None]).clamp_(-INT8_MAX, INT8_MAX)
    return (steps_T2KD + 0.5).floor_().to(torch.int8), scales_T2K


class QuantCache:
    """Keys and values in 8 bits: [layers, num_slots, 2, K, D].

    kv_cache_dtype: "fp8" or "int8".
    scales: each layer's fp8 scales, [2, K] float32; None for layers whose scales the checkpoint does not hold.
    """

    def __init__(
        self,
        kv_cache_dtype: str,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str,
        kinds: Sequence[LayerKind] | None = None,
        scales: Sequence[Tensor | None] = (),
    ) -> None:
        self.kinds = tuple(kinds or [FULL] * num_layers)
        shape = (num_layers, num_slots, 2, num_kv_heads, head_dim)
        self.kv = torch.empty(shape, dtype=KV_CACHE_DTYPES[kv_cache_dtype], device=device)
        self.scales: Tensor | None = None
        if kv_cache_dtype == "int8":
            self.scales = torch.empty(shape[:-1], dtype=torch.float32, device=device)
            self._views = [QuantView(kv, scales_N2K=scales) for kv, scales in zip(self.kv, self.scales, strict=True)]
        else:
            self._views = [QuantView(kv, scale_2K=torch.ones(shape[2:4], device=device), needs_scale=True) for kv in self.kv]
        for view, given in zip(self._views, scales, strict=False):
            if given is not None and view.scale_2K is not None:
                view.scale_2K.copy_(given)
                view.needs_scale = False

    @property
    def num_slots(self) -> int:
        return self.kv.shape[1]

    def view(self, layer: int) -> QuantView:
        return self._views[layer]

    def as_stored(self, layer: int, kv_T2KD: Tensor) -> Tensor:
        """These keys and values as a later read of the cache would return them: quantised and converted back."""
        return dequantised(*self._views[layer].quantise(kv_T2KD), kv_T2KD.dtype)

    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        for tensor in (self.kv.view(torch.uint8),) if self.scales is None else (self.kv.view(torch.uint8), self.scales):
            move_slots(tensor, slots_BN, path_BE)
