"""What is done to an indexer's fresh queries, keys and weights before they are stored and scored.

A layer of sparse attention (DeepSeek V3.2) has an indexer: a small attention with one key head, whose scores select the keys
that the layer's own attention reads.  Its keys lie in a buffer of the cache beside the latents.  This module knows neither
scores nor plans.

Shapes: T tokens, J heads of the indexer, I dims of its heads, R rotated dims, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.operator import use_operator
from specdec.ops.rope import Rotation


@dataclass(frozen=True)
class IndexPrep:
    """rotation: rotary positions, for the first R elements of queries and keys.

    norm_I, bias_I, eps: the LayerNorm of keys, which comes before the rotation.
    scale: the factor on the weights.
    """

    rotation: Rotation
    norm_I: Tensor
    bias_I: Tensor
    eps: float
    scale: float

    def apply_(self, q_TJI: Tensor, key_TI: Tensor, weights_TJ: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates the queries in place, and returns the keys [T, I], normed and rotated, and the weights in float32 or wider,
        scaled.
        """
        R = self.rotation.table_P2D.shape[2]
        normed_TI = F.layer_norm(key_TI, self.norm_I.shape, self.norm_I, self.bias_I, self.eps)
        self.rotation.rotate_(normed_TI[:, None, :R])
        self.rotation.rotate_(q_TJI[..., :R])
        wide = weights_TJ if weights_TJ.element_size() > 4 else weights_TJ.float()
        return normed_TI, wide * self.scale


def store_index(
    index_keys_NI: Tensor, q_TJI: Tensor, key_TI: Tensor, weights_TJ: Tensor, slots_T: Tensor, prep: IndexPrep
) -> Tensor:
    """Norms and rotates keys into their slots (int64), rotates queries in place, and returns the scaled weights [T, J].

    If a slot occurs twice (padding tokens share one), it ends up with either key.
    """
    if use_operator(key_TI):
        from specdec.attention.operators.sparse import INDEX_STORE

        rope, norm = prep.rotation, (prep.norm_I, prep.bias_I, prep.eps, prep.scale)
        scaled_TJ: Tensor = INDEX_STORE(
            q_TJI, key_TI, weights_TJ, index_keys_NI, slots_T, rope.positions_T, rope.table_P2D, *norm
        )
        return scaled_TJ
    if use_kernels(key_TI):
        from specdec.attention.sparse.index_store_triton import launch_store_index

        return launch_store_index(index_keys_NI, q_TJI, key_TI, weights_TJ, slots_T, prep)
    key_TI, scaled_TJ = prep.apply_(q_TJI, key_TI, weights_TJ)
    index_keys_NI.index_copy_(0, slots_T, key_TI)
    return scaled_TJ
