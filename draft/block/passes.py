"""The one pass of a head over a batch: what it reads, where that is stored, and the hidden states of the tokens that it drafts.

A pass takes what each row has emitted since the last one, with the target's features, and a block after it.  Keys and values of
the block's unknown rows lie after the committed tokens, and the next pass writes over them.  This module knows heads, pages and
attention; it knows neither trees nor rounds.

Shapes: B rows, E emitted tokens of a row with padding, S tokens drafted, N rows of a block, W = E + S - 1 pairs, T packed
tokens, C context rows, H hidden, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
from specdec.batch.packed import PackedPrompts
from specdec.batch.state import BatchState
from specdec.draft.block.dflash import DFlashHead
from specdec.draft.block.peagle import PEagleHead
from specdec.limits import DUMMY_PAGE
from specdec.ops.index import arange
from specdec.ops.rows import take_rows


class Pages(NamedTuple):
    """Where rows lie, for each group of the cache's layers.  shared: pages that the rows of the group read together."""

    tables: list[PageTable]
    shared: list[SharedPrefix | None]

    @classmethod
    def of_rows(cls, state: BatchState, groups: Sequence[int]) -> Pages:
        """The rows of a running batch."""
        states = [state.of_group(group) for group in groups]
        return cls([each.pages for each in states], [each.shared for each in states])

    @classmethod
    def of_prompts(cls, state: BatchState, groups: Sequence[int], rows_B: Tensor) -> Pages:
        """The rows that the parts of a chunk of prompts belong to."""
        whole = [state.of_group(group).prompt_pages for group in groups]
        return cls([PageTable(each.table.index_select(0, rows_B), each.page_size) for each in whole], [None] * len(whole))


class Emitted(NamedTuple):
    """What rows have emitted.

    base_lens_B: int32, the committed length before.  lens_B: int32, the length with the tokens up to column last_B.
    tokens_BE: int64; columns after last_B are padding.  last_B: int64, the column of the bonus token.
    features_BEF: for each token, the target's features of the token before it.
    """

    base_lens_B: Tensor
    lens_B: Tensor
    tokens_BE: Tensor
    last_B: Tensor
    features_BEF: Tensor


class BlockPass(ABC):
    """steps: S."""

    def __init__(self, backend: Backend, cache: KVCache, steps: int) -> None:
        self.backend, self.cache, self.steps = backend, cache, steps

    @abstractmethod
    def after(self, emitted: Emitted, pages: Pages) -> Tensor:
        """[B, S, H]: the pass over a batch of rows."""

    @abstractmethod
    def prefill(self, state: BatchState, prompts: PackedPrompts, first_B: Tensor, features_TF: Tensor) -> Tensor:
        """[B, S, H]: the pass over parts of prompts; what it drafts after a part counts if the prompt ends there."""


class PairPass(BlockPass):
    """P-EAGLE's pass.  A row's true pairs come first, and unknown ones at once after the last of them."""

    def __init__(self, head: PEagleHead, backend: Backend, cache: KVCache, steps: int) -> None:
        super().__init__(backend, cache, steps)
        self.head = head
        self.mask_1H = head.mask_feature().detach()

    def after(self, emitted: Emitted, pages: Pages) -> Tensor:
        (B, E), S, device = emitted.tokens_BE.shape, self.steps, emitted.tokens_BE.device
        W = E + S - 1
        is_true_BW = arange(W, device) <= emitted.last_B[:, None]
        ids_BW = torch.where(is_true_BW, F.pad(emitted.tokens_BE, (0, S - 1)), self.head.block.mask_id)
        fused_BWH = F.pad(self.head.fuse(emitted.features_BEF.flatten(0, 1)).view(B, E, -1), (0, 0, 0, S - 1))
        fused_BWH = torch.where(is_true_BW[..., None], fused_BWH, self.mask_1H)
        tables, positions_T = [], None
        for table, shared in zip(pages.tables, pages.shared, strict=True):
            rows = table.next_tokens(emitted.base_lens_B, W)
            positions_T = rows.positions.flatten() if positions_T is None else positions_T
            segment = causal_segment(table, rows.ends_PB[-1], W)
            tables.append(PassTables(AttentionPlan(split_shared(segment, shared), positions_T), rows.slots.flatten()))
        assert positions_T is not None
        attn = PagedAttention(self.backend, self.cache, *tables)
        hidden_TH = self.head(ids_BW.flatten(), fused_BWH.flatten(0, 1), positions_T, attn)
        return take_rows(hidden_TH.view(B, W, -1), emitted.last_B[:, None] + arange(S, device))

    def prefill(self, state: BatchState, prompts: PackedPrompts, first_B: Tensor, features_TF: Tensor) -> Tensor:
        """Two passes: over the prompts' pairs, and over the last of each with unknown ones after it."""
        groups = self.cache.group_numbers
        attn = PagedAttention(self.backend, self.cache, *prompts.tables_of(groups))
        ids_T = prompts.next_ids(first_B)
        self.head(ids_T, self.head.fuse(features_TF), prompts.positions_T, attn, prompts.last_B)
        last_features_B1F = features_TF.index_select(0, prompts.last_B)[:, None]
        last_ids_B1 = ids_T.index_select(0, prompts.last_B)[:, None]
        before_B = (prompts.lens_B - 1).clamp(min=0)
        emitted = Emitted(before_B, prompts.lens_B, last_ids_B1, torch.zeros_like(prompts.last_B), last_features_B1F)
        return self.after(emitted, Pages.of_prompts(state, groups, prompts.rows_B))


