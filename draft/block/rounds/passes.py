"""The one pass of a head over a batch: what it reads, where that is stored, and the hidden states of the tokens that it drafts.

A pass takes what each row has emitted since the last one, with the target's features, and a block after it.  Keys and values of
the block's unknown rows lie after the committed tokens, and the next pass writes over them.  This module knows heads, pages and
attention; it knows neither trees nor rounds.

Shapes: B rows, E emitted tokens of a row with padding, S tokens drafted, N rows of a block, W = E + S - 1 pairs, T
tokens of ragged prompts, C context rows, H hidden, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.inputs import AttentionFn, LayerInputs
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.shared import SharedPrefix, split_shared
from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.draft.block.rounds.pairs import fill_pairs
from specdec.draft.block.rounds.tables import BlockTables, block_tables
from specdec.ops.index import arange
from specdec.ops.rows import take_rows, take_run

if TYPE_CHECKING:
    from specdec.draft.block.dflash import DFlashHead
    from specdec.draft.block.peagle import PEagleHead


class PassPages(NamedTuple):
    """Where rows lie, for each group of the cache's layers.  shared: pages that the rows of the group read together."""

    tables: list[PageTable]
    shared: list[SharedPrefix | None]

    @classmethod
    def of_rows(cls, state: BatchState, groups: Sequence[int]) -> PassPages:
        """The rows of a running batch."""
        states = [state.of_group(group) for group in groups]
        return cls([each.pages for each in states], [each.shared for each in states])

    @classmethod
    def of_prompts(cls, state: BatchState, groups: Sequence[int], rows_B: Tensor) -> PassPages:
        """The rows that the parts of a chunk of prompts belong to."""
        whole = [state.of_group(group).prompt_pages for group in groups]
        return cls([PageTable(each.table.index_select(0, rows_B), each.page_size) for each in whole], [None] * len(whole))


class BlockPass(ABC):
    """steps: S."""

    def __init__(self, backend: Backend, cache: KVCache, steps: int) -> None:
        self.backend, self.cache, self.steps = backend, cache, steps

    @abstractmethod
    def after(self, new: NewTokens, lens_B: Tensor, pages: PassPages, out: Tensor | None = None) -> Tensor:
        """[B, S, H]: the pass over a batch of rows.

        new: with features.  lens_B: int32, the lengths with them.  out: memory for the result, contiguous.
        """

    @abstractmethod
    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> Tensor:
        """[B, S, H]: the pass over parts of prompts; what it drafts after a part counts if the prompt ends there."""


class PairPass(BlockPass):
    """P-EAGLE's pass.  A row's true pairs come first, and unknown ones at once after the last of them."""

    def __init__(self, head: PEagleHead, backend: Backend, cache: KVCache, steps: int) -> None:
        super().__init__(backend, cache, steps)
        self.head = head
        self.mask_1H = head.mask_feature().detach()

    def after(self, new: NewTokens, lens_B: Tensor, pages: PassPages, out: Tensor | None = None) -> Tensor:
        assert new.features_BEF is not None
        (B, E), S = new.tokens_BE.shape, self.steps
        W = E + S - 1
        tables, positions_T = [], None
        for table, shared in zip(pages.tables, pages.shared, strict=True):
            rows = table.next_tokens(new.base_lens_B, W)
            positions_T = rows.positions.flatten() if positions_T is None else positions_T
            segment = causal_segment(table, rows.ends_PB[-1], W, "queries")
            tables.append(PassTables(AttentionPlan(split_shared(segment, shared), positions_T), rows.slots.flatten()))
        fused_BEH = self.head.fuse(new.features_BEF.flatten(0, 1)).view(B, E, -1)
        ids_BW, fused_BWH = fill_pairs(new.tokens_BE, new.last_B, fused_BEH, self.head.block.mask_id, self.mask_1H, W)
        assert positions_T is not None
        attn = PagedAttention(self.backend, self.cache, *tables)
        hidden_TH = self.head(ids_BW.flatten(), fused_BWH.flatten(0, 1), positions_T, attn)
        return take_run(hidden_TH.view(B, W, -1), new.last_B, S, out)

    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> Tensor:
        """Two passes: over the prompts' pairs, and over the last of each with unknown ones after it."""
        groups = self.cache.group_numbers
        attn = PagedAttention(self.backend, self.cache, *prompts.tables_of(groups))
        ids_T = prompts.next_ids(first_B)
        self.head(ids_T, self.head.fuse(features_TF), prompts.positions_T, attn, prompts.last_B)
        last_features_B1F = features_TF.index_select(0, prompts.last_B)[:, None]
        last_ids_B1 = ids_T.index_select(0, prompts.last_B)[:, None]
        before_B = (prompts.lens_B - 1).clamp(min=0)
        new = NewTokens(before_B, last_ids_B1, torch.zeros_like(prompts.last_B), last_features_B1F)
        return self.after(new, prompts.lens_B, PassPages.of_prompts(state, groups, prompts.rows_B))


