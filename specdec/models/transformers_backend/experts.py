"""Mixtures of experts in transformers' models, without a host read: the same mixture eagerly and inside CUDA graphs.

transformers brings two ways that read nothing on the host: a grouped matrix product, where torch has one (ops/grouped.py), and
batched products over the chosen experts' weights, copied for each pair of a token and an expert.

Shapes: T tokens, H hidden, E experts chosen for a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

from specdec.ops.products.grouped import has_grouped_product

EXPERTS = "specdec"  # its name
COPIED_BYTES = 256 << 20  # of experts' weights at a time


def experts_forward(experts: nn.Module, hidden_TH: Tensor, index_TE: Tensor, weights_TE: Tensor) -> Tensor:
    """[T, H]: the chosen experts' outputs, weighted and summed."""
    matrices = [weight for weight in experts.parameters() if weight.dim() == 3]
    if has_grouped_product(matrices):
        return grouped_mm_experts_forward(experts, hidden_TH, index_TE, weights_TE)
    bytes_per_token = index_TE.shape[1] * sum(weight[0].numel() * weight.element_size() for weight in matrices)
    size = max(1, COPIED_BYTES // bytes_per_token)
    parts = zip(*(x.split(size) for x in (hidden_TH, index_TE, weights_TE)), strict=True)
    return torch.cat([batched_mm_experts_forward(experts, *part) for part in parts])


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
