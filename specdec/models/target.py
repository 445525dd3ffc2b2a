"""What a target model is: one signature, whichever way it computes.  Knows no family, phase, page or tree.

Shapes: T tokens, H hidden, V vocabulary, A captured states side by side, R rows asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from specdec.models.config import ModelConfig
from specdec.models.layers import AttentionFn, Embedding, Linear


class TargetOutput(NamedTuple):
    """hidden_TH: after the final norm, what the language-model head reads; of the rows asked for.

    aux_TA: captured residual streams of all tokens, or None.
    """

    hidden_TH: Tensor
    aux_TA: Tensor | None


class Target(nn.Module):
    """A decoder-only language model.  Draft heads may share embed_tokens (which gives plain rows of its table) and lm_head."""

    config: ModelConfig
    embed_tokens: Embedding
    lm_head: Linear

    @abstractmethod
    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attn: AttentionFn,
        aux_layers: Sequence[int] = (),
        rows_R: Tensor | None = None,
    ) -> TargetOutput:
        """aux_layers: ascending 0-based layers whose output (the residual stream, not normed) is captured, of all tokens.

        rows_R: the tokens whose final hidden state is wanted, None for all.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] for the rows given."""
