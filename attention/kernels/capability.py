"""What the backend `triton` says of itself: specdec's own kernels."""

from __future__ import annotations

from specdec.attention.backend import Backend
from specdec.attention.caches.quant_cache import FP8_MIN_ARCHITECTURE
from specdec.attention.capability import FLOATS, KV_DTYPES, Capability, Feature, HeadDims, Requirements


def make(by_rule: bool) -> Backend:
    from specdec.attention.kernels.triton_backend import TritonBackend

    return TritonBackend()


TRITON = Capability(
    "triton", "our kernels", Requirements("H100, H200", "triton"), make, dtypes=FLOATS[1:], head_dims=HeadDims(8, 512, 2),
    kv_cache_dtypes=KV_DTYPES, fp8_from=FP8_MIN_ARCHITECTURE, features=frozenset(Feature) - {Feature.SCORED_LATENTS},
)  # fmt: skip
