"""The draft worker of a small model: prompts are read as they stand, and then the token after them.

Rounds, chains and trees are the draft worker's own (draft/eagle/worker.py), one row further.

Shapes: B parts of prompts, T tokens of ragged prompts, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from specdec.attention.attend import PassTables
from specdec.attention.plan import causal_segment
from specdec.attention.segment import AttentionPlan
from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.draft.eagle.worker import DraftWorker


class SmallModelWorker(DraftWorker):
    """Runs a model that reads token ids alone over the running batch."""

    def _fused(self, new: NewTokens) -> Tensor:
        return self.rows.level1_hidden_BH  # which the model does not read

    def _read_prompts(self, prompts: RaggedPrompts, next_ids_T: Tensor, features_TH: Tensor) -> Tensor:
        """Runs the model over parts of prompts, and over the token after each part.

        The hidden state [B, H] after that token leads to the first level where the prompt ends.  Elsewhere it leads nowhere,
        and the next part writes the token's keys and values again.
        """
        groups, last_B = self.cache.group_numbers, prompts.last_B
        tables = prompts.tables_of(groups)
        self.head(prompts.ids_T, features_TH, prompts.positions_T, self.attention_of(tables), last_B)
        after = [after_parts(each, prompts.lens_B) for each in tables]
        positions_B = after[0].plan.positions_T
        assert positions_B is not None
        return self.head(next_ids_T.index_select(0, last_B), features_TH, positions_B, self.attention_of(after))


def after_parts(tables: PassTables, lens_B: Tensor) -> PassTables:
    """Where the one token after each part stands.  tables: of the parts.  lens_B: int32, how long the texts are up to it."""
    (whole,) = tables.plan.segments
    rows = whole.pages.next_tokens(lens_B, 1)
    segment = causal_segment(whole.pages, rows.ends_PB[-1], 1, "queries")
    return PassTables(AttentionPlan((segment,), rows.positions.flatten()), rows.slots.flatten())
