"""Which pairs of a token and an expert are computed here: a rank's own, and those of tokens that anybody needs.

Where ranks hold whole experts, some each, every rank has the router, and so all pairs; those of other ranks are skipped.  So
are those of padded rows.  A skipped pair has the number of no expert and the weight 0.  Shapes stay as they are, so this can
run inside CUDA graphs.

Shapes: T tokens, K experts of a token (top_k), B rows of the batch, N tokens of each row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.index import arange
from specdec.ops.launch import use_kernels


class LiveRows(NamedTuple):
    """active_B: int32, 0 where a row is padding.  last_B: int64, the last of a row's N tokens that is needed; None: all are."""

    active_B: Tensor
    last_B: Tensor | None = None

    def tokens(self, count: int) -> Tensor:
        """[T] bool, whether each of so many tokens is needed.  Where there is one of each row, it is the row's last one."""
        N = count // len(self.active_B)
        live_BN = (self.active_B != 0)[:, None].expand(-1, N)
        if self.last_B is not None and N > 1:
            live_BN = live_BN & (arange(N, self.last_B.device) <= self.last_B[:, None])
        return live_BN.flatten()


class Kept(NamedTuple):
    """Which pairs are not skipped: those of the experts `own`, of tokens that are needed; live: None: all are."""

    own: range
    live: LiveRows | None = None


def own_pairs(
    topk_weights_TK: Tensor, topk_ids_TK: Tensor, own: range, live: LiveRows | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights, numbers counted from the first of the experts `own`): of skipped pairs 0, and len(own).  live: None: all."""
    assert live is None or len(topk_ids_TK) % len(live.active_B) == 0, (topk_ids_TK.shape, live)
    if use_kernels(topk_weights_TK):
        from specdec.ops.products.kernels.experts.own_pairs_triton import launch_own_pairs

        return launch_own_pairs(topk_weights_TK.contiguous(), topk_ids_TK.contiguous(), own, live)
    numbers_TK = topk_ids_TK - own.start
    is_own_TK = (numbers_TK >= 0) & (numbers_TK < len(own))
    if live is not None:
        is_own_TK = is_own_TK & live.tokens(len(topk_ids_TK))[:, None]
    return torch.where(is_own_TK, topk_weights_TK, 0), torch.where(is_own_TK, numbers_TK, len(own))
