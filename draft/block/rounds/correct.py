"""Logits that a token before corrects by a product of low rank: W2 w1[token], added to a row's own logits (DSpark's "vanilla").

On a CPU and under autograd the definitions here run.  On a GPU `corrected_logits` is one launch of correct_triton.py, and
`greedy_chain` one for each level and one more; weights are read before the token is known.

Shapes: B sequences, S levels, R rows, equally many for each sequence, W draft vocabulary, V vocabulary, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.topk import greedy_tokens

MAX_KERNEL_RANK = 256  # threshold: a program holds whole rows of w2 in registers; float32 takes more, so an eighth
MAX_KERNEL_ROWS = 16  # threshold of `greedy_chain`: each program finds the last level's token of every row
MAX_TOKENS = 32_768  # threshold of `greedy_chain` of several rows: more candidates don't fit a program's registers


def corrected_logits(own_BW: Tensor, before_R: Tensor, w1_Vr: Tensor, w2_Wr: Tensor) -> Tensor:
    """[R, W]: own + W2 w1[before], both rounded to own's dtype.  own_BW: rows may be strided.  before_R: int64."""
    if _fits(own_BW, w1_Vr):
        from specdec.draft.block.rounds.correct_triton import launch_corrected_logits

        return launch_corrected_logits(own_BW, before_R, w1_Vr, w2_Wr)
    added_RW = F.linear(F.embedding(before_R, w1_Vr), w2_Wr)
    return (own_BW[:, None] + added_RW.unflatten(0, (len(own_BW), -1))).flatten(0, 1)


def greedy_chain(own_BSW: Tensor, root_B: Tensor, w1_Vr: Tensor, w2_Wr: Tensor, offsets_W: Tensor | None) -> Tensor:
    """[B, 1 + S] int64: the root, then the likeliest token after each token, ties to the lower id.

    own_BSW: each level's own logits.  root_B: int64.  offsets_W: int64, from draft ids to ids of the vocabulary.
    """
    few = len(root_B) == 1 or (len(root_B) <= MAX_KERNEL_ROWS and own_BSW.shape[2] <= MAX_TOKENS)
    if few and _fits(own_BSW, w1_Vr):
        from specdec.draft.block.rounds.correct_triton import launch_greedy_chain

        return launch_greedy_chain(own_BSW, root_B, w1_Vr, w2_Wr, offsets_W)
    tokens = [root_B]
    for own_BW in own_BSW.unbind(1):
        tokens.append(greedy_tokens(corrected_logits(own_BW, tokens[-1], w1_Vr, w2_Wr), offsets_W))
    return torch.stack(tokens, dim=1)


def _fits(own: Tensor, w1_Vr: Tensor) -> bool:
    most = MAX_KERNEL_RANK // 8 if own.dtype == torch.float32 else MAX_KERNEL_RANK
    return use_kernels(own) and w1_Vr.shape[1] <= most
