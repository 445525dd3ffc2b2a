"""Log-probabilities of chosen tokens, and of the likeliest ones beside them.  Knows no tree and no request.

They travel to the host as one int64 tensor, whose layout only this file knows: the bits of float64 numbers, and then ids.

Shapes: R rows of logits, W a rank's run of the vocabulary, k likeliest tokens, Y = 1 + 2k numbers of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import Logprobs


def token_logprobs(logits_RW: Tensor, tokens_R: Tensor, top: int, vocabulary: Vocabulary) -> Tensor:
    """[R, Y] int64: the log-probability of each row's token, then those of the likeliest tokens, then these tokens' ids.

    logits_RW: of this rank's run of the vocabulary.  tokens_R: int64.  top: k, at most as many as there are tokens.
    """
    likeliest_Rk, ids_Rk = vocabulary.top(logits_RW, max(1, min(top, vocabulary.size)))
    best_R1 = vocabulary.largest(logits_RW)[:, None].float()
    local_R1 = (tokens_R - vocabulary.first)[:, None]
    is_own_R1 = (local_R1 >= 0) & (local_R1 < vocabulary.own)
    padded_RW = F.pad(logits_RW, (0, 1))  # a column for other ranks' tokens
    own_R1 = padded_RW.gather(1, torch.where(is_own_R1, local_R1, vocabulary.own))
    logit_R1 = vocabulary.group.sum(own_R1.float())
    # The largest logit's token has minus the logarithm of the sum over all, of differences from that logit.
    floats = [(logit_R1 - best_R1) + likeliest_Rk[:, :1], *([likeliest_Rk] if top else [])]
    bits = [each.double().view(torch.int64) for each in floats]
    return torch.cat([*bits, ids_Rk] if top else bits, dim=1)


def read_logprobs(numbers_Y: Tensor) -> list[list[Logprobs]]:
    """The log-probabilities of each row's tokens.  numbers_Y: [B, Y] or [B, E, Y] on the host, of rows of `token_logprobs`."""
    numbers_BEY = numbers_Y[:, None] if numbers_Y.dim() == 2 else numbers_Y
    floats = (numbers_BEY.shape[-1] + 1) // 2
    values, ids = numbers_BEY[..., :floats].view(torch.float64).tolist(), numbers_BEY[..., floats:].tolist()
    return [list(map(Logprobs._make, zip(*row, strict=True))) for row in zip(values, ids, strict=True)]
