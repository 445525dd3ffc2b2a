"""A layer's mixture of experts as a module: the router, the stacks of the experts' matrices, the shared experts.

The module knows no attention and no checkpoint (fill.py fills it).

Shapes: T tokens, H hidden size, E experts that a rank holds, F intermediate size of an expert, G = 2F.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, ReluMLP, RMSNorm
from specdec.models.linear import Linear, LinearStack
from specdec.models.making import new_weight
from specdec.models.mixtures.live import live_now
from specdec.models.mixtures.products import SharedMLP, chooses, mixture
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.launch import use_kernels
from specdec.ops.operator import is_traced
from specdec.ops.products.experts import Form, inputs_of
from specdec.ops.products.own_pairs import Kept
from specdec.ops.products.partials import Delta, Partials, TwoProducts, added_up
from specdec.ops.products.routing import Routed, Unchosen
from specdec.parallel.shard import WHOLE


class MixtureOfExperts(nn.Module):
    """A layer's mixture: the weighted sum of the outputs of each token's top-k experts, plus the output of the shared experts.

    Ranks that share the layer hold a part of each expert, or whole experts, some each, and their outputs are summed.  Of parts,
    the first rank alone has down_bias_EH.  within: a rank's share of each expert that it holds.
    to_latents, from_latents: what stands around the experts if they read latents; whole on every rank.
    The router, which all ranks have, brings the policy that chooses the experts' products too.
    watch: is told whom each token chose [T, K], of the experts that are here, where somebody counts it (counter.py).
    """

    watch: Callable[[Tensor], object] | None = None

    def __init__(self, config: ModelConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        held, F = experts.held, experts.intermediate_size
        wide, H = config.hidden_size, experts.latent_size or config.hidden_size
        gated = inputs_of(experts.activation) == 2
        self.experts, self.within = experts, WHOLE if experts.divided else config.shard
        self.is_alone = config.shard.size == 1
        self.router = Router(wide, experts)
        parts = {"gate_proj": F, "up_proj": F} if gated else {"up_proj": F}
        self.gate_up_proj = LinearStack(held, H, parts, self.within, "column")
        self.down_proj = LinearStack(held, F, {"down_proj": H}, self.within, "row")
        self.gate_up_bias_EG = new_weight(len(held), 2 * F) if experts.biased else None
        self.down_bias_EH = new_weight(len(held), H) if experts.biased and self.within.rank == 0 else None
        self.to_latents = Linear(wide, H) if experts.latent_size else None
        self.from_latents = Linear(H, wide) if experts.latent_size else None
        self.shared: MLP | ReluMLP | None = None
        if experts.shared_size:
            own = replace(config, intermediate_size=experts.shared_size)
            self.shared = MLP(own) if gated else ReluMLP(own, experts.shared_size)

    def forward(self, x_TH: Tensor, partials: bool = False, routed_TH: Tensor | None = None) -> Delta:
        """partials: as of MLP; experts that read latents then leave the shared experts' output to the norm, too.
        routed_TH: what the router reads; None: x.

        Ranks that share the layer get sums.
        """
        read_TH, kept, choice = x_TH if routed_TH is None else routed_TH, self._kept(x_TH), None
        if self._chooses(x_TH):
            choice = self.router.unchosen(read_TH, kept)
        return self._of_chosen(x_TH, self.router(read_TH, kept) if choice is None else choice.out, choice, partials)

    def after_norm(self, x_TH: Tensor, delta_TH: Delta, norm: RMSNorm, partials: bool = False) -> tuple[Tensor, Delta]:
        """The pair (x + delta, this mixture of the norm of that).  A single token's norm and router are one launch on a GPU."""
        adds = isinstance(delta_TH, Tensor) or (isinstance(delta_TH, Partials) and delta_TH.times == 1)
        if adds and norm.group.size == 1 and self.to_latents is None and use_kernels(x_TH):
            assert isinstance(delta_TH, Tensor | Partials)
            chooses = self._chooses(x_TH)
            found = self.router.after_norm(x_TH, delta_TH, norm.weight, norm.eps, self._kept(x_TH), not chooses)
            if found is not None:
                x_TH, normed_TH, choice = found
                return x_TH, self._of_chosen(normed_TH, choice.out, choice if chooses else None, partials)
        x_TH, normed_TH = norm.add(x_TH, delta_TH)
        return x_TH, self(normed_TH, partials)

    def _kept(self, x_TH: Tensor) -> Kept | None:
        """Which pairs of a token and an expert are computed; None: all."""
        live = None if is_traced(x_TH) else live_now()
        return Kept(self.experts.held, live) if self.experts.own is not None or live is not None else None

    def _form(self, skips: bool) -> Form:
        return Form(self.experts.activation, self.gate_up_bias_EG, self.down_bias_EH, skips)

    def _chooses(self, x_TH: Tensor) -> bool:
        """Whether the experts' kernels choose a token's experts themselves."""
        if self.watch is not None or self.to_latents is not None:
            return False
        stacks, top_k = (self.gate_up_proj, self.down_proj), self.experts.router.top_k
        return chooses(x_TH, top_k, *stacks, self._form(self._kept(x_TH) is not None), self.router.numerics)

    def _of_chosen(self, x_TH: Tensor, found: Routed, choice: Unchosen | None, partials: bool) -> Delta:
        """The sum over experts.

        found: what the router gives.  choice: what experts' kernels choose from, which then fill `found`.
        """
        topk_weights_TK, topk_ids_TK, shared_T1 = found
        if self.watch is not None:
            self.watch(topk_ids_TK)
        stacks, numerics = (self.gate_up_proj, self.down_proj), self.router.numerics
        form = self._form(self._kept(x_TH) is not None)
        shared = None if self.shared is None else SharedMLP(self.shared, shared_T1)
        partials = partials and self.is_alone
        if self.to_latents is None or self.from_latents is None:
            return mixture(x_TH, topk_weights_TK, topk_ids_TK, *stacks, form, numerics, shared, partials, choice)
        latents_TH = mixture(self.to_latents(x_TH), topk_weights_TK, topk_ids_TK, *stacks, form, numerics)
        out_TH = self.from_latents(latents_TH, partials=partials)
        if shared is not None and partials and shared_T1 is None:
            return TwoProducts(out_TH, shared.mlp(x_TH, partials=True))
        return out_TH if shared is None else shared.output(x_TH).added_to(added_up(out_TH))


def mlp_of(config: ModelConfig, index: int) -> nn.Module:
    """The MLP or the mixture of the layer of that number."""
    experts = config.experts
    return MLP(config) if experts is None or index in experts.dense_layers else MixtureOfExperts(config, experts)
