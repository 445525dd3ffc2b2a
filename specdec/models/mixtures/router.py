"""The router of a mixture: logits of each token's experts, and the rule by which they choose and weigh.

No shape in this file depends on the values of a tensor, so all of it can run inside CUDA graphs.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), G groups of experts, L logits of a token: E, and one
more where the shared experts are weighed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.linear import Multiplying
from specdec.models.making import made_now, new_weight
from specdec.models.mixtures.rules import ExpertsConfig, RouterRule
from specdec.ops.products.stacked import each_linear


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
        elif rule.scores == "sigmoid":  # each of which may be 0; the best of a softmax are no less than 1 / E
            sum_T1 = sum_T1 + 1e-20
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


class Router(Multiplying):
    """Chooses each token's experts and their weights, in float32 or float64.  In transformers no family's router is finer.

    weight: [L, H]; where shared experts are weighed, its last row yields their logit.
    bias_E, correction_E: float32 in any dtype, if the rule has them.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.rule, self.count = config.router, config.count
        rows = config.count + config.shared_gated
        self.weight = _float32(rows, hidden_size) if config.kept_float32 else new_weight(rows, hidden_size)
        self.bias_E = _float32(config.count) if config.router.biased else None
        self.correction_E = _float32(config.count) if config.router.corrected else None

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The triple (topk_weights [T, K] in float32 or a wider type, topk_ids [T, K] int64, [T, 1]: what weighs the shared
        experts; None: nothing does).
        """
        in_order = self.numerics.is_invariant
        logits_TL = self._logits(x_TH, in_order)
        shared_T1 = logits_TL[:, self.count :].sigmoid() if logits_TL.shape[1] > self.count else None
        return *choose(logits_TL[:, : self.count], self.rule, self.correction_E, in_order), shared_T1

    def _logits(self, x_TH: Tensor, in_order: bool) -> Tensor:
        if in_order:
            logits_TL = each_linear(x_TH.to(self.weight.dtype)[:, None], self.weight[None], torch.float32)[:, 0]
            return logits_TL if self.bias_E is None else logits_TL + self.bias_E
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        return F.linear(x_TH.to(wide), self.weight.to(wide), None if self.bias_E is None else self.bias_E.to(wide))


def _float32(*size: int) -> nn.Buffer:
    return nn.Buffer(torch.empty(size, dtype=torch.float32, device=made_now().device))
