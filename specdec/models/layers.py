"""The layers that targets and draft heads share.  Attention itself comes in as a callable; nothing here knows of caches.

Shapes: T tokens, H hidden, Q query heads, K kv heads, X = Q + 2K, D head dim, I intermediate.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.yarn import YarnRope, yarn_frequencies
from specdec.ops.norm import add_rms_norm, rms_norm
from specdec.ops.products.linear import gated_linear, linear
from specdec.ops.rope import HeadPrep, Rotation, rotary_table


class AttentionFn(Protocol):
    """Attention of one forward pass: paged when serving, dense when training.  It owns the rest of a head's way in: `prep`
    says how queries and keys are normed and rotated (X = Q + 2K rows of heads: queries, keys, values).  With rows_R only
    those tokens' queries are answered, [R, Q, D]; the others' keys and values are kept all the same.  scoring: how the
    layer's products become weights.  Layers of latent attention ask for more: HasLatent in attention/latent/latent.py.
    """

    def __call__(
        self, layer: int, qkv_TXD: Tensor, prep: HeadPrep, rows_R: Tensor | None = None, scoring: Scoring = PLAIN
    ) -> Tensor: ...


class Linear(nn.Linear):
    """nn.Linear born empty: its weights come from a checkpoint, and initialising them would be the slowest part of a start."""

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding born empty."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x_TH: Tensor, delta_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(x + delta, its norm)."""
        return add_rms_norm(x_TH, delta_TH, self.weight, self.eps)


class HeadsRMSNorm(nn.Module):
    """Qwen3's q/k norm over head_dim: one weight for all query heads and one for all key heads, spread over the heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_heads + config.num_kv_heads, config.head_dim))
        self.eps = config.rms_norm_eps


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] float32 angles per position.  llama3: Meta's piecewise scaling by wavelength, as in transformers."""
    if isinstance(rope, YarnRope):
        return yarn_frequencies(rope, head_dim)
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        return inv_freq / rope.factor
    if rope.kind == "default":
        return inv_freq
    wavelength = 2 * math.pi / inv_freq
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    slow = torch.where(wavelength > low, inv_freq / rope.factor, inv_freq)
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * slow / rope.factor + smooth * slow
    return torch.where((wavelength >= high) & (wavelength <= low), between, slow)


class Rotary(nn.Module):
    """Rotary position embedding from a table that covers every position of the run."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        table = rotary_table(inverse_frequencies(rope, head_dim), max_positions)
        if isinstance(rope, YarnRope):
            table *= rope.amplitude
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def at(self, positions_T: Tensor) -> Rotation:
        """Of one pass's tokens."""
        return Rotation(self.table, positions_T)


class SelfAttention(nn.Module):
    """Fused q, k, v projection, attention (with optional q/k norm, and rotary positions), output projection."""

    def __init__(self, config: ModelConfig, in_features: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = Linear(in_features, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.o_bias)
        self.qk_norm = HeadsRMSNorm(config) if config.qk_norm else None
        self.kv_scale_2K: Tensor | None = None  # of fp8 keys and values, where the checkpoint brings it; the cache's business

    def forward(self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None) -> Tensor:
        norm = self.qk_norm
        prep = HeadPrep(rotation, self.num_kv_heads, norm.weight if norm else None, norm.eps if norm else 0.0)
        qkv_TXD = self.qkv_proj(x_TH).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(attn(layer, qkv_TXD, prep, rows_R).flatten(1))


class MLP(nn.Module):
    """SwiGLU with gate and up fused into one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated_linear(x, self.gate_up_proj.weight, self.gate_up_proj.bias))