class ContextPass(BlockPass):
    """DFlash's and DSpark's pass: keys and values of the new context rows, and a whole block of N rows."""

    def __init__(self, head: DFlashHead, backend: Backend, cache: KVCache, steps: int) -> None:
        super().__init__(backend, cache, steps)
        self.head = head
        self.ways = [BlockMasking.of(head, index) for index in range(head.config.model.num_layers)]

    def after(self, new: NewTokens, lens_B: Tensor, pages: PassPages, out: Tensor | None = None) -> Tensor:
        assert new.features_BEF is not None
        block = self.head.block
        made = [
            block_tables(table, new.base_lens_B, lens_B, new.tokens_BE, new.last_B, block.size, block.mask_id)
            for table in pages.tables
        ]
        hidden_BSH = self._run(made, lens_B, new.features_BEF.flatten(0, 1), pages)
        if out is None:
            return hidden_BSH
        B, S = hidden_BSH.shape[:2]
        return take_rows(hidden_BSH, arange(S, hidden_BSH.device).expand(B, S), out)

    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> Tensor:
        groups, block = self.cache.group_numbers, self.head.block
        pages = PassPages.of_prompts(state, groups, prompts.rows_B)
        anchors_B = prompts.next_ids(first_B).index_select(0, prompts.last_B)
        ids_BN = self.head.block_ids(anchors_B)
        made = []
        for table, kept in zip(pages.tables, prompts.tables_of(groups), strict=True):
            rows = table.next_tokens(prompts.lens_B, block.size)
            at_T = torch.cat((rows.positions.flatten(), prompts.positions_T))
            made.append(BlockTables(ids_BN, at_T, torch.cat((rows.slots.flatten(), kept.slots_T)), rows.ends_PB[-1]))
        return self._run(made, prompts.lens_B, features_TF, pages)

    def _run(self, made: list[BlockTables], lens_B: Tensor, features_CF: Tensor, pages: PassPages) -> Tensor:
        """made: for each group of layers.  lens_B: int32, where blocks begin.  features_CF: of the new context rows."""
        head, (B, N) = self.head, made[0].ids_BN.shape
        positions_T = made[0].positions_T[: B * N]
        attentions = {}
        for way in dict.fromkeys(self.ways):
            tables = []
            for table, shared, own in zip(pages.tables, pages.shared, made, strict=True):
                plan = AttentionPlan(way.segments(table, lens_B, own.ends_B, N, shared), positions_T)
                tables.append(PassTables(plan, own.slots_T))
            attentions[way] = PagedAttention(self.backend, self.cache, *tables)
        attn = ByLayer([attentions[way] for way in self.ways]) if len(attentions) > 1 else attentions[self.ways[0]]
        hidden_TH = head(made[0].ids_BN.flatten(), head.fuse(features_CF), made[0].positions_T, attn)
        first = int(head.block.skips_anchor)
        return hidden_TH.view(B, N, -1)[:, first : first + self.steps]


class BlockMasking(NamedTuple):
    """How layers read a block.  causal: whether its rows read no later ones.  window: of layers whose windows are counted back
    from the block's first row; 0: each row's own kind says what it reads of the context.
    """

    causal: bool
    window: int

    @classmethod
    def of(cls, head: DFlashHead, layer: int) -> BlockMasking:
        kind: LayerKind = head.config.model.layer_kinds[layer]
        is_anchored = head.block.anchored_windows and kind.window is not None
        return cls(head.block.causal[layer], (kind.window or 0) if is_anchored else 0)

    def segments(
        self, table: PageTable, lens_B: Tensor, ends_B: Tensor, rows: int, shared: SharedPrefix | None
    ) -> tuple[Segment, ...]:
        """lens_B, ends_B: int32, the positions of a block's first row and of the place after its last one."""
        segment = (causal_segment if self.causal else prefix_segment)(table, ends_B, rows)
        if not self.window:
            return split_shared(segment, shared)
        starts_B = (lens_B - (self.window - rows)).clamp(min=0)
        return (replace(segment, starts_T=starts_B.repeat_interleave(rows)),)


class ByLayer:
    """Implements the models' AttentionFn: an attention for each layer."""

    def __init__(self, attentions: Sequence[AttentionFn]) -> None:
        self.attentions = attentions

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        return self.attentions[layer](layer, inputs, rows_R, scoring)
