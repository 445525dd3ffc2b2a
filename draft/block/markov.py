"""DSpark's head over a block's rows: it corrects each row's logits by the token drafted before it.

Three kinds: "vanilla" knows that token alone, "gated" the row's hidden state too, and "rnn" carries a state along the path.
This module knows no block, no tree and no cache.

Shapes: R rows, r rank, H hidden, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.draft.formats.spec import BlockSpec
from specdec.models.layers import Embedding
from specdec.models.linear import Linear
from specdec.parallel.shard import Shard


class Markov(nn.Module):
    """w1: an embedding of the token before.  w2: from what the kind makes of it to logits."""

    def __init__(self, block: BlockSpec, hidden_size: int, vocab_size: int, draft_vocab_size: int, shard: Shard) -> None:
        super().__init__()
        self.kind, r = block.markov, block.markov_rank
        self.w1 = Embedding(vocab_size, r)
        self.w2 = Linear.vocabulary(r, draft_vocab_size, shard)
        self.gate = Linear(hidden_size + r, r, bias=True) if self.kind == "gated" else None
        self.joint = Linear(2 * r + hidden_size, 3 * r, bias=True) if self.kind == "rnn" else None

    def embed(self, ids_R: Tensor) -> Tensor:
        """[R, r]: the embeddings of the tokens before, ids (int64) of the target's vocabulary."""
        return F.embedding(ids_R, self.w1.weight)

    @property
    def plain(self) -> tuple[Tensor, Tensor] | None:
        """(w1 [V, r], w2 [W, r]) where the correction is their product alone, and no policy says how it is computed."""
        is_plain = self.kind == "vanilla" and self.w2.weight is not None and not self.w2.numerics.is_invariant
        return (self.w1.weight, self.w2.weight) if is_plain and self.w2.weight is not None else None

    def step(self, hidden_RH: Tensor, embedded_Rr: Tensor, state_Rr: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """([R, r], of which `w2` makes what is added to the rows' logits; the state after the rows).

        state_Rr: what the rows before left; None before the first row, and for kinds without a state.
        """
        if self.gate is not None:
            gate_Rr = self.gate(torch.cat((hidden_RH, embedded_Rr), dim=-1)).sigmoid()
            return gate_Rr * embedded_Rr, None
        if self.joint is None:
            return embedded_Rr, None
        state_Rr = torch.zeros_like(embedded_Rr) if state_Rr is None else state_Rr
        gate_Rr, new_Rr, out_Rr = self.joint(torch.cat((state_Rr, embedded_Rr, hidden_RH), dim=-1)).chunk(3, dim=-1)
        gate_Rr = gate_Rr.sigmoid()
        return out_Rr.tanh(), gate_Rr * state_Rr + (1 - gate_Rr) * new_Rr.tanh()
