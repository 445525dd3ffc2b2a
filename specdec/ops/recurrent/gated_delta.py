"""The gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5: over trees, over parts of prompts, over whole rows.

The rule of rule.py with a number of decay a head, queries and keys of length 1, and u = beta (v - k exp(g) S).  On a GPU each
pass over trees is one or two launches of trees/rule_triton.py, and each over parts two of chunks/launch.py.

Shapes: as of states.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.recurrent.rule import RecurrentRule, RuleInputs, over_parts, over_rows, over_trees
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, TreeSteps

EPS = 1e-6  # of the length of queries and keys


class Gates(NamedTuple):
    """What a layer's gates are made of.  a_TH, b_TH: projections.  A_log_H, dt_bias_H: weights, in float32 or wider.

    most: how strong a token can be: above 1, a state's share along a key may change its sign.
    """

    a_TH: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    most: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self[:4]

    def decay_TH(self, dtype: torch.dtype) -> Tensor:
        """Each token's log-decay, at most 0."""
        return -self.A_log_H.to(dtype).exp() * F.softplus(self.a_TH.to(dtype) + self.dt_bias_H.to(dtype))

    def beta_TH(self, dtype: torch.dtype) -> Tensor:
        """Each token's strength, between 0 and `most`."""
        return self.b_TH.sigmoid().to(dtype) * self.most


def read_tokens(y_BNC: Tensor, gates: Gates, key_heads: int, key_width: int, dtype: torch.dtype) -> RuleInputs:
    """From the convolution's outputs.  gates: of the same tokens, one after the other."""
    B, N, _ = y_BNC.shape
    value_heads, keys = gates.A_log_H.shape[0], key_heads * key_width
    q, k, v = (x.unflatten(-1, (heads, -1)).to(dtype) for x, heads in zip(
        y_BNC.split((keys, keys, y_BNC.shape[2] - 2 * keys), dim=-1), (key_heads, key_heads, value_heads), strict=True
    ))  # fmt: skip
    decay_BNH, beta_BNH = (x.view(B, N, value_heads) for x in (gates.decay_TH(dtype), gates.beta_TH(dtype)))
    return RuleInputs(unit(q) * key_width**-0.5, unit(k), v, decay_BNH, beta_BNH)


def unit(x: Tensor) -> Tensor:
    """Queries or keys of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def tree_outputs(y_TC: Tensor, gates: Gates, memory: RuleStates, steps: TreeSteps) -> Tensor:
    """[T, H, V]: each node's output, in y's dtype; see `over_trees`.  y_TC: queries, keys and values, by the convolution."""
    if use_kernels(y_TC):
        from specdec.ops.recurrent.trees.rule_triton import launch_tree_rule

        return launch_tree_rule(y_TC, gates, memory, steps)
    tokens = read_tokens(y_TC.view(*steps.parents_BN.shape, -1), gates, *_widths(memory))
    return over_trees(tokens, memory, steps).flatten(0, 1).to(y_TC.dtype)


def chunk_outputs(y_TC: Tensor, gates: Gates, memory: RuleStates, steps: ChunkSteps) -> Tensor:
    """[T, H, V]: each token's output, in y's dtype; see `over_parts`."""
    if use_kernels(y_TC):
        from specdec.ops.recurrent.chunks.launch import launch_chunk_rule

        return launch_chunk_rule(y_TC, gates, memory, steps)
    tokens = read_tokens(y_TC[None], gates, *_widths(memory))
    return over_parts(tokens, memory, steps).to(y_TC.dtype)


def _widths(memory: RuleStates) -> tuple[int, int, torch.dtype]:
    """Key heads, their width, and the dtype of states."""
    _, _, G, K = memory.k_LNGK.shape
    return G, K, memory.state_PHKV.dtype


def row_outputs(y_BNC: Tensor, gates: Gates, key_heads: int, key_width: int) -> Tensor:
    """[B, N, H, V], in y's dtype; see `over_rows`."""
    dtype = torch.promote_types(y_BNC.dtype, torch.float32)
    return over_rows(read_tokens(y_BNC, gates, key_heads, key_width, dtype)).to(y_BNC.dtype)


GATED_DELTA = RecurrentRule(tree_outputs, chunk_outputs, row_outputs)
