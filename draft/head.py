"""What heads of all kinds have: embeddings and a language-model head that may be the target's, and a vocabulary.

Knows no kind of head, no tree and no cache.

Shapes: T tokens, H hidden, F the target's features of one token, concatenated, V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel, DraftNeeds
from specdec.draft.formats.parts import Part
from specdec.draft.formats.reading import Names
from specdec.draft.formats.spec import HeadSpec
from specdec.models.layers import Embedding, Rotary
from specdec.models.linear import Linear
from specdec.parallel.group import ALONE, Group
from specdec.parallel.vocabulary import Vocabulary


class Head(DraftModel):
    """A drafter with weights.  The embedding and the language-model head may be the target's own modules.

    vocabulary: which of its draft tokens' logits this rank computes.  group: the ranks that hold the head together.
    d2t_V: int64 offsets from draft token ids to target token ids; None if both use one vocabulary.
    """

    embed_tokens: Embedding
    lm_head: Linear
    vocabulary: Vocabulary
    group: Group = ALONE
    d2t_V: Tensor | None

    def check(self, spec: SpecConfig) -> None:
        most = self.vocabulary.size
        if spec.topk > most:
            raise ValueError(
                f"topk must be at most the draft vocabulary, {most}, got {spec.topk}; nearest setting: topk={most}"
            )

    @abstractmethod
    def fuse(self, features_TF: Tensor) -> Tensor:
        """Target features to the head's own width [T, H].  The worker does this once, when features come from the target."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V]: logits over the draft vocabulary."""
        return self.lm_head(hidden)


class DraftHead(Head):
    """A head with files of its own, as its spec says."""

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__()
        self.config, self.feature_size = config, config.feature_size
        model = config.model
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size)
        self.lm_head = Linear.vocabulary(model.hidden_size, config.draft_vocab_size, model.shard)
        self.vocabulary = Vocabulary.of(config.draft_vocab_size, ALONE)
        self.register_buffer("d2t_V", None)
        self.rotary = Rotary(model.rope, model.head_dim, max_positions)

    @abstractmethod
    def parts(self, names: Names) -> Iterator[Part]:
        """Its own parts by their names, but for embeddings and the language-model head."""

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(self.config.aux_layers, (self.config.model,))

    @property
    def description(self) -> str:
        return self.config.description

    @property
    def trained_length(self) -> int:
        return self.config.trained_length
