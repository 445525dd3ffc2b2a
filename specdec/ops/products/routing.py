"""Which experts a token takes, and with what weights: the rule as data, its definition, and the launch on a GPU.

`choose` is the definition, of logits.  On a GPU one kernel computes logits and choice (`routed`), where the policy has tiles
for it.  No shape in this file depends on the values of a tensor, so all of it can run inside CUDA graphs.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), G groups of experts, L logits of a token: E, and one
more where the shared experts are weighed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.own_pairs import Kept
from specdec.ops.products.partials import Partials
from specdec.ops.products.tiles.experts import ManyRouterTiles, RouterTiles

if TYPE_CHECKING:
    from specdec.ops.products.kernels.experts.choosing_triton import ChoiceRule

LEAST_ADDED = 1e-20  # to a sum of sigmoids
Scores = Literal["softmax", "sigmoid", "softmax of chosen"]
Routed = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class RouterRule:
    """How a router's logits become each token's experts and their weights.  `choose` computes it.

    top_k: how many experts a token has.
    scores: what the logits become first: a softmax over all experts, a sigmoid of each, or, as in gpt-oss, nothing: experts of
        the greatest logits are chosen, and the softmax over these is the weights.
    corrected: whether a learnt number for each expert is added to the scores for choosing, but not to the weights.
    biased: whether the logits have a bias.
    groups, top_groups: experts stand in `groups` equal groups, and the router chooses from the `top_groups` best groups only.
        Both are None where the router may choose any experts.  group_best: how many of a group's best experts rank it.
    normed: whether the weights are divided by their sum.  least_sum: what that sum is at least taken for.  added_sum: what is
        added to it, where it is not; see `added`.
    scaling: factor on the weights after that.
    """

    top_k: int
    scores: Scores
    corrected: bool = False
    biased: bool = False
    groups: int | None = None
    top_groups: int | None = None
    group_best: int = 1
    normed: bool = False
    least_sum: float = 0.0
    added_sum: float = 0.0
    scaling: float = 1.0

    @property
    def added(self) -> float:
        """To the sum: always something to one of sigmoids, each of which may be 0; the best of a softmax are above 1 / E."""
        return self.added_sum or (LEAST_ADDED if self.scores == "sigmoid" else 0.0)


class RouterWeights(NamedTuple):
    """weight_LH: of logits; its last row, if L is E + 1, yields what weighs the shared experts.

    bias_E, correction_E: float32, if the rule has them.
    """

    weight_LH: Tensor
    bias_E: Tensor | None
    correction_E: Tensor | None


class Unchosen(NamedTuple):
    """The logits of one token, as parts that nobody has added up yet, for kernels that choose for themselves.

    parts: as choosing_triton.py lays them out.  bias, correction, active: what the rule reads besides; what it lacks is another
    tensor.  rule: its constexprs.  out: memory for what is chosen, which the first kernel that chooses writes.
    """

    parts: Tensor
    bias: Tensor
    correction: Tensor
    active: Tensor
    rule: ChoiceRule
    out: Routed


def routed(
    x_TH: Tensor, router: RouterWeights, rule: RouterRule, experts: int, tiles: RouterTiles | ManyRouterTiles,
    kept: Kept | None = None,
) -> Routed:  # fmt: skip
    """(topk_weights [T, K] float32, topk_ids [T, K] int64, what weighs the shared experts [T, 1] float32 or None).

    kept: what `own_pairs` does afterwards; None: nothing.
    One launch.  Logits are summed in float32.  Ties go to the lower index.  Where logits are NaN, ids are still experts'.
    """
    if isinstance(tiles, ManyRouterTiles):
        from specdec.ops.products.kernels.experts.router_many_triton import launch_router_many

        return launch_router_many(x_TH, router, rule, experts, tiles, kept)
    from specdec.ops.products.kernels.experts.router_triton import launch_router, launch_router_one

    if len(x_TH) == 1 and may_wait(router, rule, experts):
        return launch_router_one(x_TH, router, rule, experts, kept, chooses=True).out
    return launch_router(x_TH, router, rule, experts, tiles, kept)


def unchosen(x_1H: Tensor, router: RouterWeights, rule: RouterRule, experts: int, kept: Kept | None = None) -> Unchosen:
    """`routed`'s first half, of a single token and a router that `may_wait`."""
    from specdec.ops.products.kernels.experts.router_triton import launch_router_one

    return launch_router_one(x_1H, router, rule, experts, kept, chooses=False)


