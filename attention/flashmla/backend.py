"""The attention backend `flashmla`: FlashMLA reads latents in pages of 64 and in rows of selected slots, our kernels the rest.

The rest is: a draft head's ordinary heads, a tree's suffix and the merge of its state, segments with first keys, and shared
prefixes.  Ragged batches of prompts, pages of latents in 8 bits and what else `reads_pages` and `reads_rows` refuse belong to
it, too.

Shapes: T queries, H heads, C latent rank, L latent width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import is_first_call
from specdec.attention.caches.fp8_latent import Fp8LatentView
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.layout import KVView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.flashmla import adapters
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kernels.triton_plan import TritonPlan
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.latent.mla_launch import merge_suffix
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState

KEPT_ROWS = 256  # schedules of calls with more rows are made anew: prompts make such calls, with ever other numbers of rows


class FlashMLABackend(TritonBackend):
    """programs: as in TritonBackend.  min_rows: with fewer rows of slots in 16 bits, specdec's kernel reads them.

    checked: the kinds of calls for which the library was asked, after its conventions were checked.
    """

    name = "flashmla"

    def __init__(self, programs: int | None = None, min_rows: int = adapters.MIN_ROWS) -> None:
        super().__init__(programs)
        self._min_rows = min_rows
        self.checked: set[tuple[object, ...]] = set()
        self._of_rows: dict[tuple[int, ...], Any] = {}  # schedules, which depend on shapes alone

    def attend(self, q_THD: Tensor, view: KVView, prepared: TritonPlan, scoring: Scoring = PLAIN) -> AttentionState:
        if not self.reads(q_THD, view, prepared.segments):
            return super().attend(q_THD, view, prepared, scoring)
        assert isinstance(view, LatentView)
        segment, scale = prepared.segments[0], scoring.latent_factor()
        assert q_THD.stride(2) == 1, "a model's absorbed queries lie densely"
        if is_first_call(self.checked, (q_THD.shape[1:], q_THD.dtype, type(view), segment.pages.page_size), q_THD.device):
            adapters.check_conventions(q_THD, view, segment)
        state = self._library(q_THD, view, segment, scale, prepared.schedules)
        return state if prepared.suffix is None else merge_suffix(q_THD, view, prepared.suffix, scale, state)

    def reads(self, q_THD: Tensor, view: KVView, segments: tuple[Segment, ...]) -> bool:
        """Whether the library reads a plan's segments; specdec's kernels do otherwise."""
        if not isinstance(view, LatentView) or len(segments) > 1:
            return False
        by_rows = adapters.reads_rows(q_THD, view, segments[0], self._min_rows)
        return by_rows or adapters.reads_pages(q_THD, view, segments[0])

    def _library(
        self, q_THL: Tensor, view: LatentView, segment: Segment, scale: float, schedules: dict[int, Any]
    ) -> AttentionState:
        """The library's answer to one segment that it reads."""
        T, H, _ = q_THL.shape
        if isinstance(view, Fp8LatentView):
            return adapters.byte_rows_state(q_THL, view, segment, scale, self._rows_schedule(T, H, segment))
        assert isinstance(view, MLAView)
        if segment.pages.page_size == 1:
            return adapters.rows_state(q_THL, view, segment, scale)
        if H not in schedules:
            schedules[H] = adapters.new_schedule()
        return adapters.pages_state(q_THL, view, segment, scale, schedules[H])

    def _rows_schedule(self, T: int, H: int, segment: Segment) -> Any:
        """The schedule of T rows of so many slots.

        One that is made during a capture is not kept: its memory belongs to that graph, and is empty before the first replay.
        """
        key, device = (T, H, segment.pages.capacity), segment.cache_seqlens.device
        if key in self._of_rows:
            return self._of_rows[key]
        schedule = adapters.new_schedule()
        if T <= KEPT_ROWS and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._of_rows[key] = schedule
        return schedule
