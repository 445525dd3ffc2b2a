"""The draft worker of several MTP layers: each token's pass needs what the layers made of the token before it.

Within a pass that is the row before; at its beginning it is the row's own state, which the last pass left, or, where a prompt
goes on after pages of the prefix cache, what was kept of those pages' last tokens.  This module knows heads and slots.

Shapes: B sequences or parts of prompts, E extend rows, T tokens of ragged prompts, X width of a state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.attend import PassTables
from specdec.batch.ragged import RaggedPrompts
from specdec.draft.drafter import DrafterContext
from specdec.draft.eagle.rows import EagleRows
from specdec.draft.eagle.worker import DraftWorker
from specdec.draft.mtp.head import MtpHead, StatesBefore
from specdec.limits import DUMMY_PAGE
from specdec.ops.index import arange
from specdec.ops.rows import take_rows


class PageEnds:
    """The state of each page's last token, by page of the group of layers in which the heads' layers keep their keys.

    Pages that nobody filled hold 0.
    """

    def __init__(
        self, pages: int, page_size: int, width: int, device: torch.device, dtype: torch.dtype, group: int = 0
    ) -> None:  # fmt: skip
        self.page_size, self.group = page_size, group
        self.states_PX = torch.zeros(pages, width, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        return self.states_PX.nbytes

    def write(self, slots_T: Tensor, states_TX: Tensor) -> None:
        """Keeps the states of those tokens (slots: int64) that are their page's last ones."""
        is_last_T = slots_T % self.page_size == self.page_size - 1
        self.states_PX.index_copy_(0, torch.where(is_last_T, slots_T // self.page_size, DUMMY_PAGE), states_TX)

    def at(self, slots_B: Tensor) -> Tensor:
        """[B, X]: the states of tokens that are their page's last ones."""
        return self.states_PX.index_select(0, slots_B // self.page_size)

    def copy_pages(self, sources_N: Tensor, targets_N: Tensor, page_size: int, group: int) -> None:
        """As `KVCache.copy_pages`.  Other groups' pages hold no states."""
        if group == self.group:
            self.states_PX.index_copy_(0, targets_N, self.states_PX.index_select(0, sources_N))


class MtpWorker(DraftWorker):
    """Runs several layers over the running batch.  A row's level1_hidden_BH is the state of its last token."""

    def __init__(self, head: MtpHead, context: DrafterContext, shares_noise: bool = True) -> None:
        super().__init__(head, context, shares_noise)
        self.layers = head
        (group,) = self.cache.group_numbers  # the layers read all keys, or one window
        sizes = self.cache.slots[group] // context.page_size, context.page_size, head.hidden_size
        self.ends = PageEnds(*sizes, context.device, context.dtype, group)
        self.caches = (self.cache, self.ends)

    def _read_round(
        self, rows: EagleRows, tables: list[PassTables], tokens_BE: Tensor, features_TH: Tensor, last_B: Tensor
    ) -> None:
        (B, E), device = tokens_BE.shape, tokens_BE.device
        (own,) = tables  # the layers belong to one group
        assert own.plan.positions_T is not None
        index_BE = B + arange(B * E, device).view(B, E) - 1
        index_BE = torch.where(arange(E, device) == 0, arange(B, device)[:, None], index_BE)
        asked_R = None if own.rows_plan is None else last_B + arange(B, device, E)
        before, attn = StatesBefore(rows.level1_hidden_BH, index_BE.flatten()), self.attention_of(tables)
        states_TX = self.layers.read(tokens_BE.flatten(), features_TH, own.plan.positions_T, attn, before, asked_R)
        self.ends.write(own.slots_T, states_TX)
        take_rows(states_TX.view(B, E, -1), last_B[:, None], out=rows.level1_hidden_BH[:, None])

    def _read_prompts(self, prompts: RaggedPrompts, next_ids_T: Tensor, features_TH: Tensor) -> Tensor:
        tables = prompts.tables_of(self.cache.group_numbers)
        (own,), part_T, B = tables, prompts.part_T, prompts.rows_B.shape[0]
        index_T = B + arange(part_T.shape[0], part_T.device) - 1
        is_first_T = (part_T != part_T.roll(1)) | (arange(part_T.shape[0], part_T.device) == 0)
        before = StatesBefore(self._before(prompts), torch.where(is_first_T, part_T.clamp(min=0), index_T))
        attn = self.attention_of(tables)
        states_TX = self.layers.read(next_ids_T, features_TH, prompts.positions_T, attn, before, prompts.last_B)
        self.ends.write(own.slots_T, states_TX)
        return states_TX.index_select(0, prompts.last_B)

    def _before(self, prompts: RaggedPrompts) -> Tensor:
        """[B, X]: the state of the token before each part; anything before a text's first token."""
        (whole,) = prompts.tables_of(self.cache.group_numbers)[0].plan.segments
        start_B = (prompts.lens_B - whole.cu_seqlens_q.diff()).long()
        kept_BX = self.ends.at(whole.pages.slots_at((start_B - 1).clamp(min=0)[:, None])[:, 0])
        own_BX = self.rows.level1_hidden_BH.index_select(0, prompts.rows_B)
        return torch.where((start_B % self.ends.page_size == 0)[:, None], kept_BX, own_BX)
