"""The interface of a target model, which every model implementation provides.

This file knows no model family, no phase of a round, no page and no tree.

Shapes: T tokens, H hidden size, V vocabulary, A the captured states' sizes added up, R rows asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from specdec.attention.backend import Backend
from specdec.attention.inputs import AttentionFn
from specdec.models.config import ModelConfig
from specdec.models.layers import Embedding
from specdec.models.linear import Linear
from specdec.parallel.group import ALONE, Group
from specdec.parallel.vocabulary import Vocabulary


class TargetOutput(NamedTuple):
    """The output of one forward pass.

    hidden_TH: the hidden states after the final norm, which the language-model head reads.  There is one row for each row that
    the caller asked for: R rows, or all T.
    aux_TA: the captured residual streams of all T tokens, one layer's columns after another's; None if no layer was captured.
    """

    hidden_TH: Tensor
    aux_TA: Tensor | None


class Target(nn.Module):
    """A decoder-only language model.

    vocabulary: which of its tokens' logits this rank computes.  group: the ranks that hold the model together.
    goes_on: whether a pass over a text may stop between two layers and go on there (`specdec/lossless/passage.py`).

    A draft head may share embed_tokens and lm_head with its target.  It indexes the embedding's weight directly, so
    embed_tokens must not scale or otherwise change the rows of its table.
    """

    config: ModelConfig
    embed_tokens: Embedding
    lm_head: Linear
    vocabulary: Vocabulary
    group: Group = ALONE
    goes_on: bool = True

    @abstractmethod
    def chain(self) -> nn.ModuleList:
        """The layers, in their order: each reads what the one before has left."""

    @abstractmethod
    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attn: AttentionFn,
        aux_layers: Sequence[int] = (),
        rows_R: Tensor | None = None,
    ) -> TargetOutput:
        """One pass over T tokens.

        ids_T: token ids, int64.  positions_T: each token's 0-based position in its own sequence.
        attn: the attention of this pass; it knows the sequences that the tokens belong to, and their caches.
        aux_layers: ascending 0-based layer numbers.  The output of each of these layers (the residual stream before any norm)
        is captured for all tokens.
        rows_R: indices of the tokens whose final hidden state the caller wants; None stands for all tokens.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of final hidden states [..., H]; with several ranks, of this rank's run of the vocabulary."""


class EncoderDecoder(Target):
    """A target with an encoder: every layer also reads the encoder's output, through cross attention.

    config.encoder says what the encoder reads.
    """

    @abstractmethod
    def read_text(self, ids_S: Tensor, backend: Backend) -> Tensor:
        """[layers, S, 2, K, D]: each layer's keys and values of a text of S tokens (int64) that the encoder reads.

        backend: computes the encoder's attention.
        """
