"""What a layer of differential attention hands to a forward pass's attention.

Both softmaxes of a pair of heads weigh the same values: the pair's two value heads side by side.  The layer keeps its keys and
values in an ordinary cache, where the heads of a pair are neighbours, so a view of that cache gives pairs without a copy.  One
call of attention then answers all heads over a whole plan (prefix and suffix are merged in it), and only its output is
subtracted.

Shapes: T tokens, R asked-for tokens, H query heads, K kv heads, X = H + 2K, D head dim, E = 2D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.caches.split_cache import PairedView, paired_values
from specdec.attention.differential.subtract import Difference, subtract_halves
from specdec.attention.inputs import DenseHeads, LayerCall, LayerInputs, QueryInputs
from specdec.ops.rope import HeadPrep


@dataclass
class DifferentialInputs(LayerInputs):
    """qkv_TXD: the raw projections, query heads, then key heads, then value heads, each pair's heads side by side.

    prep: the rotation that queries and keys still need.
    difference: the parameters of the layer's difference.
    """

    qkv_TXD: Tensor
    prep: HeadPrep
    difference: Difference

    def paged(self, call: LayerCall) -> Tensor:
        """[T, H / 2, E], or [R, H / 2, E]."""
        view = whole_heads(call)
        q_THD = call.backend.store(view, self.qkv_TXD, call.slots_T, self.prep)
        return self.finish(call.attend(call.asked(q_THD), PairedView.of(view)))

    def dense(self) -> DenseHeads:
        q_THD, kv_T2KD = self.prep.apply_(self.qkv_TXD)
        return DenseHeads(q_THD, kv_T2KD[:, 0], paired_values(kv_T2KD[:, 1]))

    def dense_as_stored(self, as_stored: Callable[[Tensor], Tensor]) -> DenseHeads:
        q_THD, kv_T2KD = self.prep.apply_(self.qkv_TXD)
        k_TKD, v_TKD = as_stored(kv_T2KD).unbind(1)
        return DenseHeads(q_THD, k_TKD, paired_values(v_TKD))

    def finish(self, out_TQE: Tensor) -> Tensor:
        return subtract_halves(out_TQE, self.prep.num_kv_heads, self.difference)


@dataclass
class DifferentialQueries(QueryInputs):
    """The same of a layer that reads the keys and values of an earlier layer.  The call's view is that layer's.

    qkv_TXD: queries alone, of the asked-for tokens alone; prep has 0 kv heads.
    num_kv_heads: K, of the earlier layer.
    """

    difference: Difference
    num_kv_heads: int

    def paged(self, call: LayerCall) -> Tensor:
        q_THD = call.backend.rotate(self.qkv_TXD, self.prep)
        return self.finish(call.attend(q_THD, PairedView.of(whole_heads(call))))

    def finish(self, out_TQE: Tensor) -> Tensor:
        return subtract_halves(out_TQE, self.num_kv_heads, self.difference)


def whole_heads(call: LayerCall) -> MHAView | QuantView:
    """The layer's part of a cache of ordinary heads."""
    assert isinstance(call.view, MHAView | QuantView), f"differential attention needs a cache of whole heads, got {call.view}"
    return call.view
