"""What the backend `torch` says of itself: PyTorch's own operations, on any device."""

from __future__ import annotations

from specdec.attention.backend import Backend
from specdec.attention.caches.quant_cache import KV_CACHE_DTYPES
from specdec.attention.capability import FLOATS, KV_DTYPES, Capability, Feature, Requirements


def make(by_rule: bool) -> Backend:
    from specdec.attention.eager.torch_backend import TorchBackend

    return TorchBackend()


TORCH = Capability(
    "torch", "gathered keys, a mask", Requirements("CPU, H100, H200", devices=("cpu", "cuda")), make, dtypes=FLOATS,
    kv_cache_dtypes=KV_DTYPES, split_kv_cache_dtypes=("auto", *KV_CACHE_DTYPES),
    features=frozenset(Feature) - {Feature.DETERMINISTIC},
)  # fmt: skip