def normed_routed(
    x_1H: Tensor, delta_1H: Tensor | Partials, norm_H: Tensor, eps: float, router: RouterWeights, rule: RouterRule,
    experts: int, kept: Kept | None = None, chooses: bool = True,
) -> tuple[Tensor, Tensor, Unchosen]:  # fmt: skip
    """(x + delta, its norm, `unchosen` of the norm), of a single token and a router that `may_wait`, in one launch.

    chooses: whether the result's `out` is what `routed` gives.
    """
    from specdec.ops.products.kernels.experts.norm_router_triton import launch_norm_router

    return launch_norm_router(x_1H, delta_1H, norm_H, eps, router, rule, experts, kept, chooses)


def may_wait(router: RouterWeights, rule: RouterRule, experts: int) -> bool:
    """Whether the kernels of experts can choose: where no groups are ranked, and no shared experts weighed."""
    return rule.groups in (None, rule.top_groups) and len(router.weight_LH) == experts


def router_tiles(
    x_TH: Tensor, router: RouterWeights, experts: int, numerics: Numerics
) -> RouterTiles | ManyRouterTiles | None:  # fmt: skip
    """Those of `routed`; None: torch computes logits, and `choose` their experts."""
    weight_LH = router.weight_LH
    if not use_kernels(x_TH) or x_TH.dim() != 2 or weight_LH.dtype == torch.float64 or not weight_LH.is_contiguous():
        return None
    return numerics.router_tiles(len(x_TH), experts, x_TH.dtype) if len(x_TH) and x_TH.stride(1) == 1 else None


def choose(
    logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None, in_order: bool = False
) -> tuple[Tensor, Tensor]:
    """The pair (topk_weights [T, K] in the logits' dtype, topk_ids [T, K] int64), the best expert first.

    correction_E: what is added for choosing, if the rule is corrected.  in_order: whether sums have one order, whatever T is.
    """
    assert rule.corrected == (correction_E is not None), rule
    if rule.scores == "softmax of chosen":
        best_TK, topk_ids_TK = logits_TE.topk(rule.top_k, dim=-1)
        return best_TK.softmax(-1), topk_ids_TK
    scores_TE = logits_TE.softmax(-1) if rule.scores == "softmax" else logits_TE.sigmoid()
    ranks_TE = scores_TE if correction_E is None else scores_TE + correction_E
    topk_weights_TK, topk_ids_TK = _of_best_groups(ranks_TE, rule, in_order).topk(rule.top_k, dim=-1)
    if correction_E is not None:
        topk_weights_TK = scores_TE.gather(1, topk_ids_TK)
    if rule.normed:
        sum_T1 = _added_up(topk_weights_TK, in_order)[:, None]
        if rule.least_sum:
            sum_T1 = sum_T1.clamp(min=rule.least_sum)
        elif rule.added:
            sum_T1 = sum_T1 + rule.added
        topk_weights_TK = topk_weights_TK / sum_T1
    return topk_weights_TK if rule.scaling == 1.0 else topk_weights_TK * rule.scaling, topk_ids_TK


def _of_best_groups(ranks_TE: Tensor, rule: RouterRule, in_order: bool) -> Tensor:
    """The ranks [T, E], with -inf in place of those of all but the token's best groups."""
    G, top = rule.groups, rule.top_groups
    if G is None or G == top:
        return ranks_TE
    assert top is not None
    ranks_TG = _added_up(ranks_TE.unflatten(1, (G, -1)).topk(rule.group_best, dim=-1).values, in_order)
    hidden_TG = torch.ones_like(ranks_TG, dtype=torch.bool).scatter_(1, ranks_TG.topk(top, dim=-1).indices, False)
    return ranks_TE.unflatten(1, (G, -1)).masked_fill(hidden_TG[..., None], -torch.inf).flatten(1)


def _added_up(x: Tensor, in_order: bool) -> Tensor:
    """The sums over the last dim, which has few numbers."""
    return sum(x.unbind(-1)[1:], start=x[..., 0]) if in_order else x.sum(-1)
