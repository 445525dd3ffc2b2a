"""What a model's mixtures of experts are, as data: the router's rule, the experts' form, shared experts, layers without any.

Every family's mixture is a value of `ExpertsConfig`.  This file knows no tensor, no key of a config.json and no family.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.ops.products.experts import Activation, SwiGLU
from specdec.ops.products.routing import RouterRule


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of a model's layers.

    count: experts that the router chooses from.  intermediate_size: of one expert's MLP.
    activation: what stands between an expert's two products.  Relu2: neither it nor shared experts have a gate.
    biased: whether the experts' projections have biases.
    kept_float32: whether the router's weights are float32 in a model of any dtype.  It computes in float32 all the same.
    shared_size: width of the MLP that every token passes besides its top-k experts, of all shared experts together; 0: none.
    shared_gated: whether each token weighs that MLP's output by the sigmoid of one more logit.
    latent_size: width of what experts read and yield, where two projections stand around them; 0: the model's own.
    dense_layers: numbers of the layers whose MLP is no mixture.
    divided: whether ranks that share the model hold whole experts, some each; otherwise each holds a part of every expert.
    own: numbers of the experts that this rank holds, where they are divided; None: all.
    """

    count: int
    intermediate_size: int
    router: RouterRule
    activation: Activation = SwiGLU()
    biased: bool = False
    kept_float32: bool = False
    shared_size: int = 0
    shared_gated: bool = False
    latent_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    divided: bool = False
    own: range | None = None

    @property
    def held(self) -> range:
        """Numbers of the experts whose matrices this rank has, or of which it has a part."""
        return range(self.count) if self.own is None else self.own
