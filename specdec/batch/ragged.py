"""Ragged prompts, parts of prompts one after the other without padding: what one pass over a chunk of prompts reads.

The host writes all numbers of a chunk into one flat tensor (`flat_chunk`), which travels to the device in one copy.  Everything
else is computed on the device (`RaggedPrompts.from_flat`).  That code is the same for a fresh tensor and for the static input
of a CUDA graph.  This module knows no model and no request.

Shapes: T tokens of all parts, B parts, W pages per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.attention.attend import PassTables
from specdec.attention.encoder.encoder_texts import EncoderTexts
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.limits import DUMMY_PAGE, TRASH
from specdec.steps import PromptPart

NOT_KEPT = (TRASH, 0)


class ChunkShape(NamedTuple):
    """What a pass over a chunk depends on besides the numbers in the flat tensor; the host knows all of it."""

    tokens: int  # padding included
    parts: int  # padding included
    most: int  # tokens of one part
    uniform: bool  # whether every part has exactly `most` tokens
    cached: int | None  # the most tokens that any part finds in the cache; None: the shape serves other chunks too
    states: bool = False  # whether the target has recurrent layers, of which parts keep states

    @classmethod
    def of(cls, parts: Sequence[PromptPart], states: bool = False) -> ChunkShape:
        """The exact shape of these parts, without padding."""
        counts = [len(part.token_ids) for part in parts]
        cached = max(part.start for part in parts)
        return cls(sum(counts), len(parts), max(counts), min(counts) == max(counts), cached, states)

    @property
    def size(self) -> int:
        """The length of the flat tensor."""
        return 4 * self.tokens + (7 if self.states else 5) * self.parts + 1


def flat_chunk(parts: Sequence[PromptPart], shape: ChunkShape, spare_row: int, *, pinned: bool = False) -> Tensor:
    """[shape.size] int64 on the host: all numbers of these parts.

    spare_row: the row of the batch that padding parts belong to.  pinned: allocate pinned memory.

    The flat tensor holds four numbers for each token: its id, its position, its part (-1 for padding), and the id of the token
    after it (-1 after the last token of a prompt).  Then it holds four numbers for each part: its row, the index of its last
    token among all T, the number of its prompt's tokens up to that one, and whether the prompt ends there (1 or 0).  Then come
    the cumulative token counts of the parts, which begin with 0.  With states, the numbers of PromptPart.keep are the last, and
    their counts of tokens.  Padding comes last in each of these groups.
    """
    T, B = shape.tokens, shape.parts
    counts = [len(part.token_ids) for part in parts]
    used, rows = sum(counts), len(parts)
    assert used <= T and rows <= B and min(counts) > 0 and max(counts) <= shape.most
    flat = torch.zeros(shape.size, dtype=torch.int64, pin_memory=pinned, device="cpu")
    numbers = flat.numpy()
    ids_T, positions_T, part_T, next_T = numbers[: 4 * T].reshape(4, T)
    rows_B, last_B, lens_B, final_B = numbers[4 * T : 4 * T + 4 * B].reshape(4, B)
    cu = numbers[4 * T + 4 * B : 4 * T + 5 * B + 1]
    if shape.states:
        kept = [part.keep or NOT_KEPT for part in parts] + [NOT_KEPT] * (B - rows)
        numbers[4 * T + 5 * B + 1 :].reshape(2, B)[:] = np.array(kept).T
    part_T[used:] = -1
    rows_B[rows:] = spare_row
    cu[1:] = used
    at = 0
    for index, (part, count) in enumerate(zip(parts, counts, strict=True)):
        end = at + count
        ids_T[at:end] = part.token_ids
        positions_T[at:end] = np.arange(part.start, part.end)
        part_T[at:end] = index
        next_T[at : end - 1] = ids_T[at + 1 : end]
        next_T[end - 1] = part.next_token
        rows_B[index], last_B[index], lens_B[index], final_B[index] = part.row, end - 1, part.end, part.is_last
        cu[index + 1] = at = end
    return flat


class ScoredTokens(NamedTuple):
    """The tokens of scored parts (see PromptPart).  rows_R: int64, which of the chunk's T tokens.  top: see RunChunk.tops."""

    rows_R: Tensor
    top: int


