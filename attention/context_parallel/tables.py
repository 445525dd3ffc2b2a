"""The tables of a pass over a cache whose committed tokens are sharded over several ranks (context parallelism).

Every rank stores all tokens of the pass itself, in a scratch after the cache's pages: token t of the pass in slot t of the
scratch.  Each rank's own heads read them there under the pass's mask (a tree's, or causal).  Committed tokens need no mask, so
no mask ever meets the tokens of other ranks; a window or a chunk only leaves out a rank's first ones.  After the pass, the
tokens that stay are moved from the scratch to the slots of the ranks that keep them.

Shapes: B sequences, N tokens of each, T tokens of a pass, W table width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.attend import PassTables
from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.pages import PageTable
from specdec.attention.plan import prefix_segment
from specdec.attention.segment import AttentionPlan, ContextParallelPrefix, Segment, uniform_cu_seqlens
from specdec.ops.index import kept
from specdec.parallel.group import Group


class PromptTables(NamedTuple):
    """A pass over parts of prompts.  tables: what the pass reads.  slots_T: where this rank keeps each token afterwards."""

    tables: PassTables
    slots_T: Tensor


@dataclass(frozen=True)
class ContextParallel:
    """How ranks share the cache of one model's layers that share page tables, and where its scratch is.

    group: the ranks that share each sequence.  scratch: its first slot.  room: its slots, the most tokens of a pass.
    has_all_heads: whether each rank computes all heads; see ContextParallelPrefix.
    """

    group: Group
    sharding: KVSharding
    scratch: int
    room: int
    has_all_heads: bool = False

    def scratch_pages(self, rows: int, count: int, device: torch.device) -> PageTable:
        """Where `count` tokens of each row lie during a pass that holds nothing else."""
        assert rows * count <= self.room, (rows, count, self.room)
        return PageTable(_consecutive(self.scratch, rows, count, device))

    def prefix(self, pages: PageTable, lens_B: Tensor, count: int) -> ContextParallelPrefix:
        """The first lens_B tokens of each sequence, which `count` queries of each read."""
        own = prefix_segment(self.sharding.local_pages(pages), self.sharding.local_lens(lens_B), count)
        return self._of_own(own)

    def _of_own(self, own: Segment) -> ContextParallelPrefix:
        return ContextParallelPrefix(own, self.group, self.sharding, self.has_all_heads)

    def of_prompts(self, whole: PassTables) -> PromptTables:
        """The tables of a pass over parts of prompts.  whole: its tables over a cache that one rank keeps."""
        (prompt,), T, sharding = whole.plan.segments, whole.slots_T.shape[0], self.sharding
        assert prompt.causal and T <= self.room, (T, self.room)
        device, cu = prompt.cu_seqlens_q.device, prompt.cu_seqlens_q
        counts_B = cu.diff()
        starts_B = prompt.cache_seqlens - counts_B
        offsets_N = torch.arange(prompt.max_seqlen_q, dtype=torch.int32, device=device)
        pages = PageTable(self.scratch + cu[:-1, None] + offsets_N)
        rows_T = torch.searchsorted(cu[1:], _consecutive(0, 1, self.room, device)[0, :T], right=True).clamp_(
            max=prompt.rows - 1
        )
        own = replace(prompt, pages=pages, cache_seqlens=counts_B, max_cached=0, base_B=starts_B.index_select(0, rows_T))
        last = Segment(pages, counts_B, uniform_cu_seqlens(prompt.rows, 1, device), 1, base_B=starts_B)
        prefix = last_prefix = None
        if prompt.max_cached != 0:  # the same on all ranks, which get the same chunks
            cached = replace(
                prompt,
                pages=sharding.local_pages(prompt.pages),
                cache_seqlens=sharding.local_lens(starts_B),
                causal=False,
                max_cached=None if prompt.max_cached is None else sharding.max_local(prompt.max_cached),
            )
            prefix = self._of_own(cached)
            one_each = replace(cached, cu_seqlens_q=last.cu_seqlens_q, max_seqlen_q=1, ragged=False)
            last_prefix = self._of_own(one_each)
        plan = AttentionPlan((own,), whole.plan.positions_T, context_parallel=prefix)
        slots_T = _consecutive(self.scratch, 1, self.room, device)[0, :T].long()
        last_B = (prompt.cache_seqlens.long() - 1).clamp(min=0)  # padding has no last token
        tables = PassTables(plan, slots_T, AttentionPlan((last,), last_B, context_parallel=last_prefix))
        return PromptTables(tables, sharding.local_slots(whole.slots_T))


@kept
def _consecutive(first: int, rows: int, count: int, device: torch.device) -> Tensor:
    """[rows, count] int32: first, first + 1 ...  The tensor is cached: never write to it."""
    return torch.arange(first, first + rows * count, dtype=torch.int32, device=device).view(rows, count)
