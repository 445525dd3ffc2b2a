"""The router of a mixture as a module: its weights, and who computes its logits.  ops/products/routing.py has the rule.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), L logits of a token: E, and one more where the shared
experts are weighed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.linear import Multiplying
from specdec.models.making import made_now, new_weight
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.own_pairs import Kept, own_pairs
from specdec.ops.products.partials import Partials
from specdec.ops.products.routing import (
    RouterWeights,
    Unchosen,
    choose,
    may_wait,
    normed_routed,
    routed,
    router_tiles,
    unchosen,
)
from specdec.ops.products.stacked import each_linear
from specdec.ops.products.tiles.experts import RouterTiles


class Router(Multiplying):
    """Chooses each token's experts and their weights, in float32 or float64.  In transformers no family's router is finer.

    weight: [L, H]; where shared experts are weighed, its last row yields their logit.
    bias_E, correction_E: float32 in any dtype, if the rule has them.
    kept_float32: whether the weight is, too.  Whoever fills it says so anew: a model's modules are made, and then cast.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.rule, self.count, self.kept_float32 = config.router, config.count, config.kept_float32
        rows = config.count + config.shared_gated
        self.weight = _float32(rows, hidden_size) if config.kept_float32 else new_weight(rows, hidden_size)
        self.bias_E = _float32(config.count) if config.router.biased else None
        self.correction_E = _float32(config.count) if config.router.corrected else None

    def forward(self, x_TH: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The triple (topk_weights [T, K] in float32 or a wider type, topk_ids [T, K] int64, [T, 1]: what weighs the shared
        experts; None: nothing does).

        kept: which pairs are not skipped, as `own_pairs` skips them; None: none is.
        """
        weights, in_order = RouterWeights(self.weight, self.bias_E, self.correction_E), self.numerics.is_invariant
        if (tiles := router_tiles(x_TH, weights, self.count, self.numerics)) is not None:
            return routed(x_TH, weights, self.rule, self.count, tiles, kept)
        logits_TL = self._logits(x_TH, in_order)
        shared_T1 = logits_TL[:, self.count :].sigmoid() if logits_TL.shape[1] > self.count else None
        chosen = choose(logits_TL[:, : self.count], self.rule, self.correction_E, in_order)
        return *(chosen if kept is None else own_pairs(*chosen, *kept)), shared_T1

    def unchosen(self, x_1H: Tensor, kept: Kept | None = None) -> Unchosen | None:
        """What kernels of experts choose a single token's from; None: `forward` must."""
        weights = RouterWeights(self.weight, self.bias_E, self.correction_E)
        tiles = router_tiles(x_1H, weights, self.count, self.numerics)
        if not isinstance(tiles, RouterTiles) or not may_wait(weights, self.rule, self.count):
            return None
        return unchosen(x_1H, weights, self.rule, self.count, kept)

    def after_norm(
        self, x_1H: Tensor, delta_1H: Tensor | Partials, norm_H: Tensor, eps: float, kept: Kept | None, chooses: bool
    ) -> tuple[Tensor, Tensor, Unchosen] | None:
        """(x + delta, its norm, what is chosen of it or to be chosen), in one launch; None: it takes two."""
        weights = RouterWeights(self.weight, self.bias_E, self.correction_E)
        tiles = router_tiles(x_1H, weights, self.count, self.numerics)
        is_one = len(x_1H) == 1 and isinstance(tiles, RouterTiles) and may_wait(weights, self.rule, self.count)
        if not is_one or self.weight.itemsize > 2:  # of float32 each program has a row, and nothing is gained
            return None
        return normed_routed(x_1H, delta_1H, norm_H, eps, weights, self.rule, self.count, kept, chooses)

    def _logits(self, x_TH: Tensor, in_order: bool) -> Tensor:
        if in_order:
            logits_TL = each_linear(x_TH.to(self.weight.dtype)[:, None], self.weight[None], torch.float32)[:, 0]
            return logits_TL if self.bias_E is None else logits_TL + self.bias_E
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        return F.linear(x_TH.to(wide), self.weight.to(wide), None if self.bias_E is None else self.bias_E.to(wide))


def _float32(*size: int) -> nn.Buffer:
    return nn.Buffer(torch.empty(size, dtype=torch.float32, device=made_now().device))
