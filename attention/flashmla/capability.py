"""What the backend `flashmla` says of itself: DeepSeek's library for latents."""

from __future__ import annotations

from specdec.attention.backend import Backend
from specdec.attention.caches.fp8_latent import FP8_LATENTS
from specdec.attention.caches.quant_cache import FP8_MIN_ARCHITECTURE
from specdec.attention.capability import USUAL, Capability, Feature, HeadDims, PageSizes, Requirements


def make(by_rule: bool) -> Backend:
    from specdec.attention.flashmla.backend import FlashMLABackend

    return FlashMLABackend()


FLASHMLA = Capability(
    "flashmla", "flash_mla", Requirements("H200", "flash_mla", architectures=(9,)), make, head_dims=HeadDims(8, 256, 2),
    pages=PageSizes((64,)), kinds=("full",), tree_kinds=("full",), shares=False,
    kv_cache_dtypes=("auto", FP8_LATENTS), fp8_from=FP8_MIN_ARCHITECTURE, latents=(512, 64),
    features=USUAL - {Feature.HEADS} | {Feature.LATENTS, Feature.SPARSE},
)  # fmt: skip
