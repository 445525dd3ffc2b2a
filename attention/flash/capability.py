"""What the backends `fa2`, `fa3` and `fa4` say of themselves: flash-attn's libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.attention.backend import Backend
from specdec.attention.capability import Capability, HeadDims, PageSizes, Requirements

FULL: dict[str, Any] = dict(kinds=("full",), tree_kinds=("full",))  # fa2 multiplies what lies before a window, NaN too
WINDOWS: dict[str, Any] = dict(kinds=("full", "window"), tree_kinds=("full",))  # adapters.can_express says why


def _maker(library: str) -> Callable[[bool], Backend]:
    def make(by_rule: bool) -> Backend:
        from specdec.attention.flash.backend import FlashBackend
        from specdec.attention.flash.rule import is_faster

        return FlashBackend(library, is_faster if by_rule else None)

    return make


FA2 = Capability(
    "fa2", "flash_attn", Requirements("H200", "flash-attn", (2, 8), (8, 9, 10, 12)), _maker("fa2"), **FULL,
    head_dims=HeadDims(8, 256, 8), pages=PageSizes(multiple=256),
)  # fmt: skip
FA3 = Capability(
    "fa3", "flash_attn_interface", Requirements("H200", "flash-attn-3", (3, 0), (9,)), _maker("fa3"), **WINDOWS,
    head_dims=HeadDims(8, 256, 8), fp8_head_dims=HeadDims(16, 256, 16), kv_cache_dtypes=("auto", "fp8"),
)  # fmt: skip
FA4 = Capability(
    "fa4", "flash_attn.cute", Requirements("H100", "flash-attn-4", (4, 0), (9,)), _maker("fa4"), **FULL,
    head_dims=HeadDims(8, 256, 8), pages=PageSizes(unread=(80, 112, 128, 144)),
)  # fmt: skip
LIBRARIES = {library.name: library for library in (FA2, FA3, FA4)}
