"""Log-probabilities of chosen tokens, and of the likeliest ones beside them.  Knows no tree and no request.

Shapes: R rows of logits, W a rank's run of the vocabulary, k likeliest tokens, X = 1 + 2k numbers of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.parallel.vocabulary import Vocabulary


def token_logprobs(logits_RW: Tensor, tokens_R: Tensor, top: int, vocabulary: Vocabulary) -> Tensor:
    """[R, X] float64: the log-probability of each row's token, then those of the likeliest tokens, then these tokens' ids.

    logits_RW: of this rank's run of the vocabulary.  tokens_R: int64.  top: k, at most as many as there are tokens.
    """
    likeliest_Rk, ids_Rk = vocabulary.top(logits_RW, max(1, min(top, vocabulary.size)))
    best_R1 = vocabulary.largest(logits_RW)[:, None].float()
    local_R1 = (tokens_R - vocabulary.first)[:, None]
    is_own_R1 = (local_R1 >= 0) & (local_R1 < vocabulary.own)
    padded_RW = F.pad(logits_RW, (0, 1))  # a column for other ranks' tokens
    own_R1 = padded_RW.gather(1, torch.where(is_own_R1, local_R1, vocabulary.own))
    logit_R1 = vocabulary.group.sum(own_R1.float())
    numbers = [
        (logit_R1 - best_R1) + likeliest_Rk[:, :1]
    ]  # the best token's own is minus the logarithm of the sum over the best
    if top:
        numbers += [likeliest_Rk, ids_Rk]
    return torch.cat([each.double() for each in numbers], dim=1)
