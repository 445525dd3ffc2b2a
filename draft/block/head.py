"""What heads have that draft several tokens in one pass, over a block: P-EAGLE, DFlash and DSpark.

Shapes: N texts, T tokens of a text, A blocks of each, B sequences, S tokens drafted by a block, H hidden, W draft vocabulary,
F the target's features of one token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.block.dense import DenseBlockRows, MaskedAttention
from specdec.draft.block.rounds.passes import BlockPass
from specdec.draft.block.rounds.trees import tree_of_levels
from specdec.draft.drafter import Drafter, DrafterContext, Impression
from specdec.draft.formats.spec import BlockSpec
from specdec.draft.head import DraftHead
from specdec.limits import MAX_PAUSE
from specdec.models.target import Target
from specdec.ops.noise.gumbel import Noise


class BlockHead(DraftHead):
    """reads_drafts: whether what it drafts depends on the tokens that it drafted before in the block."""

    reads_drafts = False

    @property
    def block(self) -> BlockSpec:
        assert self.config.block is not None
        return self.config.block

    @abstractmethod
    def drafts(self, features_NTF: Tensor, ids_NT: Tensor, anchors_NA: Tensor, steps: int) -> Tensor:
        """[N, A, S, H]: what `logits` reads, for the S tokens after each anchor, from whole texts at once, without a cache.

        features_NTF: the target's features of the texts' tokens.  ids_NT: int64.
        anchors_NA: int64, positions from 1 on of the last known tokens; features are known of the tokens before them.
        """

    def walk(self, hidden: Tensor, before: Tensor) -> Tensor:
        """[..., S, W]: logits along known texts, for training and checks.  hidden: [..., S, H].

        before: [..., S] int64 ids of the target's vocabulary: the token before each of the tokens that are drafted.
        """
        return self.logits(hidden)

    def estimates(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """[..., S]: logits of the estimates that tokens are accepted; None: the head makes none.  As of `walk`."""
        return None

    @abstractmethod
    def make_pass(self, backend: Backend, cache: KVCache, steps: int) -> BlockPass:
        """Its pass over a batch, which drafts that many tokens."""

    def tree(self, hidden_BSH: Tensor, bonus_B: Tensor, spec: SpecConfig, noise: Noise | None = None) -> DraftTree:
        """The trees that follow from one pass.

        hidden_BSH: the hidden states of the tokens after each bonus token, one for each level.
        noise: of the tokens after the bonus tokens; None: the target adds none.
        """
        return tree_of_levels(self, hidden_BSH, bonus_B, spec, noise)

    def masked(self, rows: DenseBlockRows, queries: int, parts: Sequence[int]) -> MaskedAttention:
        """The attention of a pass over whole texts.  queries, parts: as of `visible` and `MaskedAttention`."""
        anchored = self.block.size if self.block.anchored_windows else 0
        kinds = list(zip(self.config.model.layer_kinds, self.block.causal, strict=True))
        masks: dict[Any, Tensor] = {kind: rows.visible(*kind, queries, anchored) for kind in set(kinds)}
        return MaskedAttention([masks[kind] for kind in kinds], parts)

    def default_shape(self) -> SpecConfig:
        """The usual one, with no more levels than a pass was made to draft tokens."""
        usual, most = SpecConfig(), self.block.max_steps
        return usual if most is None or usual.max_steps <= most else SpecConfig(most, usual.topk)

    def slots(self, spec: SpecConfig) -> int:
        """The tokens that were emitted, or that a pause kept, and then a block."""
        columns = MAX_PAUSE if spec.is_auto else 0
        return max(columns, spec.max_steps + 1) + max(self.block.size, spec.max_steps)

    def passes(self, spec: SpecConfig) -> int:
        return 1

    def worker(self, context: DrafterContext) -> Drafter:
        from specdec.draft.block.rounds.worker import BlockWorker  # which knows heads, too

        return BlockWorker(self, context)

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        from specdec.draft.block.smoke import BlockLook  # which knows heads, too

        return BlockLook().impression(self, target, ids_T)
