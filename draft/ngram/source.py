"""Matches in each row's own text as a source of paths: what followed the text's last tokens where they stood before.

The text is kept by slot, in the target's pages; a row keeps the place that its text followed last.  On a CPU the definition
here runs; on a GPU two launches do, of the search for places and of paths_triton.py.

Shapes: B rows, P = 2 paths, D tokens of a path, M matches, T tokens of ragged prompts, E emitted tokens of a row with padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.draft.drafter import DrafterContext, Rows
from specdec.draft.join.paths import Paths
from specdec.draft.join.source import PathFinder, PathSource
from specdec.draft.join.survival import IN_STEP, ONCE, PathClass, support_of
from specdec.draft.kind import SUFFIX
from specdec.draft.ngram.lookup import (
    Matches,
    PagedTexts,
    best_keys,
    continuations,
    first_entries,
    in_step,
    match_lengths,
    matches_of,
)
from specdec.draft.ngram.store import ENTRY_BYTES, TokenStore
from specdec.ops.index import arange, use_index_kernels
from specdec.options import EngineOptions

# What is expected of the first token after a match of so many tokens before anything was seen.
FIRST = (0.01, 0.15, 0.25, 0.45, 0.55, 0.6, 0.65, 0.7, 0.8)
MATCHES = 4  # of a text's best places that are looked at
LEAST = 2  # threshold: a text is taken to follow a match of so many tokens; a shorter one may be by chance
NONE = -(2**30)  # below what any place is rated


class OwnText(PathSource):
    """The best match; and how a text goes on in step with what it followed, or the best match that goes on otherwise."""

    name = SUFFIX
    classes = (PathClass(FIRST), PathClass(tuple(0.8 * rate for rate in FIRST)))
    paths = (0, 1)
    slot_bytes = ENTRY_BYTES
    fills = True
    description = "matches in the text"

    def row_bytes(self, positions: int) -> int:
        return torch.int64.itemsize

    def finder(self, context: DrafterContext) -> OwnTextFinder:
        return OwnTextFinder(context)


@dataclass(frozen=True)
class FollowedRows(Rows):
    """back_R: int64, how far before its end each row's text stands in the place that it followed last; 0: it followed none.

    Text and place move on together, also where nobody drafts, so that only a draft changes this.
    """

    back_R: Tensor


class OwnTextFinder(PathFinder):
    """Keeps the texts, and finds how their ends went on before."""

    rows: FollowedRows

    def __init__(self, context: DrafterContext) -> None:
        self.store, self.span = TokenStore(context.slots, context.device), context.span
        self.caches = (self.store,)
        self.rows = FollowedRows(torch.zeros(context.rows, dtype=torch.int64, device=context.device))

    def text(self, state: BatchState) -> PagedTexts:
        return PagedTexts(self.store.tokens_N, state.pages, state.lens_B, self.span)

    def fill(self, state: BatchState, depth: int, out: Paths) -> None:
        fill_paths(self.text(state), self.rows.narrow(state.rows).back_R, depth, out)

    def extend(self, state: BatchState, new: NewTokens) -> None:
        """Padding comes after the text's end, where nobody reads."""
        self.store.append(state.pages, new.base_lens_B, new.tokens_BE)

    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor) -> None:
        (tables,) = prompts.tables_of([0])
        self.store.write(tables.slots_T, prompts.next_ids(first_B))

    def changed(self, state: BatchState) -> list[Tensor]:
        return [self.rows.narrow(state.rows).back_R]

    def clear_rows(self, rows_R: Tensor) -> None:
        self.rows.back_R.index_fill_(0, rows_R, 0)


def fill_paths(text: PagedTexts, back_B: Tensor, depth: int, out: Paths) -> None:
    """Writes two paths of each text, see `PathFinder.fill`, and the place that it follows.

    The first path goes on from the best place.  Of equally long matches among the best MATCHES the one counts as best that most
    of them agree with, and of such the nearest to where the text would be if it had kept pace with the place that it followed.
    The second path goes on from there: so after a word that was replaced by one as long it needs no match.  If both are one, it
    is what follows the best place that goes on otherwise; without any it is the first path, of length 0.

    back_B: int64, see FollowedRows; changed where the best match has LEAST tokens.
    """
    if use_index_kernels(text.lens_B):
        from specdec.draft.ngram.lookup_triton import launch_match_keys
        from specdec.draft.ngram.paths_triton import launch_paths

        return launch_paths(text, launch_match_keys(text, back_B, MATCHES), MATCHES, LEAST, back_B, depth, out)
    return paths_of(text, best_keys(text, back_B, MATCHES), back_B, depth, out)


def paths_of(text: PagedTexts, keys_BM: Tensor, back_B: Tensor, depth: int, out: Paths) -> None:
    """The same from the best keys, the best one first; by definition."""
    at_B = in_step(text, back_B)
    matches = matches_of(keys_BM, at_B)
    ends_BM, lengths_BM, found_BM = matches
    first_BM = continuations(text, matches, 1)[..., 0]
    alike_BMM = (lengths_BM[:, :, None] == lengths_BM[:, None]) & found_BM[:, :, None] & found_BM[:, None]
    total_BM, agree_BM = alike_BMM.sum(-1), (alike_BMM & (first_BM[:, :, None] == first_BM[:, None])).sum(-1)
    rated_BM = torch.where(found_BM, (lengths_BM * (MATCHES + 1) + agree_BM) * MATCHES - arange(MATCHES, keys_BM.device), NONE)
    best_B1 = rated_BM.argmax(1, keepdim=True)
    others_BM = torch.where(first_BM == first_BM.gather(1, best_B1), NONE, rated_BM)
    other_B1 = others_BM.argmax(1, keepdim=True)
    has_other_B1 = others_BM.gather(1, other_B1) > NONE
    chosen_BP = torch.cat((best_B1, torch.where(has_other_B1, other_B1, best_B1)), dim=1)
    is_found_BP = torch.cat((found_BM.gather(1, best_B1), has_other_B1), dim=1)
    ends_BP, lengths_BP = ends_BM.gather(1, chosen_BP), lengths_BM.gather(1, chosen_BP)
    support_BP = support_of(agree_BM, total_BM).gather(1, chosen_BP)
    follows_B = (back_B > 0) & (at_B >= first_entries(text)[:, 0])
    is_second_B = follows_B & (at_B != ends_BP[:, 0])
    ends_BP[:, 1] = torch.where(is_second_B, at_B, ends_BP[:, 1])
    lengths_BP[:, 1] = torch.where(is_second_B, match_lengths(text, at_B), lengths_BP[:, 1])
    is_found_BP[:, 1] |= is_second_B
    support_BP = torch.where(follows_B[:, None] & (ends_BP == at_B[:, None]), IN_STEP, support_BP)
    out.tokens_BPD.fill_(-1)
    out.tokens_BPD[..., :depth] = continuations(text, Matches(ends_BP, lengths_BP, found_BM[:, :1].expand_as(ends_BP)), depth)
    out.lengths_BP.copy_(torch.where(is_found_BP, lengths_BP, 0))
    out.support_BP.copy_(torch.where(is_found_BP, support_BP, ONCE))
    is_followed_B = is_found_BP[:, 0] & (lengths_BP[:, 0] >= LEAST)
    back_B.copy_(torch.where(is_followed_B, text.lens_B - 1 - ends_BP[:, 0], back_B))


def open_source(options: EngineOptions) -> PathSource:
    return OwnText()
