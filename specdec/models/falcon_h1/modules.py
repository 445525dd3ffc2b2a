"""Layers of Falcon-H1: attention and Mamba-2 read the same norm, and both are added to the residual stream; then an MLP.

Multipliers are no powers of two: a weight of 16 bits could not hold its product with one.  So they wait for the next launch
that reads what they multiply: the norm that adds a block's outputs, attention's scale for keys, SiLU for gates.  All of a
row of Mamba-2's projection are applied in one launch, and what its input is multiplied with is among them.

Shapes: T tokens, R rows asked for, H hidden size, Q query heads, K key/value heads, X = Q + 2K, D head dimension; of Mamba-2 C
channels, Y outputs, V heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.inputs import AttentionFn
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.causal_lm import TargetLayer
from specdec.models.falcon_h1.config import FalconConfig
from specdec.models.layers import MLP, RMSNorm, SelfAttention
from specdec.models.mamba.mixer import Mamba2
from specdec.ops.index import kept
from specdec.ops.products.dense import silu_mul
from specdec.ops.products.partials import Partials, TwoProducts, added_up, multiplied
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows


class FalconAttention(SelfAttention):
    """SelfAttention whose keys are multiplied: the products with queries are, all by one number, and no cache holds it."""

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.key_multiplier = config.multipliers.key

    @property
    def scoring(self) -> Scoring:
        return PLAIN if self.key_multiplier == 1 else Scoring(scale=self.key_multiplier * self.head_dim**-0.5)


class FalconMamba(Mamba2):
    """Mamba2 whose inputs are multiplied, and whose projections are, each kind by its own number."""

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        z, x, B, C, dt = config.multipliers.projected
        self.before = config.multipliers.ssm_in if config.in_bias else 1.0  # the bias is not multiplied with this one
        after, sizes = config.multipliers.ssm_in / self.before, (*self.sizes.kinds, self.sizes.outputs, self.sizes.value_heads)
        self.times = tuple((size, after * each) for size, each in zip(sizes, (C, B, x, z, dt), strict=True))

    def project(self, x_TH: Tensor) -> Tensor:
        projected = super().project(_scaled(x_TH, self.before))
        if all(times == 1 for _, times in self.times):
            return projected
        return projected.mul_(_row_of(self.times, torch.promote_types(projected.dtype, torch.float32), projected.device))


class FalconMLP(MLP):
    """An MLP whose gates are multiplied before SiLU, and whose outputs are multiplied."""

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.multipliers.gate, config.multipliers.down

    def forward(self, x: Tensor, partials: bool = False) -> Tensor | Partials:
        if self.gate_multiplier == 1:
            gated = self.gate_up_proj.gated(x)
        else:
            gated = silu_mul(added_up(self.gate_up_proj(x)), self.gate_multiplier)
        out = self.down_proj(gated, partials=partials)
        return multiplied(out, self.down_multiplier) if partials else _scaled(added_up(out), self.down_multiplier)


class FalconLayer(TargetLayer):
    """The modules have a checkpoint's names."""

    def __init__(self, config: FalconConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn, self.mamba = FalconAttention(config), FalconMamba(config)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward, self.multipliers = FalconMLP(config), config.multipliers

    def forward(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rotation: Rotation,
        attn: AttentionFn,
        layer: int,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | Partials]:
        """The pass is called twice, with the same number: it tells attention and states apart by their inputs."""
        times = self.multipliers
        states = self.mamba(normed_TH, rotation, attn, layer, rows_R)
        attended = self.self_attn(_scaled(normed_TH, times.attention_in), rotation, attn, layer, rows_R)
        both = TwoProducts(multiplied(states, times.ssm_out), multiplied(attended, times.attention_out))
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        x, normed = self.pre_ff_layernorm.add(x, both)
        return x, self.feed_forward(normed, partials=True)


def _scaled(x: Tensor, times: float) -> Tensor:
    return x if times == 1 else x * times


@kept
def _row_of(times: tuple[tuple[int, float], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A multiplier for each column, given (columns, their multiplier), one kind after the other."""
    return torch.cat([torch.full((size,), each, dtype=dtype, device=device) for size, each in times])
