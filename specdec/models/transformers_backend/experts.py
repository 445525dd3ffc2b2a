"""The experts function that this module registers with transformers, under the name "specdec".

The mixture must not read device memory on the host, or it could not run inside CUDA graphs.  transformers has two such
functions: a grouped matrix product, where torch has one (ops/products/grouped.py), and batched products over copies of
experts' weights, one copy for each pair of a token and an expert.  The registered function chooses between them.

Shapes: T tokens, H hidden size, K experts of a token (top_k).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward

from specdec.ops.products.grouped import has_grouped_product

EXPERTS = "specdec"  # the experts function's name in transformers' registry
COPIED_BYTES = 256 << 20  # bytes of experts' weights that one batched product may copy


def experts_forward(
    experts: nn.Module,
    hidden_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    grouped: bool = True,
    copied_bytes: int = COPIED_BYTES,
) -> Tensor:
    """[T, H]: the weighted sum of the outputs of each token's top-k experts.

    experts: the transformers module that holds the experts' weights. topk_ids_TK, topk_weights_TK: from the router.  grouped:
    whether a grouped product may be taken.  Without one the tokens are split so that a product copies at most `copied_bytes`;
    in a trace for any number of tokens they are not, because a graph has a fixed number of parts.
    """
    if (watch := experts.__dict__.get("watch")) is not None:  # somebody counts (mixtures/counter.py)
        watch(topk_ids_TK)
    matrices = [weight for weight in experts.parameters() if weight.dim() == 3]
    if grouped and has_grouped_product(matrices):
        return grouped_mm_experts_forward(experts, hidden_TH, topk_ids_TK, topk_weights_TK)
    if not isinstance(hidden_TH.shape[0], int):
        return batched_mm_experts_forward(experts, hidden_TH, topk_ids_TK, topk_weights_TK)
    bytes_per_token = topk_ids_TK.shape[1] * sum(weight[0].numel() * weight.element_size() for weight in matrices)
    size = max(1, copied_bytes // bytes_per_token)
    parts = zip(*(x.split(size) for x in (hidden_TH, topk_ids_TK, topk_weights_TK)), strict=True)
    return torch.cat([batched_mm_experts_forward(experts, *part) for part in parts])


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
