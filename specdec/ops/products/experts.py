"""A mixture of experts over weights in 8 or 4 bits: the weighted sum of the MLPs of each token's top-k experts.

On a CPU, in float32, under autograd and in a trace the weights are dequantised, and multiplied; the functions of
models/mixtures/products.py do that.  On a GPU the kernel in kernels/experts/mixture_triton.py converts quantised values on
their way to the tensor cores, for any number of tokens.  This module knows no model.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), P = T * K pairs, F intermediate size of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.products.dense import silu_mul
from specdec.ops.products.formats.experts import QuantisedStack, scales_form
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.stacked import weighted_sum
from specdec.ops.products.tiles.experts import MAX_READ, ExpertTiles


class SwiGLU(NamedTuple):
    """How an expert's gate multiplies its up projection: gate * sigmoid(alpha * gate) * up.

    limit: gpt-oss's, which holds gates to at most the limit, and ups between -limit and limit, and adds 1 to them; 0: none.
    """

    alpha: float = 1.0
    limit: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[.., F] of [.., 2F]: the first half is the gate's."""
        if not self.limit:
            assert self.alpha == 1.0
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))


class Form(NamedTuple):
    """What experts compute besides their products.  Biases: [E, rows of the projection].

    skips: whether some pairs are skipped.  Their topk_ids are E, which is no expert, and their weights 0; what would be their
    outputs is never written.
    """

    gate: SwiGLU = SwiGLU()
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    skips: bool = False


PLAIN = Form()


class QuantisedExperts(NamedTuple):
    """gate_up: gate and up projections, 2F rows each; the first F rows are the gate's."""

    gate_up: QuantisedStack
    down: QuantisedStack
    form: Form = PLAIN


def has_experts_kernel(x_TH: Tensor, experts: QuantisedExperts) -> bool:
    """Whether `quantised_experts` can compute the mixture."""
    if not use_kernels(x_TH) or x_TH.dtype == torch.float32 or not has_pdl(x_TH.device):
        return False
    stacks = experts.gate_up, experts.down
    return stacks[0].kind == stacks[1].kind and all(scales_form(stack.kind, stack.group_size) for stack in stacks)


def quantised_experts(
    x_TH: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, experts: QuantisedExperts, numerics: Numerics = FAST,
    tiles: ExpertTiles | None = None, max_read: int = MAX_READ,
) -> Tensor:  # fmt: skip
    """[T, H]: the outputs of each token's top-k experts, times their weights (float32), added up in float32.

    tiles: other ones than the policy's.  max_read: up to so many pairs, each program finds its own; more are sorted first.
    """
    from specdec.ops.products.kernels.experts.mixture_triton import launch_quantised_experts

    (T, K), E = topk_ids_TK.shape, experts.gate_up.experts
    pairs, counts_E = topk_ids_TK.flatten(), None
    if T * K > max_read:
        pairs, counts_E = by_expert(topk_ids_TK, E)
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    form, tiles = experts.form, tiles or numerics.expert_tiles(T * K, E)
    mid_PF = launch_quantised_experts(x_TH, experts.gate_up, form.gate_up_bias, pairs, counts_E, K, form.gate, tiles)
    out_PH = launch_quantised_experts(mid_PF, experts.down, form.down_bias, pairs, counts_E, K, None, tiles)
    return weighted_sum(out_PH.view(T, K, -1), topk_weights_TK.contiguous())


def by_expert(topk_ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(the indices of pairs sorted by expert, int64 [P]; how many pairs each expert has, int32 [E]).

    Pairs that are skipped come last.
    """
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=topk_ids_TK.device)
    counts.index_add_(0, topk_ids_TK.flatten(), counts.new_ones(topk_ids_TK.numel()))
    return topk_ids_TK.flatten().argsort(stable=True), counts[:experts]
