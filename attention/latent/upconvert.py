"""Long prompts over 8-bit latents: the latents of a pass are converted once, to a workspace that all its queries read.

The kernels dequantise latents as they load them, once for each tile of queries.  For a few queries a row that
costs less than writing converted latents to memory and reading them again; for many queries it costs more.  The rule is one
number, `convert_from` (limits.py).

The workspace holds the latents of as many rows as fit, one row after the other, each from a page's first slot on.  Rows that do
not fit are converted and attended to afterwards, in the same memory.

Shapes: B rows, T queries, N slots of the workspace, C latent rank, R rotated dim, L = C + R.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.kinds import Scoring
from specdec.attention.latent.limits import Limits
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_all
from specdec.ops.launch import use_kernels

PAGE = 64  # tokens of a workspace's page: what the kernels load fastest


def first_rows(lens: Sequence[int], tokens: int) -> list[int]:
    """The first row of each row's chunk: neighbouring rows form a chunk as long as together they have at most `tokens` tokens.

    A row that alone has more forms a chunk of its own.
    """
    firsts: list[int] = []
    total = 0
    for row, length in enumerate(lens):
        fits = row > 0 and total + length <= tokens
        total = total + length if fits else length
        firsts.append(firsts[-1] if fits else row)
    return firsts


def workspace_starts(lens_B: Tensor, firsts: Sequence[int], page_size: int) -> Tensor:
    """[B]: where each row begins in the workspace, if every row begins at a page's first slot and every chunk at slot 0.

    Example: with pages of one slot, rows of 10, 15, 20 and 5 tokens in two chunks of two rows start at 0, 10, 0 and 20.
    """
    taken_B = -(-lens_B // page_size) * page_size
    before_B = taken_B.cumsum(0, dtype=lens_B.dtype) - taken_B
    return before_B - torch.cat([before_B[first : first + 1] for first in firsts])


def upconvert(view: LatentView, pages: PageTable, lens_B: Tensor, starts_B: Tensor, max_len: int, out_NL: Tensor) -> None:
    """Writes the first lens_B[b] latents of row b to out_NL, from starts_B[b] on, in the dtype of out_NL.

    lens_B and starts_B: int32.  max_len: no row has more latents; known to the host.  Nothing else is written.
    """
    if use_kernels(out_NL):
        from specdec.attention.latent.upconvert_triton import launch_upconvert

        launch_upconvert(view, pages, lens_B, starts_B, max_len, out_NL)
        return
    place_X = torch.arange(max_len, dtype=torch.int64, device=out_NL.device)
    for row, (length, start) in enumerate(zip(lens_B.tolist(), starts_B.tolist(), strict=True)):
        slots_X = pages._replace(table=pages.table[row : row + 1]).slots_at(place_X[None, :length])[0]
        out_NL[start : start + length] = view.latents(slots_X, out_NL.dtype)


@dataclass(frozen=True)
class Workspace:
    """A prompt's converted latents, and who reads them.  All layers of a pass use it one after the other.

    prompt: the segment as given, over the cache.
    max_len: no row has more latents.
    chunks: what the queries read of the workspace when the rows of one chunk are there; rows of other chunks have no keys.
    """

    prompt: Segment
    max_len: int
    starts_B: Tensor
    chunks: tuple[Segment, ...]
    latent_NL: Tensor

    @classmethod
    def of_plan(cls, plan: AttentionPlan, view: LatentView, dtype: torch.dtype, limits: Limits) -> Workspace | None:
        """The workspace of a plan's pass; None if its queries read the cache itself.

        Only prompts have so many queries a row, and a prompt's plan is one causal segment.  In a captured graph it does not say
        how much of a row is cached, so nobody would know the workspace's size.
        """
        if not _is_sized(plan, view, limits):
            return None
        return cls.of(plan.segments[0], view.width, dtype, limits.workspace_tokens)

    @classmethod
    def of_selected(
        cls, plan: AttentionPlan, view: LatentView, dtype: torch.dtype, limits: Limits, queries: int
    ) -> Workspace | None:
        """`of_plan` for layers whose queries select keys: all rows lie in the workspace at once.

        queries: of the pass.  Each has a bounded number of keys, while all tokens of its row are converted.
        """
        if not _is_sized(plan, view, limits):
            return None
        prompt = plan.segments[0]
        tokens = prompt.rows * _room(prompt)
        if tokens > limits.selected_tokens or tokens > queries * limits.converted_a_query:
            return None
        return cls.of(prompt, view.width, dtype, tokens)

    @classmethod
    def of(cls, prompt: Segment, width: int, dtype: torch.dtype, tokens: int) -> Workspace:
        """The workspace of a causal segment that says how much of it was cached before.  It reads nothing from the device.

        tokens: converted at once.
        """
        assert prompt.max_cached is not None and prompt.causal and prompt.starts_T is None
        lens_B, B = prompt.cache_seqlens, prompt.rows
        max_len, room = _longest(prompt), _room(prompt)
        firsts = first_rows([room] * B, tokens)
        starts_B = workspace_starts(lens_B, firsts, PAGE)
        table_BW = starts_B[:, None] // PAGE + torch.arange(room // PAGE, dtype=torch.int32, device=lens_B.device)
        row_B, chunks = torch.arange(B, dtype=torch.int64, device=lens_B.device), []
        for first in dict.fromkeys(firsts):
            rows = firsts.count(first)
            own_B = lens_B if rows == B else torch.where((row_B >= first) & (row_B < first + rows), lens_B, 0)
            chunks.append(replace(prompt, pages=PageTable(table_BW, PAGE), cache_seqlens=own_B))
        slots = room * max(firsts.count(first) for first in firsts)
        memory_NL = torch.empty(slots, width, dtype=dtype, device=lens_B.device)
        return cls(prompt, max_len, starts_B, tuple(chunks), memory_NL)

    def state(self, backend: Backend, q_THL: Tensor, view: LatentView, scoring: Scoring) -> AttentionState:
        """The state of absorbed queries over the whole prompt."""

        def states() -> Iterator[AttentionState]:
            for chunk in self.chunks:
                yield backend.run(q_THL, self._converted(view, chunk), chunk, scoring)

        return merge_all(states())

    @property
    def pages(self) -> PageTable:
        """Where the tokens of each row lie, if all rows fit at once."""
        return self.chunks[0].pages

    def converted(self, view: LatentView) -> MLAView:
        """A layer's latents on these pages, once the pass has stored its own."""
        (chunk,) = self.chunks
        return self._converted(view, chunk)

    def _converted(self, view: LatentView, chunk: Segment) -> MLAView:
        upconvert(view, self.prompt.pages, chunk.cache_seqlens, self.starts_B, self.max_len, self.latent_NL)
        return MLAView(self.latent_NL, view.rank)


def _is_sized(plan: AttentionPlan, view: LatentView, limits: Limits) -> bool:
    """Whether a plan is one of prompts whose 8-bit latents are worth converting, and the host knows how many there are."""
    prompt = plan.segments[0]
    sized = view.is_lossy and prompt.causal and prompt.max_cached is not None and prompt.starts_T is None
    return sized and len(plan.parts) == 1 and plan.context_parallel is None and prompt.max_seqlen_q >= limits.convert_from


def _longest(prompt: Segment) -> int:
    """No row has more latents."""
    assert prompt.max_cached is not None
    return min(prompt.max_cached + prompt.max_seqlen_q, prompt.pages.capacity)


def _room(prompt: Segment) -> int:
    """Tokens of a row in the workspace, in whole pages."""
    return -(-_longest(prompt) // PAGE) * PAGE
