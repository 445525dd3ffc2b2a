"""A small language model that drafts a level of a tree in each pass.

It reads token ids alone, so it needs nothing of its target.  It keeps each token's keys and values in the token's own slot, and
its first level is what it says after the bonus token.  This module knows no tree and no cache.

Shapes: T tokens, H hidden, R rows asked for, W this rank's run of the vocabulary that it drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.eager.dense import DenseAttention
from specdec.attention.inputs import AttentionFn
from specdec.config import SpecConfig
from specdec.draft.drafter import DrafterContext, DraftNeeds, Impression
from specdec.draft.head import NEVER, StepHead
from specdec.draft.model.recurrent import RecurrentModelWorker
from specdec.draft.model.translation import Translation
from specdec.draft.model.worker import SmallModelWorker
from specdec.draft.smoke import MIN_ACCEPTED, MIN_PAIRS
from specdec.models.layers import Embedding
from specdec.models.linear import Linear
from specdec.models.making import making
from specdec.models.target import Target
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary


class SmallModel(StepHead):
    """The model, whatever its family.  target_ids: how many tokens the target's vocabulary has.

    words: how it reads and drafts its target's tokens; None: both vocabularies give each text the same ids, and either may be
    padded further than the other.
    """

    own_slots = True
    d2t_V: Tensor | None

    def __init__(self, model: Target, target_ids: int, words: Translation | None = None) -> None:
        super().__init__()
        if words is not None:
            read_and_draft(model, words)
        self.model, self.target_ids, self.words = model, target_ids, words
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head
        self.vocabulary, self.group = model.vocabulary, model.group
        self.hidden_size = model.config.hidden_size
        self.register_buffer("d2t_V", None if words is None else words.offsets(model.embed_tokens.weight.device))

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds(None, (self.model.config,))

    @property
    def common_ids(self) -> int:
        """How many tokens both models have."""
        return min(self.vocabulary.size, self.target_ids)

    def check(self, spec: SpecConfig) -> None:
        if spec.topk > (most := self.common_ids):
            raise ValueError(
                f"topk must be at most the tokens of both vocabularies, {most}, got {spec.topk}; nearest setting: topk={most}"
            )

    @property
    def trained_length(self) -> int:
        return self.model.config.max_position

    @property
    def description(self) -> str:
        config = self.model.config
        sizes = f"{config.num_layers} layers of hidden_size {config.hidden_size}, {config.vocab_size} tokens"
        if self.words is None:
            return f"a small model of the target's vocabulary: {config.family}, {sizes}"
        return f"a small model of other tokens: {config.family}, {sizes}, of which the target has {len(self.words.drafts)}"

    def worker(self, context: DrafterContext) -> SmallModelWorker:
        return (RecurrentModelWorker if self.model.config.recurrent else SmallModelWorker)(self, context)

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF  # which `forward` does not read

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        """The final hidden states after tokens, which stand at these positions.  hidden_TH: not read."""
        if (known := self.embed_tokens.weight.shape[0]) < self.target_ids:
            ids_T = ids_T.clamp(max=known - 1)  # of tokens that texts don't hold
        return self.model(ids_T, positions_T, attn, rows_R=rows_R).hidden_TH

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., W], in which no token beyond the target's vocabulary is likely."""
        logits = self.model.logits(hidden)
        own = max(0, self.target_ids - self.vocabulary.first)
        if self.words is None and own < logits.shape[-1]:
            logits[..., own:] = NEVER
        return logits

    @torch.inference_mode()
    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        """How often both models choose the same token along a text."""
        if len(ids_T) < MIN_PAIRS:
            return Impression()
        same = float((self._choices(ids_T) == choices(target, ids_T)).float().mean())
        few = f"along a short text the target would accept {same:.1%} of what the small model drafts, too few to pay"
        return Impression("" if same >= MIN_ACCEPTED else f"{few}  ({self.description})", same)

    def _choices(self, ids_T: Tensor) -> Tensor:
        positions_T = torch.arange(len(ids_T), dtype=torch.int64, device=ids_T.device)
        attn = attention_along(self.model)
        return self.vocabulary.greedy(self.logits(self(ids_T, ids_T, positions_T, attn)), self.d2t_V)


def read_and_draft(model: Target, words: Translation) -> None:
    """Gives a model embeddings of its target's tokens, and rows of its language-model head for those alone that both have."""
    table_OH, ids_n = model.embed_tokens.weight, words.own_ids(model.embed_tokens.weight.device)
    if table_OH.is_meta:  # of a model without weights, whose sizes are asked for
        rows_nH = table_OH.new_empty(len(words.drafts), table_OH.shape[1])
        read_VH = table_OH.new_empty(len(words.reads), table_OH.shape[1])
    else:
        rows_nH, read_VH = model.lm_head.rows(ids_n).to(table_OH.dtype), words.embeddings(table_OH.detach())
    bias = None if model.lm_head.bias is None else nn.Parameter(model.lm_head.bias.detach()[ids_n], requires_grad=False)
    model.lm_head = Linear.of(nn.Parameter(rows_nH.contiguous(), requires_grad=False), bias)
    with making(table_OH.device, table_OH.dtype):
        model.embed_tokens = Embedding(*read_VH.shape)
    model.embed_tokens.weight = nn.Parameter(read_VH, requires_grad=False)
    model.vocabulary = Vocabulary.of(len(words.drafts), ALONE)


def choices(model: Target, ids_T: Tensor) -> Tensor:
    """[T] int64: the token that a model finds likeliest after each token of a text."""
    positions_T = torch.arange(len(ids_T), dtype=torch.int64, device=ids_T.device)
    hidden_TH = model(ids_T, positions_T, attention_along(model)).hidden_TH
    return model.vocabulary.greedy(model.logits(hidden_TH))


def attention_along(model: Target) -> DenseAttention:
    """The attention of a pass over one whole text."""
    return DenseAttention(model.config.layer_kinds, 1, kv_layers=model.config.kv_source)
