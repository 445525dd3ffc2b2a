"""What heads have: all of them, those with files of their own, and those that draft one level of a tree in each pass.

Knows no kind of head, no tree and no cache.

Shapes: T tokens or pairs, H hidden, F the target's features of one token, concatenated, R rows asked for, V draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from specdec.attention.inputs import AttentionFn
from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel, DraftNeeds
from specdec.draft.formats.parts import Part
from specdec.draft.formats.reading import PartNames
from specdec.draft.formats.spec import HeadSpec
from specdec.limits import MAX_PAUSE
from specdec.models.layers import Embedding, Rotary
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.parallel.group import ALONE, Group
from specdec.parallel.vocabulary import Vocabulary

NEVER = -1e4  # logit of a token that is not to be drafted; 16 bits hold it, and noise does not lift it


class Head(DraftModel):
    """A drafter with weights.  The embedding and the language-model head may be the target's own modules.

    vocabulary: which of its draft tokens' logits this rank computes.  group: the ranks that hold the head together.
    logits_scale: what products with the language-model head are multiplied with: the target's, where that is the target's too.
    d2t_V: int64 offsets from draft token ids to target token ids; None if both use one vocabulary.
    """

    embed_tokens: Embedding
    lm_head: Linear
    vocabulary: Vocabulary
    group: Group = ALONE
    logits_scale: float = 1.0
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
        return self.read_out(hidden)

    def read_out(self, read: Tensor) -> Tensor:
        """[..., V]: the logits of what the language-model head reads [..., H]."""
        logits = self.lm_head(read)
        return logits if self.logits_scale == 1 else logits * self.logits_scale

    def share_lm_head(self, target: Target) -> None:
        """Makes the target's language-model head this one's, with the scale of the target's logits.

        Drafts are weighed by their probabilities, which the scale decides; the best token is the same without it.
        """
        self.lm_head, self.logits_scale = target.lm_head, target.config.logits_scale


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
    def parts(self, names: PartNames) -> Iterator[Part]:
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


class StepHead(Head):
    """What the draft worker needs of a drafter that drafts a level a pass: EAGLE heads, MTP layers, small models.

    A head reads pairs.  Pair i consists of the embedding of token i + 1 and the feature of token i, and predicts token i + 2.
    The head's hidden output takes the place of the next pair's feature.
    hidden_size: H.
    own_slots: whether what it keeps of a token lies in the token's own slot, at its own position, as of a model that reads
        tokens alone; if not, pair i lies in the slot of token i, at that one's position.
    """

    hidden_size: int
    own_slots = False

    def slots(self, spec: SpecConfig) -> int:
        branches = spec.topk * (spec.max_steps - 1) if spec.topk > 1 else 0
        return max(branches, super().slots(spec), MAX_PAUSE if spec.is_auto else 0) + self.own_slots

    def passes(self, spec: SpecConfig) -> int:
        return spec.max_steps

    @abstractmethod
    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        """One step over pairs: hidden [T, H], which is the next pair's feature and the input of `logits`.

        ids_T: int64, each pair's token.
        hidden_TH: each pair's feature, fused.
        positions_T: int64 rotary positions.
        rows_R: int64.  If given, only these rows' hidden states are returned: [R, H].
        """

    def begin(self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor) -> Tensor:
        """`forward` over pairs of prompts, among which a text's first pair may be."""
        return self(ids_T, hidden_TH, positions_T, attn, rows_R)

    def level(self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn) -> tuple[Tensor, Tensor]:
        """`forward`, and its result's `logits`, for the branches of one level of a draft."""
        next_TH = self(ids_T, hidden_TH, positions_T, attn)
        return next_TH, self.logits(next_TH)
