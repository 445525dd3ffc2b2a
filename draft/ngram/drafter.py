"""The n-gram drafter: proposes what followed the text's last tokens where they stood before (prompt lookup).

It keeps the token ids of each sequence by slot, in the target's pages, so it keeps nothing by row and needs no features.  This
module knows texts and trees, no model.

Shapes: B sequences, E emitted tokens of a row with padding, M continuations, S tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.drafter import Drafter, DrafterContext, DraftModel, DraftNeeds
from specdec.draft.join.join import sources_of
from specdec.draft.join.paths import Paths
from specdec.draft.kind import PREDICTION, SUFFIX
from specdec.draft.ngram.grow import grow
from specdec.draft.ngram.lookup import continuations, find_matches
from specdec.draft.ngram.source import OwnTextFinder
from specdec.draft.ngram.store import ENTRY_BYTES
from specdec.draft.prediction.source import Predicted
from specdec.steps import Needs, RowEntry

PREDICTION_WORTH = 3  # tokens of a match in the text that a prediction's place is worth beside its own match


class NgramModel(DraftModel):
    """The drafter before it has a batch.  vocab_size: the target's."""

    takes_predictions = True

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(features=None, slot_bytes=ENTRY_BYTES)

    def source_bytes(self, rows: int, positions: int) -> int:
        return rows * Predicted().row_bytes(positions)

    @property
    def sources(self) -> tuple[str, ...]:
        return SUFFIX, PREDICTION

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

    def __init__(self, context: DrafterContext) -> None:
        self.finder, self.predicted = OwnTextFinder(context), Predicted().finder(context)
        self.caches = self.finder.caches
        depth = max(shape.max_steps for shape in context.shapes)
        self.predictions = Paths.empty(context.rows, Predicted.paths, depth, context.device)
        # Under "auto" a round may have fewer levels than its shape, and so more continuations: at most one for each node.
        most = max(max(shape.topk, shape.num_draft_tokens - 1) for shape in context.shapes)
        self.bits_M = torch.tensor([2] * len(Predicted.paths) + [1] * most, dtype=torch.int64, device=context.device)

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        text = self.finder.text(state)
        matches = find_matches(text, num_continuations(spec))
        tokens_BMS, lengths_BM = continuations(text, matches, spec.max_steps), matches.lengths_BM.clamp(min=0)
        if PREDICTION not in needs.steps:
            return _tree_of(state, spec, tokens_BMS, lengths_BM)
        tokens_BMS, lengths_BM = self._with_predictions(state, tokens_BMS, lengths_BM)
        tree = _tree_of(state, spec, tokens_BMS, lengths_BM)
        sources_BN = sources_of(tree, tokens_BMS, self.bits_M[: tokens_BMS.shape[1]])
        return replace(tree, sources_BN=sources_BN.clamp(min=1))  # what fills a tree counts as the text's own

    def _with_predictions(self, state: BatchState, tokens_BMS: Tensor, lengths_BM: Tensor) -> tuple[Tensor, Tensor]:
        """The continuations, after those of the rows' predictions, which go on as the best of the others where they end.

        A place of a prediction is worth as much as a longer match: the request says that the answer goes on there.
        """
        S, paths = tokens_BMS.shape[2], self.predictions.narrow(state.rows)
        self.predicted.fill(state, S, paths)
        own_BPS = paths.tokens_BPD[..., :S]
        worth_BP = torch.where(own_BPS[..., 0] >= 0, paths.lengths_BP + PREDICTION_WORTH, 0)
        own_BPS = torch.where(own_BPS >= 0, own_BPS, tokens_BMS[:, :1])
        return torch.cat((own_BPS, tokens_BMS), dim=1), torch.cat((worth_BP, lengths_BM), dim=1)

    def enter(self, entries: Sequence[RowEntry]) -> None:
        self.predicted.enter(entries)

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        self.finder.extend(state, new)
        if PREDICTION in needs.steps:
            self.predicted.extend(state, new)

    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        self.finder.prefill(state, prompts, first_B)
        self.predicted.prefill(state, prompts, first_B)

    def keep(self, state: BatchState, new: NewTokens) -> None:
        self.finder.extend(state, new)
        self.predicted.extend(state, new)

    def changed(self, state: BatchState) -> list[Tensor]:
        return self.predicted.changed(state)

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        self.predicted.move_rows(sources_R, targets_R)

    def clear_rows(self, rows_R: Tensor) -> None:
        self.predicted.clear_rows(rows_R)

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
