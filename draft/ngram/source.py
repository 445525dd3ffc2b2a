"""Matches in each row's own text as a source of paths: what followed the text's last tokens where they stood before.

The text is kept by slot, in the target's pages; nothing is kept by row.  On a CPU the definition here runs; on a GPU two
launches do, of the search for places and of paths_triton.py.

Shapes: B rows, P = 2 paths, D tokens of a path, M matches, T tokens of ragged prompts, E emitted tokens of a row with padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.draft.drafter import DrafterContext
from specdec.draft.join.paths import Paths
from specdec.draft.join.source import PathFinder, PathSource
from specdec.draft.join.survival import ONCE, PathClass, support_of
from specdec.draft.kind import SUFFIX
from specdec.draft.ngram.lookup import PagedTexts, best_keys, continuations, matches_of
from specdec.draft.ngram.store import ENTRY_BYTES, TokenStore
from specdec.ops.index import arange, use_index_kernels
from specdec.options import EngineOptions

# What is expected of the first token after a match of so many tokens before anything was seen.
FIRST = (0.01, 0.15, 0.25, 0.45, 0.55, 0.6, 0.65, 0.7, 0.8)
MATCHES = 4  # of a text's best places that are looked at
NONE = -(2**30)  # below what any place is rated


class OwnText(PathSource):
    """The best match, and the best one that goes on otherwise."""

    name = SUFFIX
    classes = (PathClass(FIRST), PathClass(tuple(0.8 * rate for rate in FIRST)))
    paths = (0, 1)
    slot_bytes = ENTRY_BYTES
    fills = True
    description = "matches in the text"

    def finder(self, context: DrafterContext) -> OwnTextFinder:
        return OwnTextFinder(context)


class OwnTextFinder(PathFinder):
    """Keeps the texts, and finds how their ends went on before."""

    def __init__(self, context: DrafterContext) -> None:
        self.store, self.span = TokenStore(context.slots, context.device), context.span
        self.caches = (self.store,)

    def text(self, state: BatchState) -> PagedTexts:
        return PagedTexts(self.store.tokens_N, state.pages, state.lens_B, self.span)

    def fill(self, state: BatchState, depth: int, out: Paths) -> None:
        fill_paths(self.text(state), depth, out)

    def extend(self, state: BatchState, new: NewTokens) -> None:
        """Padding comes after the text's end, where nobody reads."""
        self.store.append(state.pages, new.base_lens_B, new.tokens_BE)

    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor) -> None:
        (tables,) = prompts.tables_of([0])
        self.store.write(tables.slots_T, prompts.next_ids(first_B))


def fill_paths(text: PagedTexts, depth: int, out: Paths) -> None:
    """Writes what follows the best place of each text, and the best place that goes on otherwise; see `PathFinder.fill`.

    Of equally long matches among the best MATCHES the one counts as best that most of them agree with, and of such the latest.
    Without a second place the second path is the first one, of length 0.
    """
    if use_index_kernels(text.lens_B):
        from specdec.draft.ngram.lookup_triton import launch_match_keys
        from specdec.draft.ngram.paths_triton import launch_paths

        return launch_paths(text, launch_match_keys(text, MATCHES), MATCHES, depth, out)
    return paths_of(text, best_keys(text, MATCHES), depth, out)


def paths_of(text: PagedTexts, keys_BM: Tensor, depth: int, out: Paths) -> None:
    """The same from the best keys, the best one first; by definition."""
    matches = matches_of(keys_BM)
    found_BM, lengths_BM = matches.found_BM, matches.lengths_BM
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
    out.tokens_BPD.fill_(-1)
    chosen_BPD = chosen_BP[..., None].expand(-1, -1, depth)
    out.tokens_BPD[..., :depth] = continuations(text, matches, depth).gather(1, chosen_BPD)
    out.lengths_BP.copy_(torch.where(is_found_BP, lengths_BM.gather(1, chosen_BP), 0))
    support_BM = support_of(agree_BM, total_BM)
    out.support_BP.copy_(torch.where(is_found_BP, support_BM.gather(1, chosen_BP), ONCE))


def open_source(options: EngineOptions) -> PathSource:
    return OwnText()
