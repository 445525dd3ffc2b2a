"""Which pairs of a token and an expert a rank computes, where ranks hold whole experts, some each.

Every rank has the router, and so all pairs.  Those of other ranks are skipped: their numbers here are that of no expert, and
their weights 0.  Shapes stay as they are, so this can run inside CUDA graphs.

Shapes: T tokens, K experts of a token (top_k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels


def own_pairs(topk_weights_TK: Tensor, topk_ids_TK: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """(weights, numbers counted from the first of the experts `own`): of all other experts 0, and len(own)."""
    if use_kernels(topk_weights_TK):
        from specdec.ops.products.kernels.experts.own_pairs_triton import launch_own_pairs

        return launch_own_pairs(topk_weights_TK.contiguous(), topk_ids_TK.contiguous(), own)
    numbers_TK = topk_ids_TK - own.start
    is_own_TK = (numbers_TK >= 0) & (numbers_TK < len(own))
    return torch.where(is_own_TK, topk_weights_TK, 0), torch.where(is_own_TK, numbers_TK, len(own))
