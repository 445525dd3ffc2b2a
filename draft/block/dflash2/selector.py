"""DFlash2's choice among a row's likeliest tokens: each is scored anew after the token before it.

The candidates of a row are the C likeliest tokens of its own logits.  After a token a, the score of candidate b is b's logit
and sum(predecessor[a] * gate * successor[b]), where the gate is a projection of the row.  Tokens that are no candidates have
no probability.  This module knows no block, no tree and no cache.

Shapes: H hidden, r rank, C candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from specdec.draft.formats.parts import Part
from specdec.models.layers import Embedding
from specdec.models.linear import Linear


class CandidateSelector(nn.Module):
    """predecessor, successor: tables [V, r].  projection: from a row to its gate."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor, self.successor = Embedding(vocab_size, rank), Embedding(vocab_size, rank)
        self.projection = Linear(hidden_size, rank)

    def parts(self, name: str) -> Iterator[Part]:
        yield f"{name}.predecessor_codebook", self.predecessor.weight
        yield f"{name}.successor_codebook", self.successor.weight
        yield f"{name}.hidden_projection", self.projection

    def added(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """[..., C]: what is added to the candidates' logits.  hidden: [..., H].  before: [...], candidates: [..., C] int64."""
        gated = F.embedding(before, self.predecessor.weight) * self.projection(hidden)
        return (gated[..., None, :] * F.embedding(candidates, self.successor.weight)).sum(-1)
