"""Routers of a single token with random weights, by every rule that ranks no groups."""

from __future__ import annotations

import torch

from specdec.ops.products.own_pairs import Kept, LiveRows
from specdec.ops.products.routing import RouterRule, RouterWeights
from toolkit.kernels import DEVICE
from toolkit.quantised_weights import rand

RULES = {
    "softmax": RouterRule(3, "softmax"),
    "softmax, normed": RouterRule(3, "softmax", normed=True, scaling=1.7),
    "sigmoid, corrected": RouterRule(3, "sigmoid", True, groups=1, top_groups=1, normed=True, scaling=1.8),
    "least sum": RouterRule(3, "softmax", True, normed=True, least_sum=0.9),
    "chosen": RouterRule(3, "softmax of chosen", biased=True),
}


def router_of(rule: RouterRule, E: int, H: int, seed: int = 1) -> RouterWeights:
    generator = torch.Generator().manual_seed(seed)
    weight, number = rand(E, H, seed=seed) / H**0.5, torch.randn(E, generator=generator).to(DEVICE)
    return RouterWeights(
        weight.float() if rule.biased else weight, number if rule.biased else None, number if rule.corrected else None
    )  # fmt: skip


def of_one(live: int) -> Kept:
    """Experts 3 to 8 are here; live: whether the token is needed."""
    active, last = torch.tensor([live], dtype=torch.int32, device=DEVICE), torch.tensor([0], device=DEVICE)
    return Kept(range(3, 9), LiveRows(active, last))
