"""Where a pass over blocks stands: tokens, positions and slots of each block's rows, and of the context rows before it.

On a CPU the definition here runs; on a GPU it is one launch of tables_triton.py.

Shapes: B rows of a batch, N rows of a block, E context rows of each with padding, T = B * N + B * E rows of the pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.limits import DUMMY_PAGE
from specdec.ops.index import arange, use_index_kernels


class BlockTables(NamedTuple):
    """ids_BN: int64, the blocks' tokens.  positions_T, slots_T: int64, of the blocks' rows, and then of the context.

    ends_B: int32, the position after each block's last row.
    """

    ids_BN: Tensor
    positions_T: Tensor
    slots_T: Tensor
    ends_B: Tensor


def block_tables(
    pages: PageTable, base_lens_B: Tensor, lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, size: int, mask_id: int
) -> BlockTables:
    """base_lens_B, lens_B: int32, where each row's context and block begin.  tokens_BE, last_B: int64; see NewTokens.

    Context rows after last_B go to the dummy page: the block's rows are stored in the slots that these would have.
    """
    if use_index_kernels(lens_B):
        from specdec.draft.block.rounds.tables_triton import launch_block_tables

        return BlockTables(*launch_block_tables(pages, base_lens_B, lens_B, tokens_BE, last_B, size, mask_id))
    (B, E), device = tokens_BE.shape, tokens_BE.device
    context, block = pages.next_tokens(base_lens_B, E), pages.next_tokens(lens_B, size)
    slots_BE = torch.where(arange(E, device) <= last_B[:, None], context.slots, DUMMY_PAGE * pages.page_size)
    ids_BN = tokens_BE.new_full((B, size), mask_id)
    ids_BN[:, 0] = tokens_BE.gather(1, last_B[:, None])[:, 0]
    positions_T = torch.cat((block.positions.flatten(), context.positions.flatten()))
    return BlockTables(ids_BN, positions_T, torch.cat((block.slots.flatten(), slots_BE.flatten())), block.ends_PB[-1])