class ContextPass(BlockPass):
    """DFlash's and DSpark's pass: keys and values of the new context rows, and a whole block of N rows."""

    def __init__(self, head: DFlashHead, backend: Backend, cache: KVCache, steps: int) -> None:
        super().__init__(backend, cache, steps)
        self.head = head
        self.ways = [Way.of(head, index) for index in range(head.config.model.num_layers)]

    def after(self, emitted: Emitted, pages: Pages) -> Tensor:
        E, device = emitted.tokens_BE.shape[1], emitted.tokens_BE.device
        is_true_BE = arange(E, device) <= emitted.last_B[:, None]
        context = [table.next_tokens(emitted.base_lens_B, E) for table in pages.tables]
        # The block's rows are stored in the slots of what was not accepted.
        slots = [torch.where(is_true_BE, rows.slots, DUMMY_PAGE).flatten() for rows in context]
        anchors_B = emitted.tokens_BE.gather(1, emitted.last_B[:, None])[:, 0]
        features_CF = emitted.features_BEF.flatten(0, 1)
        return self._run(anchors_B, emitted.lens_B, features_CF, context[0].positions.flatten(), slots, pages)

    def prefill(self, state: BatchState, prompts: PackedPrompts, first_B: Tensor, features_TF: Tensor) -> Tensor:
        groups = self.cache.group_numbers
        slots = [tables.slots_T for tables in prompts.tables_of(groups)]
        pages = Pages.of_prompts(state, groups, prompts.rows_B)
        anchors_B = prompts.next_ids(first_B).index_select(0, prompts.last_B)
        return self._run(anchors_B, prompts.lens_B, features_TF, prompts.positions_T, slots, pages)

    def _run(
        self, anchors_B: Tensor, lens_B: Tensor, features_CF: Tensor, at_C: Tensor, slots: list[Tensor], pages: Pages
    ) -> Tensor:
        """anchors_B: int64, the last known tokens.  lens_B: int32, how many tokens come before them.

        features_CF, at_C, slots: of the new context rows, their positions (int64), and their slots (int64) for each group.
        """
        N, head = self.head.block.size, self.head
        block = [table.next_tokens(lens_B, N) for table in pages.tables]
        positions_T = block[0].positions.flatten()
        slots_T = [torch.cat((own.slots.flatten(), kept_C)) for own, kept_C in zip(block, slots, strict=True)]
        attentions = {}
        for way in dict.fromkeys(self.ways):
            tables = []
            for table, shared, own, stored_T in zip(pages.tables, pages.shared, block, slots_T, strict=True):
                plan = AttentionPlan(way.segments(table, lens_B, own.ends_PB[-1], N, shared), positions_T)
                tables.append(PassTables(plan, stored_T, plan))
            attentions[way] = PagedAttention(self.backend, self.cache, *tables)
        attn = ByLayer([attentions[way] for way in self.ways]) if len(attentions) > 1 else attentions[self.ways[0]]
        ids_T = head.block_ids(anchors_B).flatten()
        hidden_TH = head(ids_T, head.fuse(features_CF), torch.cat((positions_T, at_C)), attn)
        first = int(head.block.skips_anchor)
        return hidden_TH.view(len(anchors_B), N, -1)[:, first : first + self.steps]


class Way(NamedTuple):
    """How layers read a block.  causal: whether its rows read no later ones.  window: of layers whose windows are counted back
    from the block's first row; 0: each row's own kind says what it reads of the context.
    """

    causal: bool
    window: int

    @classmethod
    def of(cls, head: DFlashHead, layer: int) -> Way:
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
