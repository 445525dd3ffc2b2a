"""Matches in each row's own text as a source of paths: what followed the text's last tokens where they stood before.

The text is kept by slot, in the target's pages; nothing is kept by row.  On a CPU the definition here runs; on a GPU two
launches do, of the search for places and of paths_triton.py.

Shapes: B rows, P paths, D tokens of a path, M matches, T tokens of ragged prompts, E emitted tokens of a row with padding.
"""

from __future__ import annotations

from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.draft.drafter import DrafterContext
from specdec.draft.join.paths import Paths
from specdec.draft.join.source import PathFinder, PathSource
from specdec.draft.join.survival import PathClass
from specdec.draft.kind import SUFFIX
from specdec.draft.ngram.lookup import PagedTexts, best_keys, continuations, matches_of
from specdec.draft.ngram.store import ENTRY_BYTES, TokenStore
from specdec.ops.index import use_index_kernels
from specdec.options import EngineOptions

# What is expected of the first token after a match of so many tokens before anything was seen.
FIRST = (0.01, 0.15, 0.25, 0.45, 0.55, 0.6, 0.65, 0.7, 0.8)
MATCHES = 2  # paths of a row


class OwnText(PathSource):
    """The best match, and one more of another class."""

    name = SUFFIX
    classes = (PathClass(FIRST), PathClass(tuple(0.8 * rate for rate in FIRST)))
    paths = (0, *[1] * (MATCHES - 1))
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
        rows = state.pages.next_tokens(new.base_lens_B, new.tokens_BE.shape[1])
        self.store.write(rows.slots.flatten(), new.tokens_BE.flatten())

    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor) -> None:
        (tables,) = prompts.tables_of([0])
        self.store.write(tables.slots_T, prompts.next_ids(first_B))


def fill_paths(text: PagedTexts, depth: int, out: Paths) -> None:
    """Writes what follows the best places of each text; see `PathFinder.fill`.  There are as many places as paths."""
    keys_BM = best_keys(text, out.tokens_BPD.shape[1])
    if use_index_kernels(text.lens_B):
        from specdec.draft.ngram.paths_triton import launch_paths

        return launch_paths(text, keys_BM, depth, out)
    matches = matches_of(keys_BM)
    out.tokens_BPD.fill_(-1)
    out.tokens_BPD[..., :depth] = continuations(text, matches, depth)
    out.lengths_BP.copy_(matches.lengths_BM.clamp(min=0))


def open_source(options: EngineOptions) -> PathSource:
    return OwnText()
