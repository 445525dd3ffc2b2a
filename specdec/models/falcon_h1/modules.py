"""Layers of Falcon-H1: attention and Mamba-2 read the same norm, and both are added to the residual stream; then an MLP.

Multipliers are applied where transformers applies them, since they are no powers of two: a weight of 16 bits could not hold its
product with one.

Shapes: T tokens, R rows asked for, H hidden size, Q query heads, K key/value heads, X = Q + 2K, D head dimension; of Mamba-2 C
channels, Y outputs, V heads.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specdec.attention.inputs import AttentionFn
from specdec.models.causal_lm import TargetLayer
from specdec.models.falcon_h1.config import FalconConfig
from specdec.models.layers import MLP, RMSNorm, SelfAttention
from specdec.models.mamba.mixer import Mamba2
from specdec.ops.products.partials import Partials, added_up
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows


class FalconAttention(SelfAttention):
    """SelfAttention whose keys are multiplied before positions turn them."""

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.key_multiplier = config.multipliers.key

    def project(self, x_TH: Tensor) -> Tensor:
        qkv_TXD = super().project(x_TH)
        if self.key_multiplier != 1:
            qkv_TXD[:, self.num_heads : self.num_heads + self.num_kv_heads].mul_(self.key_multiplier)
        return qkv_TXD


class FalconMamba(Mamba2):
    """Mamba2 whose projections are multiplied, each kind by its own number."""

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        z, x, B, C, dt = config.multipliers.projected
        self.times = tuple(zip((*self.sizes.kinds, self.sizes.outputs, self.sizes.value_heads), (C, B, x, z, dt), strict=True))

    def project(self, x_TH: Tensor) -> Tensor:
        projected = super().project(x_TH)
        for part, (_, times) in zip(projected.split([rows for rows, _ in self.times], dim=1), self.times, strict=True):
            if times != 1:
                part.mul_(times)
        return projected


class FalconMLP(MLP):
    """An MLP whose gates are multiplied before SiLU, and whose outputs are multiplied."""

    def __init__(self, config: FalconConfig) -> None:
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.multipliers.gate, config.multipliers.down

    def forward(self, x: Tensor, partials: bool = False) -> Tensor | Partials:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        gated = F.silu(_scaled(gate, self.gate_multiplier)) * up
        return _times(self.down_proj(gated, partials=partials and self.down_multiplier == 1), self.down_multiplier)


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
        states = self.mamba(_scaled(normed_TH, times.ssm_in), rotation, attn, layer, rows_R)
        attended = self.self_attn(_scaled(normed_TH, times.attention_in), rotation, attn, layer, rows_R)
        both = added_up(_times(states, times.ssm_out)) + added_up(_times(attended, times.attention_out))
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        x, normed = self.pre_ff_layernorm.add(x, both)
        return x, self.feed_forward(normed, partials=True)


def _scaled(x: Tensor, times: float) -> Tensor:
    return x if times == 1 else x * times


def _times(output: Tensor | Partials, times: float) -> Tensor | Partials:
    return output if times == 1 else added_up(output) * times
