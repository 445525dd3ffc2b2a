"""Passes over a cache whose committed tokens several ranks divide: which tables such a pass has.

The tokens of the pass itself lie on every rank, in a scratch after the cache's pages: token t of the pass in slot t of it.
Each rank's own heads read them there; nothing that says which token reads which other one (a tree, a prompt's order) ever meets
the tokens of other ranks.  The committed tokens before them are read without any mask.  After the pass, tokens that are to stay
are moved from the scratch to the slots of those ranks that keep them.

Shapes: B sequences, N tokens of each, T tokens of a pass, W table width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.attend import PassTables
from specdec.attention.context.ownership import Ownership
from specdec.attention.pages import PageTable
from specdec.attention.plan import prefix_segment
from specdec.attention.segment import AttentionPlan, DividedPrefix, Segment, uniform_cu_seqlens
from specdec.ops.index import kept
from specdec.parallel.group import Group


class PromptTables(NamedTuple):
    """A pass over parts of prompts.  tables: what the pass reads.  slots_T: where this rank keeps each token afterwards."""

    tables: PassTables
    slots_T: Tensor


@dataclass(frozen=True)
class DividedContext:
    """Who keeps which token of one model's cache, and where its scratch is.

    group: the ranks that divide each sequence.  scratch: its first slot.  room: its slots, the most tokens of a pass.
    """

    group: Group
    ownership: Ownership
    scratch: int
    room: int

    def scratch_pages(self, rows: int, count: int, device: torch.device) -> PageTable:
        """Where `count` tokens of each row lie during a pass that holds nothing else."""
        assert rows * count <= self.room, (rows, count, self.room)
        return PageTable(_consecutive(self.scratch, rows, count, device))

    def prefix(self, pages: PageTable, lens_B: Tensor, count: int) -> DividedPrefix:
        """The first lens_B tokens of each sequence, which `count` queries of each read."""
        own = prefix_segment(self.ownership.pages(pages), self.ownership.counts(lens_B), count)
        return DividedPrefix(own, self.group)

    def of_prompts(self, whole: PassTables) -> PromptTables:
        """The tables of a pass over parts of prompts.  whole: its tables over a cache that one rank keeps."""
        (prompt,), T, ownership = whole.plan.segments, whole.slots_T.shape[0], self.ownership
        assert prompt.causal and T <= self.room, (T, self.room)
        device, cu = prompt.cu_seqlens_q.device, prompt.cu_seqlens_q
        counts_B = cu.diff()
        offsets_N = torch.arange(prompt.max_seqlen_q, dtype=torch.int32, device=device)
        pages = PageTable(self.scratch + cu[:-1, None] + offsets_N)
        own = replace(prompt, pages=pages, cache_seqlens=counts_B, max_cached=0)
        last = Segment(pages, counts_B, uniform_cu_seqlens(prompt.rows, 1, device), 1)
        prefix = last_prefix = None
        if prompt.max_cached != 0:  # the same on all ranks, which get the same chunks
            cached = replace(
                prompt,
                pages=ownership.pages(prompt.pages),
                cache_seqlens=ownership.counts(prompt.cache_seqlens - counts_B),
                causal=False,
                max_cached=None if prompt.max_cached is None else ownership.most(prompt.max_cached),
            )
            prefix = DividedPrefix(cached, self.group)
            one_each = replace(cached, cu_seqlens_q=last.cu_seqlens_q, max_seqlen_q=1, ragged=False)
            last_prefix = DividedPrefix(one_each, self.group)
        plan = AttentionPlan((own,), whole.plan.positions_T, divided=prefix)
        slots_T = _consecutive(self.scratch, 1, self.room, device)[0, :T].long()
        tables = PassTables(plan, slots_T, AttentionPlan((last,), divided=last_prefix))
        return PromptTables(tables, ownership.own_slots(whole.slots_T))


@kept
def _consecutive(first: int, rows: int, count: int, device: torch.device) -> Tensor:
    """[rows, count] int32: first, first + 1 ...  The tensor is cached: never write to it."""
    return torch.arange(first, first + rows * count, dtype=torch.int32, device=device).view(rows, count)
