"""The pairs of a P-EAGLE pass: a row's true ones, and unknown ones after the last of them.

On a CPU and under autograd the definition here runs; on a GPU it is one launch of pairs_triton.py.

Shapes: B rows, E emitted tokens of a row with padding, W pairs of a row, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.index import arange
from specdec.ops.launch import use_kernels


def fill_pairs(
    tokens_BE: Tensor, last_B: Tensor, fused_BEH: Tensor, mask_id: int, mask_1H: Tensor, pairs: int
) -> tuple[Tensor, Tensor]:
    """([B, W] int64 tokens, [B, W, H] features).

    tokens_BE: int64.  last_B: int64, the column of each row's last true pair.  fused_BEH: features of the true pairs.
    mask_id, mask_1H: the token and the feature of an unknown pair.  pairs: W, at least E.
    """
    if use_kernels(fused_BEH):
        from specdec.draft.block.rounds.pairs_triton import launch_fill_pairs

        return launch_fill_pairs(tokens_BE, last_B, fused_BEH, mask_id, mask_1H, pairs)
    more = pairs - tokens_BE.shape[1]
    is_true_BW = arange(pairs, tokens_BE.device) <= last_B[:, None]
    ids_BW = torch.where(is_true_BW, F.pad(tokens_BE, (0, more)), mask_id)
    return ids_BW, torch.where(is_true_BW[..., None], F.pad(fused_BEH, (0, 0, 0, more)), mask_1H)
