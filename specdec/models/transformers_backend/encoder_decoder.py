"""Encoder-decoder models of transformers as targets: their own code computes all but attention, which is ours.

Shapes: T tokens of the decoder, S tokens of the encoder, Q query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.encoder.inputs import CrossInputs
from specdec.attention.encoder.texts import attend_texts, encoder_segment
from specdec.attention.inputs import AttentionFn
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment
from specdec.models.config import ModelConfig
from specdec.models.target import EncoderDecoder
from specdec.models.transformers_backend.attention import AttentionCall
from specdec.models.transformers_backend.encoder_parts import EncoderDecoderParts
from specdec.models.transformers_backend.last_rows import Cut
from specdec.models.transformers_backend.target import TransformersTarget


class EncoderDecoderTarget(TransformersTarget, EncoderDecoder):
    """Target of a transformers encoder-decoder model that was built with our attention function."""

    parts: EncoderDecoderParts

    def __init__(self, model: Any, config: ModelConfig) -> None:
        super().__init__(model, config)
        self.encoder = self.parts.encoder  # so that it moves and counts as ours
        self.embed_tokens.weight = self.decoder.get_input_embeddings().weight  # the model's may be its encoder's

    def read_text(self, ids_S: Tensor, backend: Backend) -> Tensor:
        """See `EncoderDecoder`."""
        S, device = ids_S.shape[0], ids_S.device
        cu_seqlens = torch.arange(0, S + 1, S, dtype=torch.int32, device=device)
        segments: dict[int | None, Segment] = {}

        def attend(call: AttentionCall) -> Tensor:
            reach = call.sliding_window
            if reach not in segments:
                segments[reach] = encoder_segment(
                    cu_seqlens, S, torch.arange(S, dtype=torch.int64, device=device), reach, ragged=False
                )
            q_SQD, k_SKD, v_SKD = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
            return attend_texts(backend, q_SQD, k_SKD, v_SKD, segments[reach], Scoring(call.scaling, call.softcap))[None]

        token = self.captured.set({})  # no layer's output of this pass is anybody's feature
        try:
            return self.parts.read_text(ids_S, attend)
        finally:
            self.captured.reset(token)

    def _attend(self, call: AttentionCall, attn: AttentionFn, keys: dict[int, Tensor], cut: Cut | None) -> Tensor:
        if not self.parts.is_cross(call):
            return super()._attend(call, attn, keys, cut)
        layer: int = call.module.layer_idx  # type: ignore[assignment]
        return attn(layer, CrossInputs(call.query[0].transpose(0, 1)), None, Scoring(call.scaling, call.softcap))[None]
