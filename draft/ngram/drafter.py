"""The n-gram drafter: proposes what followed the text's last tokens where they stood before (prompt lookup).

It keeps the token ids of each sequence by slot, in the target's pages, so it keeps nothing by row and needs no features.  This
module knows texts and trees, no model.

Shapes: B sequences, E emitted tokens of a row with padding, M continuations, S tokens of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.drafter import Drafter, DrafterContext, DraftModel, DraftNeeds
from specdec.draft.kind import SUFFIX
from specdec.draft.ngram.grow import grow
from specdec.draft.ngram.lookup import PagedTexts, continuations, find_matches
from specdec.draft.ngram.source import OwnTextFinder
from specdec.draft.ngram.store import ENTRY_BYTES
from specdec.steps import Needs


class NgramModel(DraftModel):
    """The drafter before it has a batch.  vocab_size: the target's."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(features=None, slot_bytes=ENTRY_BYTES)

    @property
    def sources(self) -> tuple[str, ...]:
        return (SUFFIX,)

    def check(self, spec: SpecConfig) -> None:
        M = num_continuations(spec)
        if spec.topk > 1 and M * (spec.max_steps + 1) > self.vocab_size:
            raise ValueError(
                f"a tree of n-grams needs a vocabulary of at least {M * (spec.max_steps + 1)} tokens for "
                f"SpecConfig({spec.label}), got {self.vocab_size}; nearest setting that works: topk=1"
            )

    @property
    def description(self) -> str:
        return "n-grams: what followed the text's last tokens where they stood before"

    def worker(self, context: DrafterContext) -> NgramDrafter:
        return NgramDrafter(context)


class NgramDrafter(Drafter):
    """Trees have the continuations of the best places as their paths; a chain has that of the best one."""

    keeps_text = True
    catches_up = False

    def __init__(self, context: DrafterContext) -> None:
        self.finder = OwnTextFinder(context)
        self.caches = self.finder.caches

    def text(self, state: BatchState) -> PagedTexts:
        return self.finder.text(state)

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        text = self.text(state)
        matches = find_matches(text, self.finder.rows.narrow(state.rows).back_R, num_continuations(spec))
        tokens_BMS, lengths_BM = continuations(text, matches, spec.max_steps), matches.lengths_BM.clamp(min=0)
        return _tree_of(state, spec, tokens_BMS, lengths_BM)

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        self.finder.extend(state, new)

    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        self.finder.prefill(state, prompts, first_B)

    def keep(self, state: BatchState, new: NewTokens) -> None:
        self.finder.keep(state, new)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        """Nothing: `keep` has written the tokens where they belong."""


def _tree_of(state: BatchState, spec: SpecConfig, tokens_BMS: Tensor, lengths_BM: Tensor) -> DraftTree:
    """A chain of the continuation after the longest match, or a tree of all."""
    if spec.topk == 1:
        best_B11 = lengths_BM.argmax(1)[:, None, None]
        tokens_BS = tokens_BMS.gather(1, best_B11.expand(-1, 1, spec.max_steps))[:, 0]
        return DraftTree.chain(torch.cat((state.bonus_B[:, None], tokens_BS), dim=1))
    return grow(tokens_BMS, lengths_BM, state.bonus_B, spec.num_draft_tokens)


def num_continuations(spec: SpecConfig) -> int:
    """M: as many as there are branches, or more where a tree needs more nodes than these have."""
    return 1 if spec.topk == 1 else max(spec.topk, -(-(spec.num_draft_tokens - 1) // spec.max_steps))