def scored_places(parts: Sequence[PromptPart]) -> list[int]:
    """The places among a chunk's tokens of those after which a scored token comes."""
    places, at = list[int](), 0
    for part in parts:
        places += range(at, at + part.num_scores)
        at += len(part.token_ids)
    return places


@dataclass(frozen=True)
class RaggedPrompts:
    """A chunk of prompts on the device.

    ids_T, positions_T: int64, each token's id and position.
    rows_B: int64, the row of the batch that each part belongs to.
    last_B: int64, the index of each part's last token among all T.
    lens_B: int32, how many tokens each part's prompt has up to the part's last token.
    final_B: int32, 1 where the prompt ends with the part, else 0.
    part_T: int64, the part that each token belongs to; -1 for padding.
    next_T: int64, the id of the token after each token; -1 after the last token of a prompt.
    tables: for each group of layers, where the tokens stand; the rows of a rows_plan are the parts' last tokens.
    cu_B1: int32, the parts' cumulative token counts.  most: the most tokens of a part.
    keep_2B: int64, numbers and tokens of PromptPart.keep, or NOT_KEPT; None: the target has no recurrent layers.
    """

    ids_T: Tensor
    positions_T: Tensor
    rows_B: Tensor
    last_B: Tensor
    lens_B: Tensor
    final_B: Tensor
    part_T: Tensor
    next_T: Tensor
    tables: tuple[PassTables, ...]
    cu_B1: Tensor
    most: int
    keep_2B: Tensor | None = None

    @classmethod
    def from_flat(
        cls, flat: Tensor, shape: ChunkShape, *prompt_pages: PageTable, encoder_texts: EncoderTexts | None = None
    ) -> RaggedPrompts:
        """Computes everything from the flat tensor, without a host read, so that the code runs inside CUDA graphs.

        flat: the result of `flat_chunk` for that shape, on the device.
        prompt_pages: for each group of layers, the pages of every row of the batch.
        encoder_texts: the encoder's text that every row of the batch reads; None: there is no encoder.
        """
        T, B = shape.tokens, shape.parts
        ids_T, positions_T, part_T, next_T = flat[: 4 * T].view(4, T)
        rows_B, last_B, lens_B, final_B = flat[4 * T : 4 * T + 4 * B].view(4, B)
        lens_B, final_B, cu = lens_B.int(), final_B.int(), flat[4 * T + 4 * B : 4 * T + 5 * B + 1].int()
        keep_2B = flat[4 * T + 5 * B + 1 :].view(2, B) if shape.states else None
        ragged = not shape.uniform
        read = None if encoder_texts is None else encoder_texts.of_rows(rows_B)

        def tables(of_all: PageTable) -> PassTables:
            table_BW, page_size = pages = PageTable(of_all.table.index_select(0, rows_B), of_all.page_size)
            pages_T = table_BW.flatten()[part_T.clamp(min=0) * table_BW.shape[1] + positions_T // page_size]
            pages_T = torch.where(part_T < 0, DUMMY_PAGE, pages_T)
            slots_T = pages_T.long() * page_size + positions_T % page_size
            whole = Segment(pages, lens_B, cu, shape.most, True, ragged=ragged, max_cached=shape.cached, fresh="queries")
            plan = AttentionPlan((whole,), positions_T, cross=read and read.read_by_rows_of(cu, shape.most, ragged=ragged))
            last_plan = AttentionPlan((causal_segment(pages, lens_B, 1),), cross=read and read.read_by(1))
            return PassTables(plan, slots_T, last_plan)

        by_group = tuple(map(tables, prompt_pages))
        numbers = ids_T, positions_T, rows_B, last_B, lens_B, final_B, part_T, next_T
        return cls(*numbers, by_group, cu, shape.most, keep_2B)

    def tables_of(self, groups: Iterable[int]) -> list[PassTables]:
        """The tables of these groups of layers."""
        return [self.tables[group] for group in groups]

    def known_or(self, first_B: Tensor) -> Tensor:
        """[B] int64: the id of the token after each part where it is known, else that of first_B."""
        next_B = self.next_T.index_select(0, self.last_B)
        return torch.where(next_B < 0, first_B, next_B)

    def next_ids(self, first_B: Tensor) -> Tensor:
        """[T] int64: the id of the token after each token.

        first_B: int64, the first output token of each part's prompt; it comes after the prompt's last token.
        """
        return torch.where(self.next_T < 0, first_B.index_select(0, self.part_T.clamp(min=0)), self.next_T)
