"""The rule of Mamba-2 (SSD, arXiv 2405.21060): over trees, over parts of prompts, over whole rows.

The rule of rule.py with a number of decay a head and u = v.  In Mamba-2's words: queries are C, keys B, a key head is a group,
a key's width is the state's size, and a value is dt x.  A head's output has D x besides.

On a GPU each pass over trees is one launch of mamba/ssd_tree_triton.py, with the convolution if trees have one node, and each
over parts two of mamba/launch.py, or three.

Shapes: as of states.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.recurrent.conv import Convolution, tree_convolution
from specdec.ops.recurrent.rule import RecurrentRule, RuleInputs, over_parts, over_rows, over_trees
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, RuleStates, TreeSteps


class SsdGates(NamedTuple):
    """dt_TH: a projection, of how far each token's step goes.  A_log_H, dt_bias_H, D_H: weights, in float32 or wider."""

    dt_TH: Tensor
    A_log_H: Tensor
    dt_bias_H: Tensor
    D_H: Tensor

    def steps_TH(self, dtype: torch.dtype) -> Tensor:
        """How far each token's step goes: above 0."""
        return F.softplus(self.dt_TH.to(dtype) + self.dt_bias_H.to(dtype))


def read_tokens(y_BNC: Tensor, gates: SsdGates, groups: int, state_size: int, dtype: torch.dtype) -> tuple[RuleInputs, Tensor]:
    """(what the rule reads, D x [B, N, H, V]) of the convolution's outputs: all groups' C, their B, all heads' x."""
    keys = groups * state_size
    q, k, x = y_BNC.split((keys, keys, y_BNC.shape[2] - 2 * keys), dim=-1)
    x_BNHV = x.unflatten(-1, (len(gates.D_H), -1)).to(dtype)
    steps_BNH = gates.steps_TH(dtype).view(x_BNHV.shape[:3])
    q, k = (each.unflatten(-1, (groups, -1)).to(dtype) for each in (q, k))
    tokens = RuleInputs(q, k, x_BNHV * steps_BNH[..., None], -gates.A_log_H.to(dtype).exp() * steps_BNH)
    return tokens, x_BNHV * gates.D_H.to(dtype)[:, None]


def tree_outputs(y_TC: Tensor, gates: SsdGates, memory: RuleStates, steps: TreeSteps) -> Tensor:
    """[T, H, V]: each node's output, in y's dtype; see `over_trees`."""
    if use_kernels(y_TC):
        from specdec.ops.recurrent.mamba.ssd_tree_triton import launch_ssd_tree

        return launch_ssd_tree(y_TC, gates, memory, steps)
    tokens, more_BNHV = read_tokens(y_TC.view(*steps.parents_BN.shape, -1), gates, *_sizes(memory))
    return (over_trees(tokens, memory, steps) + more_BNHV).flatten(0, 1).to(y_TC.dtype)


def convolved_tree_outputs(
    x_TC: Tensor, conv: Convolution, gates: SsdGates, layer: LayerStates, steps: TreeSteps
) -> Tensor:  # fmt: skip
    """[T, H, V]: of what the convolution reads."""
    assert layer.rule is not None
    if use_kernels(x_TC) and steps.parents_BN.shape[1] == 1:
        from specdec.ops.recurrent.mamba.ssd_step_triton import launch_convolved_step

        return launch_convolved_step(x_TC, conv, gates, layer, steps)
    return tree_outputs(tree_convolution(x_TC, conv, layer.conv, steps), gates, layer.rule, steps)


def chunk_outputs(y_TC: Tensor, gates: SsdGates, memory: RuleStates, steps: ChunkSteps) -> Tensor:
    """[T, H, V]: each token's output, in y's dtype; see `over_parts`."""
    if use_kernels(y_TC):
        from specdec.ops.recurrent.mamba.launch import launch_ssd_parts

        return launch_ssd_parts(y_TC, gates, memory, steps)
    tokens, more_1THV = read_tokens(y_TC[None], gates, *_sizes(memory))
    return (over_parts(tokens, memory, steps) + more_1THV[0]).to(y_TC.dtype)


def row_outputs(y_BNC: Tensor, gates: SsdGates, groups: int, state_size: int) -> Tensor:
    """[B, N, H, V], in y's dtype; see `over_rows`."""
    tokens, more_BNHV = read_tokens(y_BNC, gates, groups, state_size, torch.promote_types(y_BNC.dtype, torch.float32))
    return (over_rows(tokens) + more_BNHV).to(y_BNC.dtype)


def _sizes(memory: RuleStates) -> tuple[int, int, torch.dtype]:
    """Groups, the state's size, and the dtype of states."""
    _, _, G, K = memory.k_LNGK.shape
    return G, K, memory.state_PHKV.dtype


SSD = RecurrentRule(tree_outputs, chunk_outputs, row_outputs, convolved_tree_outputs)
