"""Mixtures of experts in transformers' models, without a host read: the same mixture eagerly and inside CUDA graphs.

transformers brings two ways that read nothing on the host: a grouped matrix product, for which torch has a kernel in bfloat16
on Hopper and later, and batched products over the chosen experts' weights, copied for each pair of a token and an expert.

Shapes: T tokens, H hidden, E experts chosen for a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

EXPERTS = "specdec"  # its name
COPIED_BYTES = 256 << 20  # of experts' weights at a time


def experts_forward(experts: nn.Module, hidden_TH: Tensor, index_TE: Tensor, weights_TE: Tensor) -> Tensor:
    """[T, H]: the chosen experts' outputs, weighted and summed."""
    matrices = [weight for weight in experts.parameters() if weight.dim() == 3]
    if _has_grouped_kernel(matrices):
        return grouped_mm_experts_forward(experts, hidden_TH, index_TE, weights_TE)
    bytes_per_token = index_TE.shape[1] * sum(weight[0].numel() * weight.element_size() for weight in matrices)
    size = max(1, COPIED_BYTES // bytes_per_token)
    parts = zip(*(x.split(size) for x in (hidden_TH, index_TE, weights_TE)), strict=True)
    return torch.cat([batched_mm_experts_forward(experts, *part) for part in parts])


def _has_grouped_kernel(matrices: list[nn.Parameter]) -> bool:
    """On a GPU: one that takes the groups' sizes from the device.  A CPU's own memory may be read at any time."""
    if matrices[0].device.type != "cuda":
        return matrices[0].device.type == "cpu"
    aligned = all(size * weight.element_size() % 16 == 0 for weight in matrices for size in weight.shape[1:])
    return aligned and matrices[0].dtype == torch.bfloat16 and torch.cuda.get_device_capability(matrices[0].device)[0] >= 9


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
