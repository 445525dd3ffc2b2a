"""DFlash2 heads: DFlash's blocks with convolutions around each sublayer, and a choice among each row's candidates.

Trees are exact: a row's scores depend on its place in the block and on the token before it alone, so all scores of a round are
computed at once (children.py), and the best nodes of all paths are the tree (rounds/grow.py).

Shapes: B sequences, S levels, T = B * S, R rows of blocks, C context rows or candidates, H hidden, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.block.dflash import DFlashHead, attended
from specdec.draft.block.dflash2.children import best_children
from specdec.draft.block.dflash2.convolution import SublayerConvolution
from specdec.draft.block.dflash2.selector import CandidateSelector
from specdec.draft.block.rounds.grow import best_paths
from specdec.draft.formats.parts import Part
from specdec.draft.formats.reading import PartNames
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.shared_noise import noise_of_levels
from specdec.models.causal_lm import DecoderLayer
from specdec.ops.noise.gumbel import Noise


class DFlash2Head(DFlashHead):
    """convolutions: of each layer the one around its attention, then the one around its MLP; or none at all."""

    reads_drafts = True

    def __init__(self, config: HeadSpec, max_positions: int) -> None:
        super().__init__(config, max_positions)
        model, made, chosen = config.model, self.block.convolution, self.block.selection
        assert chosen is not None
        self.candidates = chosen.candidates
        count = 0 if made is None else 2 * model.num_layers
        self.convolutions = nn.ModuleList(
            SublayerConvolution(model.hidden_size, made, self.block.size) for _ in range(count) if made is not None
        )
        self.selector = CandidateSelector(model.vocab_size, model.hidden_size, chosen.rank)

    def parts(self, names: PartNames) -> Iterator[Part]:
        yield from super().parts(names)
        called = [f"{layer}.{each}_conv" for layer in (names.first, *names.layers) for each in ("attention", "mlp")]
        for convolution, name in zip(self.convolutions, called):
            yield from cast(SublayerConvolution, convolution).parts(name)
        yield from self.selector.parts("candidate_selector")

    def forward(self, ids_R: Tensor, context_CH: Tensor, positions: Tensor, attn: AttentionFn) -> Tensor:
        if not self.convolutions:
            return super().forward(ids_R, context_CH, positions, attn)
        rotation, layers = self.rotary.at(positions), [cast(DecoderLayer, layer) for layer in self.layers]
        convolutions = [cast(SublayerConvolution, each) for each in self.convolutions]
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        x, normed_RH = self.embedded(ids_R, None)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            around_attention, around_mlp = convolutions[2 * index : 2 * index + 2]
            read_TH, own_RX = around_attention.before(normed_RH, context_CH)
            found = attended(layer.self_attn, read_TH, rotation, attn, index, len(ids_R))
            x, normed_RH = around_attention.after(x, found, own_RX, layer.post_attention_layernorm)
            read_RH, own_RX = around_mlp.before(normed_RH)
            x, normed_RH = around_mlp.after(x, layer.mlp(read_RH, partials=True), own_RX, next_norm)
        return normed_RH

    def default_shape(self) -> SpecConfig:
        usual = super().default_shape()
        return usual if usual.topk <= self.candidates else SpecConfig(usual.num_steps, self.candidates)

    def check(self, spec: SpecConfig) -> None:
        super().check(spec)
        if spec.topk > self.candidates:
            raise ValueError(
                f"topk must be at most {self.candidates}, the candidates among which this head chooses a token, got "
                f"{spec.topk}; nearest setting that works: topk={self.candidates}"
            )

    def tree(self, hidden_BSH: Tensor, bonus_B: Tensor, spec: SpecConfig, noise: Noise | None = None) -> DraftTree:
        """Where the target adds noise, candidates are the likeliest tokens with it, and scores have it too.

        A small head's trees of 32 nodes emitted 2.14 tokens a round so, at temperature 1, and 1.97 with candidates by logits
        alone.  Scores are taken as they are: their softmax made flatter or sharper gave trees that emit fewer.
        """
        (B, S), C, selector = hidden_BSH.shape[:2], self.candidates, self.selector
        logits_TW = self.logits(hidden_BSH.flatten(0, 1))
        own_TC, tokens_TC = self.vocabulary.top(logits_TW, C, self.d2t_V, noise=noise and noise_of_levels(noise, S))
        gates_BSr = selector.projection(hidden_BSH.flatten(0, 1)).view(B, S, -1)
        tokens_BSC = tokens_TC.view(B, S, C)
        logp_BSPK, children_BSPK = best_children(
            own_TC.view(B, S, C), tokens_BSC, bonus_B, gates_BSr, selector.predecessor.weight, selector.successor.weight,
            spec.topk, noise,
        )  # fmt: skip
        tree = best_paths(logp_BSPK, tokens_BSC, bonus_B, spec.num_draft_tokens, children_BSPK)
        return DraftTree.chain(tree.tokens_BN) if spec.topk == 1 else tree

    def walk(self, hidden: Tensor, before: Tensor) -> Tensor:
        """As of BlockHead: -inf for tokens that are no candidates."""
        logits = self.logits(hidden)
        own, candidates = logits.topk(self.candidates, dim=-1)
        scores = own + self.selector.added(hidden, before, candidates)
        return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter(-1, candidates, scores)
