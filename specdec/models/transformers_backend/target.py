"""Any decoder-only causal LM of transformers as a target: its own code computes all but attention, which is ours.

Prompts and trees come as one ragged sequence of tokens; positions and our attention keep them apart, and a check at loading
(load.py) makes sure that nothing else in the model mixes tokens.

Shapes: T tokens, H hidden or query heads, K kv heads, X = H + 2K, D head dim, V vocabulary, A captured states side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn, DenseHeads, HeadInputs, LayerInputs, QueryInputs, SplitInputs
from specdec.attention.kinds import Scoring
from specdec.models.causal_lm import own_rows
from specdec.models.config import ModelConfig
from specdec.models.layers import Embedding
from specdec.models.linear import Linear
from specdec.models.making import making
from specdec.models.sharding import join
from specdec.models.target import Target, TargetOutput
from specdec.models.transformers_backend.attention import AttentionCall, answering
from specdec.models.transformers_backend.last_rows import Cut, LastRows
from specdec.models.transformers_backend.make import make_parts
from specdec.models.transformers_backend.parts import CountedTokens
from specdec.ops.rope import HeadPrep
from specdec.ops.rows import select_rows
from specdec.parallel.group import ALONE, Group
from specdec.parallel.shard import Shard
from specdec.parallel.vocabulary import Vocabulary


class TransformersTarget(Target):
    """Target of a transformers model that was built with our attention function.  config: as read from its folder."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        self.parts = make_parts(model)
        self.decoder, self.head = self.parts.decoder, self.parts.head  # so that they move and count as ours
        with making(torch.device("meta"), table.dtype):
            self.embed_tokens = Embedding(table.shape[0], table.shape[1])
        self.embed_tokens.weight, self.lm_head = table, Linear.of(head.weight, head.bias)
        self.vocabulary = Vocabulary.of(head.out_features, ALONE)
        self.captured: ContextVar[dict[int, Tensor]] = ContextVar("captured")
        self.parts.on_layers(self._see)
        self._prep, self._query_prep = HeadPrep(None, config.num_kv_heads), HeadPrep(None, 0)
        self._last_rows = LastRows(self.parts.layers, config.first_sharing_layer)
        self.cuts_rows = True  # whether layers that share keys may run some rows only; the check at loading may say no
        self._sinks: dict[int, Tensor] = {}
        self._counts_from_cache = any(getattr(module, "attn_temperature_tuning", False) for module in self.decoder.modules())

    def join(self, group: Group) -> None:
        """Tells one of several ranks, each of which holds the whole model, of the others.

        Each hands out the logits of its run of the vocabulary: what all of them compare is then the same on all, even if the
        model's code rounds differently from one run to the next.
        """
        shard = Shard(group.rank, group.size)
        join(self, group)
        self.config = replace(self.config, shard=shard)  # of draft heads, whose weights ranks do share
        weight, bias = self.lm_head.weight, self.lm_head.bias
        assert weight is not None
        self.lm_head = Linear.of(own_rows(weight, shard), None if bias is None else own_rows(bias, shard))

    def chain(self) -> nn.ModuleList:
        """See Target.chain."""
        return self.parts.layers

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attn: AttentionFn,
        aux_layers: Sequence[int] = (),
        rows_R: Tensor | None = None,
    ) -> TargetOutput:
        """See `Target`."""
        # Nodes after the last position can't be accepted, but a table of learnt positions must not be read there.
        positions_T = positions_T.clamp(max=self.config.max_position - 1)
        more = {"past_key_values": CountedTokens(positions_T)} if self._counts_from_cache else {}
        wanted = dict.fromkeys(aux_layers)
        cut = None if rows_R is None else self._cut(len(ids_T), aux_layers, rows_R)
        token = self.captured.set(wanted)  # type: ignore[arg-type]  # filled by the layers
        keys: dict[int, Tensor] = {}
        try:
            with answering(lambda call: self._attend(call, attn, keys, cut)), self._last_rows.cutting(cut):
                hidden_TH = self.parts.hidden(ids_T, positions_T, **more)
        finally:
            self.captured.reset(token)
        aux = [state[0] for state in wanted.values() if state is not None]
        if rows_R is not None and cut is None:
            hidden_TH = select_rows(hidden_TH, rows_R)
        return TargetOutput(hidden_TH, torch.cat(aux, dim=-1) if aux else None)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V], as the model's own forward makes them; of this rank's run of the vocabulary."""
        logits = self.parts.logits(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        first, own = self.vocabulary[:2]
        return logits if own == logits.shape[-1] else logits[..., first : first + own].contiguous()

    def _see(self, layer: int, state_1TH: Tensor) -> None:
        wanted = self.captured.get()
        if layer in wanted:
            wanted[layer] = state_1TH

    def _cut(self, tokens: int, aux_layers: Sequence[int], rows_R: Tensor) -> Cut | None:
        """From which layer on a pass has these rows only; None if it has all to its end."""
        first = self.config.first_of_rows(aux_layers)
        return (
            Cut(first, tokens, rows_R) if self.cuts_rows and first < self.config.num_layers and len(rows_R) < tokens else None
        )

    def _attend(self, call: AttentionCall, attn: AttentionFn, keys: dict[int, Tensor], cut: Cut | None) -> Tensor:
        """[1, T, H, D] of one layer's call.  keys: those of earlier layers of this pass, by layer."""
        layer: int = call.module.layer_idx  # type: ignore[assignment]
        kind = self.config.layer_kinds[layer]
        assert call.sliding_window == kind.window and call.extra["attention_mask"] is None, (layer, kind, call.extra)
        scoring = Scoring(call.scaling, call.softcap, self._sinks_of(layer, call.sinks_H), call.slopes_H)
        source = self.config.kv_source[layer]
        if source != layer:
            # A pass that goes on at a later layer has run that one in an earlier call.
            assert call.key is keys.get(source, call.key), f"layer {layer} was to read the keys of layer {source}"
            queries = QueryInputs(call.query[0].transpose(0, 1).contiguous(), self._query_prep)
            return attn(layer, queries, cut.rows_R if cut and layer >= cut.first else None, scoring)[None]
        keys[layer] = call.key
        heads = [x[0].transpose(0, 1) for x in (call.query, call.key, call.value)]
        inputs: LayerInputs = SplitInputs(DenseHeads(*heads))
        if not self.config.value_width:
            inputs = HeadInputs(torch.cat(heads, dim=1), self._prep)
        return attn(layer, inputs, None, scoring)[None]

    def _sinks_of(self, layer: int, sinks_H: Tensor | None) -> Tensor | None:
        """In float32; converted in the first pass, the check at loading."""
        if sinks_H is None or sinks_H.dtype == torch.float32:
            return sinks_H
        if layer not in self._sinks:
            self._sinks[layer] = sinks_H.float()
        return self._sinks[layer]
