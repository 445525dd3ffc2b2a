"""Whole prompts packed one behind the other: what a prefill reads.  Knows no model and no request.

Shapes: T tokens of all prompts, B prompts, W pages per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.plan import causal_segment, ragged_causal_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.limits import DUMMY_PAGE


@dataclass(frozen=True)
class PackedPrompts:
    """Prompts, or parts of prompts whose earlier tokens are in the cache already.

    ids_T, positions_T, slots_T: int64, of each token.  last_B: int64 row of each prompt's last token here.  plan: who reads
    what; last_plan: what the last tokens alone read.  follower_B: int64, the prompt's own token behind the last one here;
    -1 where the prompt ends.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    last_B: Tensor
    follower_B: Tensor
    plan: AttentionPlan
    last_plan: AttentionPlan

    @classmethod
    def pack(
        cls,
        prompts: list[list[int]],
        page_table_BW: Tensor,
        page_size: int,
        starts: list[int] | None = None,
        size: int | None = None,
    ) -> PackedPrompts:
        """`size` tokens (None: all the rest) of each prompt from its start (None: 0) on, on the page table's device.

        Prompt b lives on the pages of row b.  Something of each must be left.
        """
        device, W = page_table_BW.device, page_table_BW.shape[1]
        starts = [0] * len(prompts) if starts is None else starts
        ends = [len(prompt) if size is None else min(start + size, len(prompt)) for start, prompt in zip(starts, prompts)]
        assert all(start < end for start, end in zip(starts, ends, strict=True))
        parts = [prompt[start:end] for prompt, start, end in zip(prompts, starts, ends)]
        lens_B = torch.tensor([len(part) for part in parts])
        owner_T = torch.repeat_interleave(torch.arange(len(parts)), lens_B)
        positions_T = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends)])
        places_T = (owner_T * W + positions_T // page_size).to(device)  # one page a token, not one table row a token
        positions_T = positions_T.to(device)
        return cls(
            ids_T=torch.tensor([token for part in parts for token in part], device=device),
            positions_T=positions_T,
            slots_T=page_table_BW.flatten()[places_T].long() * page_size + positions_T % page_size,
            last_B=(lens_B.cumsum(0) - 1).to(device),
            follower_B=torch.tensor([[*p, -1][end] for p, end in zip(prompts, ends)], device=device),
            plan=AttentionPlan((ragged_causal_segment(page_table_BW, lens_B.tolist(), ends, page_size),), positions_T),
            last_plan=AttentionPlan((ragged_causal_segment(page_table_BW, [1] * len(parts), ends, page_size),)),
        )

    @classmethod
    def padding(cls, tokens: int, page_table_BW: Tensor, page_size: int) -> PackedPrompts:
        """Buffers for so many tokens of the page table's rows: no row has a token, and all tokens go to the dummy page."""
        rows, device = page_table_BW.shape[0], page_table_BW.device

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        lens_B = zeros(rows, torch.int32)
        whole = Segment(page_table_BW, lens_B, zeros(rows + 1, torch.int32), tokens, True, page_size, ragged=True)
        last = causal_segment(page_table_BW, lens_B, 1, page_size)
        ids_T, positions_T, slots_T = (zeros(tokens) for _ in range(3))
        plan, last_plan = AttentionPlan((whole,), positions_T), AttentionPlan((last,))
        return cls(ids_T, positions_T, slots_T, zeros(rows), zeros(rows), plan, last_plan)

    @property
    def page_size(self) -> int:
        return self.plan.segments[0].page_size

    def fill(self, prompts: PackedPrompts) -> None:
        """Takes the prompts' values; fewer tokens than there is room for, and at most as many rows."""
        T, B, spare = prompts.ids_T.shape[0], prompts.last_B.shape[0], self.ids_T.shape[0] - 1
        assert T <= spare and B <= self.last_B.shape[0]
        mine, other = self.plan.segments[0], prompts.plan.segments[0]
        for target, source, rest in (
            (self.ids_T, prompts.ids_T, 0),
            (self.positions_T, prompts.positions_T, 0),
            (self.slots_T, prompts.slots_T, DUMMY_PAGE),
            (self.last_B, prompts.last_B, spare),
            (self.follower_B, prompts.follower_B, 0),
            (mine.cache_seqlens, other.cache_seqlens, 0),
            (mine.cu_seqlens_q, other.cu_seqlens_q, T),
        ):
            target[: source.shape[0]].copy_(source)
            target[source.shape[0] :].fill_(rest)

    def next_ids(self, bonus_B: Tensor) -> Tensor:
        """[T]: each token's successor; behind a prompt's very last stands its bonus token."""
        next_B = torch.where(self.follower_B < 0, bonus_B, self.follower_B)
        return self.ids_T.roll(-1).index_copy(0, self.last_B, next_B)
