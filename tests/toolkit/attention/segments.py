"""Segments that only tests build: prompts of given lengths, and views of larger buffers.

Shapes: B sequences, W pages of each, R rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment


def ragged_causal_segment(pages: PageTable, query_lens: list[int], lens: list[int]) -> Segment:
    """Prompts of different lengths, one after the other: a ragged batch, as a chunk of prompts is.

    Prompt b's queries are the last query_lens[b] of its first lens[b] tokens; each reads everything up to itself.
    """
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    lens_B = torch.tensor(lens, dtype=torch.int32)
    device, ragged = pages.table.device, min(query_lens) < max(query_lens)
    cached = max(length - count for length, count in zip(lens, query_lens, strict=True))
    row = (pages, lens_B.to(device), cu_seqlens_q.to(device), max(query_lens))
    return Segment(*row, True, ragged, max_cached=cached)


def on_device(x: Any, device: torch.device) -> Any:
    """A segment, view or scoring with its tensors on that device."""
    return replace(x, **{name: value.to(device) for name, value in vars(x).items() if isinstance(value, Tensor | PageTable)})


def plan_on_device(plan: AttentionPlan, device: torch.device) -> AttentionPlan:
    """A plan's parts on that device; its positions stay."""
    segments = tuple(on_device(segment, device) for segment in plan.segments)
    return replace(plan, segments=segments, suffix=None if plan.suffix is None else on_device(plan.suffix, device))


def narrowed(segment: Segment, rows: int, width: int) -> Segment:
    """A view of the first `rows` rows and `width` columns of a segment: a part of a larger buffer, so it has strides."""
    assert segment.starts_T is None and segment.base_B is None, "first keys and base positions can't be narrowed"
    return replace(
        segment,
        pages=segment.pages._replace(table=segment.pages.table[:rows, :width]),
        cache_seqlens=segment.cache_seqlens[:rows],
        cu_seqlens_q=segment.cu_seqlens_q[: rows + 1],
    )
