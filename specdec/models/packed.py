"""Whole prompts packed one behind the other: what a prefill reads.  Knows no model and no request.

Shapes: T tokens of all prompts, B prompts, W pages per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.plan import ragged_causal_segment
from specdec.attention.segment import AttentionPlan


@dataclass(frozen=True)
class PackedPrompts:
    """Prompts, or one chunk of a long prompt whose earlier tokens are in the cache already.

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
        cls, prompts: list[list[int]], page_table_BW: Tensor, page_size: int, start: int = 0, size: int | None = None
    ) -> PackedPrompts:
        """Tokens start .. start + size of each prompt, on the page table's device; prompt b lives on the pages of row b."""
        device, W = page_table_BW.device, page_table_BW.shape[1]
        parts = [prompt[start:] if size is None else prompt[start : start + size] for prompt in prompts]
        lens_B = torch.tensor([len(part) for part in parts])
        ends = [start + len(part) for part in parts]
        owner_T = torch.repeat_interleave(torch.arange(len(parts)), lens_B)
        positions_T = torch.cat([torch.arange(start, end) for end in ends])
        places_T = (owner_T * W + positions_T // page_size).to(device)  # one page a token, not one table row a token
        positions_T = positions_T.to(device)
        return cls(
            ids_T=torch.tensor([token for part in parts for token in part], device=device),
            positions_T=positions_T,
            slots_T=page_table_BW.flatten()[places_T].long() * page_size + positions_T % page_size,
            last_B=(lens_B.cumsum(0) - 1).to(device),
            follower_B=torch.tensor([[*p, -1][end] for p, end in zip(prompts, ends)], device=device),
            plan=AttentionPlan((ragged_causal_segment(page_table_BW, lens_B.tolist(), ends, page_size),)),
            last_plan=AttentionPlan((ragged_causal_segment(page_table_BW, [1] * len(parts), ends, page_size),)),
        )

    def next_ids(self, bonus_B: Tensor) -> Tensor:
        """[T]: each token's successor; behind a prompt's very last stands its bonus token."""
        next_B = torch.where(self.follower_B < 0, bonus_B, self.follower_B)
        return self.ids_T.roll(-1).index_copy(0, self.last_B, next_B)
