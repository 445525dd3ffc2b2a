"""KV kept in 8 bits: what is stored, times a scale, is the value.

fp8: float8_e4m3fn with a scale per layer, key or value, and kv head; from the checkpoint, or from the largest keys and values
of the first pass that stores any.  From then on it stands: tokens stored under another scale would be misread.
int8: a scale per token, key or value, and head.  What a token is stored as depends on nothing but its key and value.

Knows no kernel's inside.  Shapes: T tokens, N slots, K kv heads, D head dim, B sequences, E moved tokens.
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
FP8_LEAST_ARCHITECTURE = (8, 9)  # whose instructions convert it
# Later passes may hold larger values than the first.  Four times the range costs two of e4m3's eighteen powers of two.
HEADROOM = 4.0
LEAST_STEP = 2.0**-120  # of int8: below, all is 0, since the inverse would overflow
# A first prompt of few tokens may hold none of the large ones: every head can keep at least +-7.
LEAST_SCALE = 2.0**-6


def kv_bytes_per_token(kv_cache_dtype: str, dtype: torch.dtype, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's keys and values in all layers, scales included.  dtype: the models', which "auto" keeps."""
    heads = num_layers * 2 * num_kv_heads
    if kv_cache_dtype == "auto":
        return heads * head_dim * dtype.itemsize
    return heads * (head_dim + (torch.float32.itemsize if kv_cache_dtype == "int8" else 0))


@dataclass
class QuantView:
    """One layer.  kv: [num_slots, 2, K, D] of float8_e4m3fn or int8.

    scale_2K: fp8's, float32; changed in place when it is set, so kernels and graphs read it from the device.
    scales_N2K: int8's, float32, of every slot.  needs_scale: fp8, and nothing has been stored yet.
    """

    kv: Tensor
    scale_2K: Tensor | None = None
    scales_N2K: Tensor | None = None
    needs_scale: bool = False

    def __post_init__(self) -> None:
        assert (self.scale_2K is None) != (self.scales_N2K is None), "fp8 has scale_2K, int8 scales_N2K"

    def set_scale(self, kv_T2KD: Tensor) -> None:
        """fp8: so that these keys and values fit, with room to spare.  Once, eagerly: a replay would do it again."""
        assert self.needs_scale and self.scale_2K is not None
        assert not (kv_T2KD.is_cuda and torch.cuda.is_current_stream_capturing()), "a graph would set the scale in each replay"
        self.scale_2K.copy_(fp8_scale(kv_T2KD))
        self.needs_scale = False

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        if self.needs_scale:
            self.set_scale(kv_T2KD)
        stored_T2KD, scales = self.quantise(kv_T2KD)
        # Bytes: torch does not copy rows of float8 everywhere.
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
        """What is stored of these keys and values, [T, 2, K, D], and its scales, [2, K] or [T, 2, K]."""
        if self.scale_2K is None:
            return to_int8(kv_T2KD)
        assert not self.needs_scale
        return to_fp8(kv_T2KD, self.scale_2K), self.scale_2K


def dequantised(stored_N2KD: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored times scale, [2, K] or [N, 2, K], multiplied in float32."""
    return (stored_N2KD.float() * scales[..., None]).to(dtype)


def to_fp8(kv_T2KD: Tensor, scale_2K: Tensor) -> Tensor:
    """Nearest float8_e4m3fn of kv / scale; beyond its range, its largest."""
    return (kv_T2KD.float() * (1 / scale_2K)[:, :, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_scale(kv_T2KD: Tensor) -> Tensor:
    """[2, K] float32: the largest of each head takes 1 / HEADROOM of the range.  What is not finite does not count."""
    sizes_T2KD = torch.where(kv_T2KD.isfinite(), kv_T2KD, 0).abs().float()
    return (sizes_T2KD.amax((0, 3)) * (HEADROOM / FP8_MAX)).clamp_(min=LEAST_SCALE)


def to_int8(kv_T2KD: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest int8 of kv / scale (ties up), and the scales [T, 2, K] float32: a head's largest is 127; of zeros, 0."""
    kv_T2KD = kv_T2KD.float()
    scales_T2K = kv_T2KD.abs().amax(-1) * (1 / INT8_MAX)
    inverse_T2K = torch.where(scales_T2K > LEAST_STEP, 1 / scales_T2K, 0.0)
    steps_T2KD = (kv_T2KD * inverse_T2K[..., None]).clamp_(-INT8_MAX, INT8_MAX)
    return (steps_T2KD + 0.5).floor_().to(torch.int8), scales_T2K


class QuantCache:
    """[layers, num_slots, 2, K, D] in 8 bits.

    kv_dtype: "fp8" or "int8".  scales: fp8's of each layer, [2, K] float32; None where the checkpoint has none.
    """

    def __init__(
        self,
        kv_dtype: str,
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
        self.kv = torch.empty(shape, dtype=KV_CACHE_DTYPES[kv_dtype], device=device)
        self.scales: Tensor | None = None
        if kv_dtype == "int8":
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
        """What the cache would give back of these keys and values."""
        return dequantised(*self._views[layer].quantise(kv_T2KD), kv_T2KD.dtype)

    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        for tensor in (self.kv.view(torch.uint8),) if self.scales is None else (self.kv.view(torch.uint8), self.scales):
            move_slots(tensor, slots_BN, path_BE)
