"""The attention backends `fa2`, `fa3` and `fa4`: flash-attn reads paged keys, Triton kernels do the rest.

The rest is: a tree's suffix and the merge of all states, and segments whose first keys differ from query to query in a way that
flash-attn's interface can't express: trees' prefixes in windowed layers, chunked layers, and what a row reads after a shared
prefix.  flash-attn 3 reads fp8 caches too, with queries rounded to float8 (queries.py).

Shapes: T queries, H heads, K kv heads, D head dim, S splits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specdec.attention.backend import is_first_call
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.layout import CachedHeads
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.flash.adapters import ADAPTERS, FlashView, can_express
from specdec.attention.flash.capability import LIBRARIES
from specdec.attention.flash.conventions import check_conventions
from specdec.attention.flash.rule import AttentionShape
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import Scoring
from specdec.attention.needs import gpu_kind
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState


class FlashBackend(TritonBackend):
    """library: "fa2", "fa3" or "fa4".

    rule: (library, kind of GPU, shape of the call) -> whether the library is faster; specdec's kernels read the other segments.
        None: the library reads all that it can.
    programs: as in TritonBackend.
    """

    name = "flash"

    def __init__(
        self, library: str, rule: Callable[[str, str, AttentionShape], bool] | None = None, programs: int | None = None
    ) -> None:
        super().__init__(programs)
        assert library in ADAPTERS, f"no flash-attn library {library!r}"
        self.library, self.rule = library, rule
        self._checked: set[tuple[object, ...]] = set()

    def partial_splits(self, q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring) -> int:
        if self._asks_library(q_THD, view, segment):
            return 0
        return super().partial_splits(q_THD, view, segment, scoring)

    def paged_partial(
        self, q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring, out_THSD: Tensor, lse_THS: Tensor,
        schedules: dict[Any, Any],
    ) -> AttentionState | None:  # fmt: skip
        if not self._asks_library(q_THD, view, segment):
            return super().paged_partial(q_THD, view, segment, scoring, out_THSD, lse_THS, schedules)
        assert isinstance(view, FlashView)
        kind = (q_THD.shape[1:], view.kv.shape[2], q_THD.dtype, view.kv.dtype, segment.window is None)
        if is_first_call(self._checked, kind, q_THD.device):
            check_conventions(self.library, q_THD, view, segment)
        return ADAPTERS[self.library](q_THD, view, segment, scoring, schedules)

    def _asks_library(self, q_THD: Tensor, view: CachedHeads, segment: Segment) -> bool:
        if not can_express(segment) or not self._knows(view):
            return False
        library = LIBRARIES[self.library]
        if segment.pages.page_size % library.pages.multiple:
            return False  # pages of a size that the library can't read, such as slots
        if segment.window is not None and "window" not in library.kinds:
            return False
        if self.rule is None:
            return True
        assert isinstance(view, MHAView)
        kv_heads = view.kv.shape[2]
        seqlen_q_packgqa, keys = segment.max_seqlen_q * (q_THD.shape[1] // kv_heads), segment.max_keys
        if segment.causal:  # a captured chunk does not say how many tokens are cached: then its own count alone
            keys = min(keys, segment.max_seqlen_q + (segment.max_cached or 0))
        local = segment.window is not None
        if segment.window is not None:
            keys = min(keys, segment.window)
        shape = AttentionShape(segment.rows, kv_heads, seqlen_q_packgqa, keys, local, segment.whole_or_none)
        return self.rule(self.library, gpu_kind(q_THD.device), shape)

    def _knows(self, view: CachedHeads) -> bool:
        """Whether the library reads such a cache.  No rule was measured over fp8."""
        if isinstance(view, QuantView):
            return view.scale_2K is not None and "fp8" in LIBRARIES[self.library].kv_cache_dtypes and self.rule is None
        return isinstance(view, MHAView)
