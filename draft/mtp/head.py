"""A target's MTP layers as a head that drafts a level a pass.

The layer reads pairs as an EAGLE head does (draft/head.py): a join of the normed embedding and the normed feature, a decoder
layer as the target's own, and a norm.  The embedding and the language-model head are the target's.  This module knows no tree,
cache or verifier.

Shapes: T pairs, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.draft.drafter import DrafterContext, DraftNeeds, Impression
from specdec.draft.eagle.worker import DraftWorker
from specdec.draft.head import StepHead
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.layers import RMSNorm, Rotary
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
        self.embed_norm, self.hidden_norm, self.norm = (RMSNorm(H, eps, model.zero_centred_norms) for _ in range(3))
        self.join = Linear(2 * H, H)
        self.block = spec.block.make(model, index)

    def forward(
        self, pairs_TX: Tensor, rotation: Rotation, attn: AttentionFn, index: int, rows_R: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(the output, the same after the layer's own norm) of pairs [T, 2H], normed; for rows_R only, if given."""
        x = self.join(pairs_TX)
        x, delta = self.block(x, self.block.input_layernorm(x), rotation, attn, index, rows_R)
        return self.norm.add(x, delta)


class StatesBefore(NamedTuple):
    """Where the states before some pairs are: layer k reads, with each pair, what layer k - 1 made of the pair before.

    states_NX: of N pairs that came before the pass.  index_T: int64, for each pair of the pass the one before it among these N,
    or N + t, which is pair t of the pass.
    """

    states_NX: Tensor
    index_T: Tensor


class MtpHead(StepHead):
    """The layers of a target, which lends its embedding and its language-model head.  spec: of this rank's share.

    Layer 0 reads each token with the target's state of the token before it, and drafts a tree's first level.  Layer k reads
    each token with what layer k - 1 made of the token before it, and drafts level k + 1.  So layer k reads no token up to
    number k, and what it keeps of token i + 1 lies in the slot of token i, as with one layer.  A level beyond the last layer is
    drafted by the last layer, from its own output at the level before.

    A state is what the next token's pass needs of a token: the outputs of the layers, but for the last one; in a draft, of
    those alone that are still to be read, the next one first.  With one layer it is the layer's output.

    Where layers do not chain (`MtpRules`), layer k reads each token with the target's state of the token k + 1 before it.  A
    state is then the output that drafts the next level, and after it what the layers read, but for the last one.

    Shapes: X width of a state, N states from before a pass.
    """

    def __init__(self, spec: MtpSpec, max_positions: int) -> None:
        super().__init__()
        self.spec, model = spec, spec.model
        assert spec.rules.recycles_normed or model.num_layers == 1, "logits of several layers need their own norms"
        self.feature_size = model.hidden_size
        self.hidden_size = spec.state_size
        self.layers = nn.ModuleList(MtpLayer(spec, index) for index in range(model.num_layers))
        self.vocabulary = Vocabulary.of(model.vocab_size, ALONE)
        self.d2t_V = None
        self.rotary = Rotary(model.rope, model.head_dim, max_positions)

    def borrow(self, target: Target) -> None:
        self.embed_tokens = target.embed_tokens
        self.share_lm_head(target)

    @property
    def needs(self) -> DraftNeeds:
        return DraftNeeds((), (self.spec.model,), page_values=self.hidden_size if self.spec.keeps_states else 0)

    def worker(self, context: DrafterContext) -> DraftWorker:
        if not self.spec.keeps_states:
            return DraftWorker(self, context)
        from specdec.draft.mtp.worker import MtpWorker  # which knows heads, too

        return MtpWorker(self, context)

    @property
    def description(self) -> str:
        return self.spec.description

    def smoke(self, target: Target, ids_T: Tensor) -> Impression:
        from specdec.draft.mtp.smoke import MtpLook, first_layer  # which knows heads, too

        return MtpLook().impression(first_layer(self), target, ids_T)

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        """One level of a draft.  hidden_TH: [T, X], of the tokens before these ones."""
        parts, M = hidden_TH.split(self.feature_size, dim=-1), len(self.layers)
        if not self.spec.rules.chains and len(parts) > 1:
            parts = parts[1:]
        first, rotation = M - len(parts), self.rotary.at(positions_T)
        outs = [
            self._output(first + at, self._pairs(first + at, ids_T, part.contiguous()), rotation, attn, rows_R)
            for at, part in enumerate(parts)
        ]
        state = outs[:-1] or outs if self.spec.rules.chains else [outs[0], *parts[:-1]]
        return state[0] if len(state) == 1 else torch.cat(state, dim=-1)

    def begin(self, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor, attn: AttentionFn, rows_R: Tensor) -> Tensor:
        pairs_TX = self._first_pairs(0, ids_T, hidden_TH, positions_T)
        return self._output(0, pairs_TX, self.rotary.at(positions_T), attn, rows_R)

    def read(
        self,
        ids_T: Tensor,
        features_TH: Tensor,
        positions_T: Tensor,
        attn: AttentionFn,
        before: StatesBefore,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """[T, X]: the states of pairs with true features, of all tokens.  Several layers.

        rows_R: the pairs for which layers are asked whose output nobody reads here: the last one, or all but the first.
        """
        rotation, states = self.rotary.at(positions_T), before.states_NX.split(self.feature_size, dim=-1)
        chains, M = self.spec.rules.chains, len(self.layers)
        read, outs = list[Tensor](), list[Tensor]()
        for index in range(M):
            hidden_TH = features_TH
            if index:
                kept, last = (states[index - 1], outs[-1]) if chains else (states[index], read[-1])
                hidden_TH = torch.cat((kept, last)).index_select(0, before.index_T)
            read.append(hidden_TH)
            pairs_TX = self._first_pairs(index, ids_T, hidden_TH, positions_T)
            is_read = index < M - 1 if chains else index == 0
            outs.append(self._output(index, pairs_TX, rotation, attn, None if is_read else rows_R))
        return torch.cat(outs[:-1] if chains else (outs[0], *read[:-1]), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        drafts_next = hidden[..., : self.feature_size]
        return self.read_out(drafts_next if self.spec.rules.recycles_normed else self.layer(0).norm(drafts_next))

    def layer(self, index: int) -> MtpLayer:
        layer = self.layers[index]
        assert isinstance(layer, MtpLayer)
        return layer

    def _pairs(self, index: int, ids_T: Tensor, hidden_TH: Tensor) -> Tensor:
        """[T, 2H]: what the join of that layer reads."""
        layer, table = self.layer(index), self.embed_tokens.weight
        norm = layer.hidden_norm
        return pair_rms_norm(ids_T, table, layer.embed_norm.weight, hidden_TH, norm.weight, norm.eps)

    def _first_pairs(self, index: int, ids_T: Tensor, hidden_TH: Tensor, positions_T: Tensor) -> Tensor:
        """The same, where a text's first pair may be among them: that of a layer stands at the layer's number."""
        pairs_TX = self._pairs(index, ids_T, hidden_TH)
        if self.spec.rules.zeroes_first:  # the norm of zeros is zeros
            pairs_TX[:, : self.feature_size].masked_fill_(positions_T[:, None] == index, 0.0)
        return pairs_TX

    def _output(
        self, index: int, pairs_TX: Tensor, rotation: Rotation, attn: AttentionFn, rows_R: Tensor | None = None
    ) -> Tensor:
        raw, normed = self.layer(index)(pairs_TX, rotation, attn, index, rows_R)
        return normed if self.spec.rules.recycles_normed else raw
