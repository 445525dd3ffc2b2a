"""The layers that targets and draft heads share.  Attention itself comes in as a callable; nothing here knows of caches.

Shapes: T tokens, H hidden, Q query heads, K kv heads, D head dim, I intermediate.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.config import ModelConfig, RopeConfig


class AttentionFn(Protocol):
    """Attention of one forward pass: paged when serving, dense when training."""

    def __call__(self, layer: int, q_TQD: Tensor, kv_T2KD: Tensor) -> Tensor: ...


class Linear(nn.Linear):
    """nn.Linear born empty: its weights come from a checkpoint, and initialising them would be the slowest part of a start."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """nn.Embedding born empty."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HeadsRMSNorm(nn.Module):
    """Qwen3's q/k norm over head_dim: one weight for all query heads, one for all key heads, applied to both at once."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_heads + config.num_kv_heads, config.head_dim))
        self.eps = config.rms_norm_eps

    def forward(self, qk: Tensor) -> Tensor:
        return F.rms_norm(qk, qk.shape[-1:], None, self.eps) * self.weight


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[D/2] float32 angles per position.  llama3: Meta's piecewise scaling by wavelength, as in transformers."""
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
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(rope, head_dim))
        sign = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
        both = torch.cat((angles, angles), dim=-1)
        # The sine carries the sign of rotate_half, so that rotating is a roll.
        self.register_buffer("table", torch.stack((both.cos(), both.sin() * sign), dim=1), persistent=False)
        self.table: Tensor

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [T, 1, D] each, shared by all layers of a pass."""
        rows = self.table.index_select(0, positions_T)
        return rows[:, :1], rows[:, 1:]

    @staticmethod
    def rotate_(x_THD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> None:
        """Rotates in place: x cos + rotate_half(x) sin."""
        rolled = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
        x_THD.mul_(cos_sin[0]).addcmul_(rolled, cos_sin[1])


class SelfAttention(nn.Module):
    """Fused q, k, v projection, optional q/k norm, rotary, attention, output projection."""

    def __init__(self, config: ModelConfig, in_features: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = self.num_heads + 2 * self.num_kv_heads
        self.qkv_proj = Linear(in_features, heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.o_bias)
        self.qk_norm = HeadsRMSNorm(config) if config.qk_norm else None

    def forward(self, x_TH: Tensor, cos_sin: tuple[Tensor, Tensor], attn: AttentionFn, layer: int) -> Tensor:
        T, Q, K = x_TH.shape[0], self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x_TH).view(T, Q + 2 * K, self.head_dim)
        if self.qk_norm is not None:
            qkv[:, : Q + K] = self.qk_norm(qkv[:, : Q + K])
        Rotary.rotate_(qkv[:, : Q + K], cos_sin)
        out = attn(layer, qkv[:, :Q], qkv[:, Q:].view(T, 2, K, self.head_dim))
        return self.o_proj(out.reshape(T, Q * self.head_dim))


class MLP(nn.Module):
    """SwiGLU with gate and up fused into one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)
