"""Layers of Qwen's hybrids: the gated delta net, and attention whose output a gate of the same tokens multiplies.

Shapes: T tokens, R rows asked for, H hidden size, Q query heads, K key/value heads, D head dimension; V value heads of the
delta rule.
"""

from __future__ import annotations

from torch import Tensor

from specdec.attention.inputs import AttentionFn, HeadInputs
from specdec.models.causal_lm import PreNormLayer
from specdec.models.config import ModelConfig
from specdec.models.layers import SelfAttention
from specdec.models.mixtures.layer import mlp_of
from specdec.models.qwen_hybrid.config import NEXT
from specdec.models.recurrent.delta_net import GatedDeltaNet
from specdec.ops.products.partials import Partials
from specdec.ops.recurrent.gates.output_gate import gated_output
from specdec.ops.rope import HeadPrep, Rotation

ROWS = 8  # of a matrix: a multiple of so many is what the kernels of few tokens take (ops/products/tiles/dense.py)


class GatedAttention(SelfAttention):
    """SelfAttention whose output is multiplied by the sigmoid of a gate of its own width, before the output projection.

    The projection yields gates of all heads, and then queries, keys and values; the part q_proj holds both of the former, as a
    checkpoint's matrix does (there a head's queries and its gates alternate).
    """

    query_rows = 2

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """From x [T, H] to [T, H], or to [R, H] with rows_R.  The caller adds the result to the residual stream."""
        assert self.qk_norm is not None and not self.shares_kv
        gate_TQD, qkv_TXD = self.project(x_TH).tensor_split((self.num_heads,), dim=1)
        prep = HeadPrep(rotation, self.num_kv_heads, self.qk_norm.weight, self.qk_norm.eps)
        out_RQD = attn(layer, HeadInputs(qkv_TXD, prep), rows_R, self.scoring)
        return self.o_proj(gated_output(out_RQD, gate_TQD, rows_R), partials=True)


def delta_net(config: ModelConfig) -> GatedDeltaNet:
    """The gated delta net, by the names of the family's matrices."""
    own = config.recurrent
    assert own is not None and own.rule is not None
    V, wide = own.rule.value_heads, {"in_proj_qkv": own.channels, "in_proj_z": own.outputs}
    if config.family == NEXT:
        return GatedDeltaNet(config, {"in_proj_qkvz": sum(wide.values())}, {"in_proj_ba": 2 * V}, config.rms_norm_eps)
    return GatedDeltaNet(config, wide, {"in_proj_b": V, "in_proj_a": V}, config.rms_norm_eps)


def hybrid_layer(config: ModelConfig, index: int) -> PreNormLayer:
    """The layer of that number in a target, or in its MTP layers."""
    is_recurrent = config.layer_kinds[index].recurrent
    attention = delta_net(config) if is_recurrent else GatedAttention(config, config.hidden_size)
    return PreNormLayer(config, attention, mlp_of(config, index))
