"""Whole prompts packed one behind the other: what a prefill reads.  Knows no model and no request.

Shapes: T tokens of all prompts, B prompts, W pages per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.plan import ragged_causal_segment, slots_at
from specdec.attention.segment import AttentionPlan


@dataclass(frozen=True)
class PackedPrompts:
    """ids_T, positions_T, slots_T: int64, of each token.  last_B: int64 row of each prompt's last.  plan: who reads what."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    last_B: Tensor
    plan: AttentionPlan

    @classmethod
    def pack(cls, prompts: list[list[int]], page_table_BW: Tensor, page_size: int) -> PackedPrompts:
        """The prompts' tokens on the page table's device; prompt b lives on the pages of row b."""
        device = page_table_BW.device
        lens_B = torch.tensor([len(prompt) for prompt in prompts])
        owner_T = torch.repeat_interleave(torch.arange(len(prompts)), lens_B).to(device)
        positions_T = torch.cat([torch.arange(len(prompt)) for prompt in prompts]).to(device)
        return cls(
            ids_T=torch.tensor([token for prompt in prompts for token in prompt], device=device),
            positions_T=positions_T,
            slots_T=slots_at(page_table_BW[owner_T], positions_T[:, None], page_size)[:, 0],
            last_B=(lens_B.cumsum(0) - 1).to(device),
            plan=AttentionPlan((ragged_causal_segment(page_table_BW, lens_B.tolist(), page_size),)),
        )

    def next_ids(self, bonus_B: Tensor) -> Tensor:
        """[T]: each token's successor; behind each prompt's last stands its bonus token."""
        return self.ids_T.roll(-1).index_copy(0, self.last_B, bonus_B)
