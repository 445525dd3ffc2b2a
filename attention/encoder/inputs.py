"""What a layer of cross attention hands to the attention of a forward pass: queries alone.

The keys and values are an encoder's, and were stored when the text was read; the layer stores nothing.

Shapes: T tokens, Q query heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.attention.inputs import DenseHeads, LayerCall, LayerInputs
from specdec.attention.segment import AttentionPlan


@dataclass
class CrossInputs(LayerInputs):
    """Cross attention.  q_TQD: the queries, as the products want them.

    The layer's number in the encoder's cache is its number in the decoder.  A layer that also reads its own tokens hands these
    over in a call of its own, as ordinary heads.
    """

    q_TQD: Tensor

    def paged(self, call: LayerCall) -> Tensor:
        assert call.encoder_cache is not None, "cross attention needs the cache of an encoder's texts"
        text = call.plan.cross
        assert text is not None, "the plan does not say what the encoder read"
        prepared = call.once("cross", lambda plan: call.backend.prepare(AttentionPlan((text,), plan.positions_T)))
        q_RQD = call.asked(self.q_TQD)
        return call.backend.attend_with_sinks(q_RQD, call.encoder_cache, prepared, call.scoring).out_THD

    def dense(self) -> DenseHeads:
        raise AssertionError("dense attention knows no encoder's texts: training and checks refuse encoder-decoder targets")
