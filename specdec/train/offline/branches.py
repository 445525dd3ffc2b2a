"""Draft trees of an EAGLE head from many places of one text at once, without a cache.

The head reads the text's true pairs once.  A branch of a tree then reads the true pairs before its place, and the branch's own
pairs, which is what it reads when it drafts.  This file knows heads and trees.  It knows no engine, page or target.

Shapes: T tokens of the text, P places, K branches, R = P * K, Q = N * G query heads, N key and value heads, D head dimension,
J levels of a branch's own pairs, H hidden size, F target feature size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.attention.eager.dense import attend_rows, per_row
from specdec.attention.inputs import LayerInputs
from specdec.attention.kinds import PLAIN, LayerKind, Scoring
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.eagle.head import EagleHead
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates, expand, first_level


class KeptPairs:
    """The attention (AttentionFn) over a text's true pairs.  kept: each layer's keys and values of them, [N, T, D]."""

    def __init__(self, kinds: Sequence[LayerKind]) -> None:
        self.kinds = kinds
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert rows_R is None and scoring == Scoring(scale=scoring.scale), "EAGLE heads have plain scores"
        q, k, v = (per_row(x, 1) for x in inputs.dense())
        self.kept[layer] = k[0], v[0]
        return attend_rows(q, k, v, self.kinds[layer], scoring).transpose(1, 2).flatten(0, 1)


class BranchPairs:
    """The attention (AttentionFn) of branches that grow from places of a text; each pass of the head is one level.

    places_P: positions of the roots.  The pairs before a root are true ones.
    """

    def __init__(self, text: KeptPairs, places_P: Tensor, topk: int) -> None:
        self.text, self.places_P, self.topk = text, places_P, topk
        self.own: dict[int, tuple[Tensor, Tensor]] = {}  # of each layer: keys and values [P, K, J, N, D] of each branch's pairs

    def follow(self, parents_PK: Tensor) -> None:
        """Gives each branch the pairs of its parent."""
        at = parents_PK[:, :, None, None, None]
        self.own = {layer: (k.take_along_dim(at, 1), v.take_along_dim(at, 1)) for layer, (k, v) in self.own.items()}

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert rows_R is None and scoring == Scoring(scale=scoring.scale), "EAGLE heads have plain scores"
        (k_NTD, v_NTD), kind, (P, K) = self.text.kept[layer], self.text.kinds[layer], (len(self.places_P), self.topk)
        q, k, v = (x.unflatten(0, (P, K)) for x in inputs.dense())
        before = self.own.get(layer)
        k_PKJND, v_PKJND = (
            x[:, :, None] if before is None else torch.cat((before[i], x[:, :, None]), dim=2) for i, x in enumerate((k, v))
        )
        self.own[layer] = k_PKJND, v_PKJND
        q = q.unflatten(2, (k.shape[2], -1)).float() * scoring.factor(q.shape[-1])
        at_T, at_J = (torch.arange(n, dtype=torch.int64, device=q.device) for n in (k_NTD.shape[1], k_PKJND.shape[2]))
        reads_PT, reads_PJ = at_T < self.places_P[:, None], torch.ones_like(at_J, dtype=torch.bool).expand(P, -1)
        if not kind.reads_all:
            first_P1 = kind.first_keys(self.places_P + at_J[-1])[:, None]
            reads_PT, reads_PJ = reads_PT & (at_T >= first_P1), self.places_P[:, None] + at_J >= first_P1
        of_text = torch.einsum("pkngd,ntd->pkngt", q, k_NTD.float())
        of_own = torch.einsum("pkngd,pkjnd->pkngj", q, k_PKJND.float())
        reads = torch.cat((reads_PT, reads_PJ), dim=1)[:, None, None, None]
        weights = torch.cat((of_text, of_own), dim=-1).masked_fill(~reads, -torch.inf).softmax(-1)
        text, own = weights.split((len(at_T), len(at_J)), dim=-1)
        out = torch.einsum("pkngt,ntd->pkngd", text, v_NTD.float()) + torch.einsum("pkngj,pkjnd->pkngd", own, v_PKJND.float())
        return out.flatten(2, 3).flatten(0, 1).to(v.dtype)


class OfflineDrafter:
    """A head along one text.  ids_T: int64.  features_TF: the target's features of its tokens."""

    def __init__(self, head: EagleHead, ids_T: Tensor, features_TF: Tensor) -> None:
        self.head, self.ids_T = head, ids_T
        self.text = KeptPairs(head.config.model.layer_kinds)
        positions_T = torch.arange(len(ids_T) - 1, dtype=torch.int64, device=ids_T.device)
        self.hidden_TH = head(ids_T[1:], head.fuse(features_TF[:-1]), positions_T, self.text)

    def trees(self, places_P: Tensor, spec: SpecConfig) -> DraftTree:
        """The trees that are drafted where the tokens at these places, from 1 on, are the last known ones."""
        head, K, S, P = self.head, spec.topk, spec.max_steps, len(places_P)
        hidden_PKH = self.hidden_TH[places_P - 1][:, None]
        candidates = Candidates.empty(P, K, S, places_P.device)
        logp_PK, tokens_PK = head.vocabulary.top(head.logits(hidden_PKH[:, 0]), K, head.d2t_V)
        beam, attn = first_level(candidates, tokens_PK, logp_PK), BranchPairs(self.text, places_P, K)
        for level in range(2, S + 1):
            parents_PK = beam.parents_BK
            attn.follow(parents_PK)
            hidden_RH = hidden_PKH.take_along_dim(parents_PK[..., None], 1).flatten(0, 1)
            positions_R = (places_P + level - 2).repeat_interleave(K)
            hidden_RH = head(beam.tokens_BK.flatten(), hidden_RH, positions_R, attn)
            hidden_PKH = hidden_RH.unflatten(0, (P, K))
            beam = expand(candidates, level, beam, head.logits(hidden_RH), head.d2t_V, head.vocabulary)
        return best_nodes(candidates, self.ids_T[places_P], spec.num_draft_tokens, S)
