"""Kimi's delta rule (KDA, arXiv 2510.26692): over trees, over parts of prompts, over whole rows.

The rule of rule.py as the gated delta rule has it, but that each channel of a head's keys has a decay of its own.  Every head
has queries, keys and values.  On a GPU each pass over trees is one or two launches, and each over parts two, of kimi/launch.py.

Shapes: as of states.py, with G = H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.recurrent.gated_delta import unit
from specdec.ops.recurrent.rule import RecurrentRule, RuleInputs, over_parts, over_rows, over_trees
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, TreeSteps


class KimiGates(NamedTuple):
    """a_TC, b_TH: projections, of decays (of each head's channels, one head after the other) and strengths.

    A_log_H, dt_bias_C: weights, in float32 or wider.
    """

    a_TC: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_C: Tensor

    def decay_THK(self, dtype: torch.dtype) -> Tensor:
        """Each token's log-decays, at most 0."""
        steps_TC = F.softplus(self.a_TC.to(dtype) + self.dt_bias_C.to(dtype))
        return -self.A_log_H.to(dtype).exp()[:, None] * steps_TC.unflatten(1, (len(self.A_log_H), -1))

    def beta_TH(self, dtype: torch.dtype) -> Tensor:
        """Each token's strength, between 0 and 1."""
        return self.b_TH.sigmoid().to(dtype)


def read_tokens(y_BNC: Tensor, gates: KimiGates, dtype: torch.dtype) -> RuleInputs:
    """From the convolution's outputs: queries of all heads, their keys, their values, all equally wide."""
    (B, N, _), H = y_BNC.shape, len(gates.A_log_H)
    q, k, v = (x.unflatten(-1, (H, -1)).to(dtype) for x in y_BNC.chunk(3, dim=-1))
    decay_BNHK = gates.decay_THK(dtype).view(B, N, H, -1)
    return RuleInputs(unit(q) * q.shape[-1] ** -0.5, unit(k), v, decay_BNHK, gates.beta_TH(dtype).view(B, N, H))


def tree_outputs(y_TC: Tensor, gates: KimiGates, memory: RuleStates, steps: TreeSteps) -> Tensor:
    """[T, H, V]: each node's output, in y's dtype; see `over_trees`."""
    if use_kernels(y_TC):
        from specdec.ops.recurrent.kimi.launch import launch_kimi_trees

        return launch_kimi_trees(y_TC, gates, memory, steps)
    tokens = read_tokens(y_TC.view(*steps.parents_BN.shape, -1), gates, memory.state_PHKV.dtype)
    return over_trees(tokens, memory, steps).flatten(0, 1).to(y_TC.dtype)


def chunk_outputs(y_TC: Tensor, gates: KimiGates, memory: RuleStates, steps: ChunkSteps) -> Tensor:
    """[T, H, V]: each token's output, in y's dtype; see `over_parts`."""
    if use_kernels(y_TC):
        from specdec.ops.recurrent.kimi.parts.launch import launch_kimi_parts

        return launch_kimi_parts(y_TC, gates, memory, steps)
    return over_parts(read_tokens(y_TC[None], gates, memory.state_PHKV.dtype), memory, steps).to(y_TC.dtype)


def row_outputs(y_BNC: Tensor, gates: KimiGates, heads: int, width: int) -> Tensor:
    """[B, N, H, V], in y's dtype; see `over_rows`."""
    assert y_BNC.shape[2] == 3 * heads * width
    return over_rows(read_tokens(y_BNC, gates, torch.promote_types(y_BNC.dtype, torch.float32))).to(y_BNC.dtype)


KIMI_DELTA = RecurrentRule(tree_outputs, chunk_outputs, row_outputs)
