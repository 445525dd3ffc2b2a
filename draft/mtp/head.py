"""A target's MTP layers as a head that drafts a level a pass.

The layer reads pairs as an EAGLE head does (step_head.py): a join of the normed embedding and the normed feature, a decoder
layer as the target's own, and a norm.  The embedding and the language-model head are the target's.  This module knows no tree,
cache or verifier.

Shapes: T pairs, H hidden.
"""

from __future__ import annotations

from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.draft.drafter import DraftNeeds, Place
from specdec.draft.eagle.worker import DraftWorker
from specdec.draft.look import complaint
from specdec.draft.mtp.spec import MtpSpec
from specdec.draft.step_head import StepHead
from specdec.models.causal_lm import PreNormLayer
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.deepseek.modules import DeepseekLayer
from specdec.models.experts import MixtureOfExperts
from specdec.models.layers import MLP, RMSNorm, Rotary, SelfAttention
from specdec.models.linear import Linear
from specdec.models.target import Target
from specdec.ops.norm import pair_rms_norm
from specdec.ops.rope import Rotation
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary


class MtpLayer(nn.Module):
    """One layer.  join: reads [embedding, hidden], whatever the checkpoint's order."""

    def __init__(self, spec: MtpSpec, index: int) -> None:
        super().__init__()
        model = spec.model
        H, eps = model.hidden_size, model.rms_norm_eps
        self.embed_norm, self.hidden_norm, self.norm = (RMSNorm(H, eps) for _ in range(3))
        self.join = Linear(2 * H, H)
        self.block = self._block(spec, index)

    @staticmethod
    def _block(spec: MtpSpec, index: int) -> PreNormLayer:
        model = spec.model
        if isinstance(model, DeepseekConfig):
            return DeepseekLayer(model, index)
        mlp = MLP(model) if spec.experts is None else MixtureOfExperts(model, spec.experts)
        return PreNormLayer(model, SelfAttention(model, model.hidden_size), mlp)

    def forward(
        self, pairs_TX: Tensor, rotation: Rotation, attn: AttentionFn, index: int, rows_R: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(the output, the same after the layer's own norm) of pairs [T, 2H], normed; for rows_R only, if given."""
        x = self.join(pairs_TX)
        x, delta = self.block(x, self.block.input_layernorm(x), rotation, attn, index, rows_R)
        return self.norm.add(x, delta)


class MtpHead(StepHead):
    """The layers of a target, which lends its embedding and its language-model head.  spec: of this rank's share."""

    def __init__(self, spec: MtpSpec, max_positions: int) -> None:
        super().__init__()
        self.spec, model = spec, spec.model
        self.hidden_size = self.feature_size = model.hidden_size
        self.layers = nn.ModuleList(MtpLayer(spec, index) for index in range(model.num_layers))
        self.vocabulary = Vocabulary.of(model.vocab_size, ALONE)
        self.d2t_V = None
        self.rotary = Rotary(model.rope, model.head_dim, max_positions)

    def borrow(self, target: Target) -> None:
        self.embed_tokens, self.lm_head = target.embed_tokens, target.lm_head

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds((), (self.spec.model,))

    def worker(self, place: Place) -> DraftWorker:
        return DraftWorker(self, place)

    @property
    def description(self) -> str:
        return self.spec.description

    def smoke(self, target: Target, ids_T: Tensor) -> str:
        from specdec.draft.mtp.smoke import misreadings  # which knows heads, too

        return complaint(self, target, ids_T, misreadings(self, target))

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        return self._run(self._pairs(ids_T, hidden_TH), positions_T, attn, rows_R)

    def begin(self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor) -> Tensor:
        pairs_TX = self._pairs(ids_T, hidden_TH)
        if self.spec.rules.zeroes_first:  # the norm of zeros is zeros
            embedded_TH = pairs_TX[:, : self.hidden_size]
            embedded_TH.masked_fill_(positions_T[:, None] == 0, 0.0)
        return self._run(pairs_TX, positions_T, attn, rows_R)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden if self.spec.rules.recycles_normed else self.layer(0).norm(hidden))

    def layer(self, index: int) -> MtpLayer:
        layer = self.layers[index]
        assert isinstance(layer, MtpLayer)
        return layer

    def _pairs(self, ids_T: Tensor, hidden_TH: Tensor) -> Tensor:
        layer, table = self.layer(0), self.embed_tokens.weight
        norm = layer.hidden_norm
        return pair_rms_norm(ids_T, table, layer.embed_norm.weight, hidden_TH, norm.weight, norm.eps)

    def _run(self, pairs_TX: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None) -> Tensor:
        raw, normed = self.layer(0)(pairs_TX, self.rotary.at(positions_T), attn, 0, rows_R)
        return normed if self.spec.rules.recycles_normed else raw
