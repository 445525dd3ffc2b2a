"""The layers that targets and draft heads share.

Each forward pass hands its attention in as a callable, so no layer knows how keys and values are cached.

Shapes: T tokens, R rows asked for, H hidden size, Q query heads, K key/value heads, X = Q + 2K, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn, HeadInputs, QueryInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.config import NO_ROPE, PROPORTIONAL, ModelConfig, RopeConfig
from specdec.models.linear import Linear
from specdec.models.making import made_now, new_weight
from specdec.models.yarn import YarnRope, yarn_frequencies
from specdec.ops.norm import add_normed, add_rms_norm, embed_rms_norm, rms_norm
from specdec.ops.products.dense import relu2
from specdec.ops.products.partials import Delta, NormedProduct, Partials, added_up
from specdec.ops.rope import PLAIN_VALUES, HeadPrep, Rotation, rotary_table
from specdec.parallel.group import ALONE, Group


class Embedding(nn.Embedding):
    """nn.Embedding whose table stays uninitialised until a loader fills it from a checkpoint."""

    def __init__(self, rows: int, width: int) -> None:
        now = made_now()
        super().__init__(rows, width, device=now.device, dtype=now.dtype)

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    zero_centred: whether a checkpoint holds w of a norm by 1 + w.  The weight is then 1 + w in float32 in a model of 16 bits,
        which holds it exactly, and what is normed is rounded once, after the product with it, as in transformers.  Whoever
        fills it says so anew: a model's modules are made, and then cast.
    group: the ranks that hold the layer before the norm together.
    """

    def __init__(self, size: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.zero_centred = zero_centred
        self.weight = norm_weight(zero_centred, size)
        self.eps = eps
        self.group: Group = ALONE

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(
        self,
        x_TH: Tensor,
        delta_TH: Delta | NormedProduct | None,
        out_TH: Tensor | None = None,
        below_CH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The pair (x + delta, the norm of x + delta), each [T, H], from one kernel launch.

        delta: this rank's partial sum of what the layer before computed, which may have to be normed before it is added
            (`before_adding`); None: that is in x already, on all ranks.
        out_TH: memory for the sum.  below_CH: rows that follow the normed ones, so that the second result is [T + C, H].
        """
        if delta_TH is None:
            assert below_CH is None
            return x_TH if out_TH is None else out_TH.copy_(x_TH), self(x_TH)
        if isinstance(delta_TH, NormedProduct):
            if self.group.size > 1 and not delta_TH.is_whole:
                delta_TH = delta_TH._replace(product=self.group.all_reduce(added_up(delta_TH.product)))
            return add_rms_norm(x_TH, delta_TH, self.weight, self.eps, out_TH, below_CH)
        if self.group.size > 1:  # ranks exchange products
            delta_TH = added_up(delta_TH)
        if not isinstance(delta_TH, Tensor):
            return add_rms_norm(x_TH, delta_TH, self.weight, self.eps, out_TH, below_CH)
        return self.group.all_reduce_add_rms_norm(x_TH, delta_TH, self.weight, self.eps, out_TH, below_CH)

    def add_normed(self, x_TH: Tensor, delta_TH: Delta, *, is_whole: bool = False) -> Tensor:
        """x + the norm of the sum of all ranks' deltas: [T, H], from one kernel launch.

        is_whole: whether delta is that sum already.
        """
        if self.group.size > 1 and not is_whole:
            delta_TH = self.group.all_reduce(added_up(delta_TH))
        return add_normed(x_TH, delta_TH, self.weight, self.eps)

    def before_adding(self, output: Delta, scale_1: Tensor | None = None, *, is_whole: bool = False) -> NormedProduct:
        """A block's output under this norm, for the next norm to add in its own launch.  The others: as of NormedProduct."""
        return NormedProduct(output, self.weight, self.eps, scale_1, is_whole)

    def embed(self, ids_T: Tensor, table_VH: Tensor, below_CH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The pair (embeddings of the ids (int64), their norm), each [T, H].  below_CH: as of `add`."""
        return embed_rms_norm(ids_T, table_VH, self.weight, self.eps, below_CH)


class NoNorm(nn.Module):
    """Stands where RMSNorm does before a layer that reads the residual stream as it is: adds up, and norms nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Group = ALONE

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(
        self, x_TH: Tensor, delta_TH: Delta | None, out_TH: Tensor | None = None, below_CH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As of RMSNorm; both are the sum."""
        assert below_CH is None
        total_TH = x_TH
        if delta_TH is not None and self.group.size > 1:
            total_TH = self.group.all_reduce_add(x_TH, added_up(delta_TH))
        elif delta_TH is not None:
            total_TH = add_normed(x_TH, delta_TH, None)
        return total_TH if out_TH is None else out_TH.copy_(total_TH), total_TH

    def embed(self, ids_T: Tensor, table_VH: Tensor, below_CH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As of RMSNorm; both are the embeddings."""
        assert below_CH is None
        x_TH = F.embedding(ids_T, table_VH)
        return x_TH, x_TH


def norm_weight(zero_centred: bool, *size: int) -> Tensor:
    """The weight of such a norm, for a loader to fill."""
    if not zero_centred:
        return new_weight(*size)
    now = made_now()
    return nn.Buffer(torch.empty(size, dtype=torch.promote_types(now.dtype, torch.float32), device=now.device))


class HeadsRMSNorm(nn.Module):
    """Weights of Qwen3's query and key norm, an RMS norm over the D values of each head.

    A checkpoint brings one weight vector for all query heads and one for all key heads.  Here each head has a row of its own,
    [Q + K, D], because one kernel norms all heads.  The norm itself runs inside of attention.
    num_heads: Q + K.
    """

    def __init__(self, config: ModelConfig, num_heads: int) -> None:
        super().__init__()
        self.zero_centred = config.zero_centred_norms
        self.weight = norm_weight(self.zero_centred, num_heads, config.head_dim)
        self.eps = config.rms_norm_eps


def projection(config: ModelConfig, in_features: int, num_kv_heads: int, query_rows: int = 1) -> Linear:
    """The fused projection to queries, keys and values.  num_kv_heads: 0 for a layer that projects queries only.

    query_rows: rows of q_proj for each value of a query.
    """
    sizes = config.heads
    rows = {"q_proj": query_rows * sizes.num_heads * sizes.head_dim, "k_proj": num_kv_heads * sizes.head_dim}
    rows["v_proj"] = 0 if sizes.values_are_keys else num_kv_heads * sizes.value_dim
    parts = {name: count for name, count in rows.items() if count}
    copies = {"k_proj": config.kv_copies, "v_proj": config.kv_copies}
    return Linear.column(in_features, parts, config.shard, config.qkv_bias, copies)


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """Rotary angles per position in radians, [head_dim / 2] float32 (RoPE, arXiv 2104.09864).

    The kind "llama3" is Meta's piecewise scaling by wavelength, computed as in transformers: angles with short wavelengths
    stay, angles with long wavelengths are divided by the factor, and the angles between are blended.
    """
    if rope.kind == NO_ROPE:
        return torch.zeros(head_dim // 2, dtype=torch.float32, device=device)
    if rope.rotated:
        turned = inverse_frequencies(replace(rope, rotated=0), rope.rotated, device)
        return torch.cat((turned, turned.new_zeros(head_dim // 2 - len(turned))))  # in the order of `by_halves`
    if isinstance(rope, YarnRope):
        return yarn_frequencies(rope, head_dim, device)
    inv_freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim)
    if rope.kind == PROPORTIONAL:
        pairs = int(rope.share * head_dim // 2)
        return torch.cat((inv_freq[:pairs] / rope.factor, inv_freq.new_zeros(head_dim // 2 - pairs)))
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
    """Rotary position embedding, read from a table with one row for each of max_positions positions.

    head_dim: how many values of a head are rotated: all of them, but for latent attention only the rotated part.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        device = made_now().device
        if device.type == "meta":  # torch would import its compiler to compute no number
            table = torch.empty(max_positions, 2, head_dim, dtype=torch.float32, device=device)
        else:
            table = rotary_table(inverse_frequencies(rope, head_dim, device), max_positions)
            if isinstance(rope, YarnRope):
                table.unflatten(-1, (2, -1))[..., : (rope.rotated or head_dim) // 2] *= rope.amplitude
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation of a pass whose tokens stand at these positions."""
        return Rotation(self.table, positions_T)


class SelfAttention(nn.Module):
    """Self-attention: one projection to queries, keys and values, then attention, then the output projection.

    config: that of the layer, in which its heads are those of all layers (`ModelConfig.with_heads_of`).
    in_features: width of the input; EAGLE-3 heads read two hidden states side by side.
    shares_kv: whether the layer reads the keys and values of an earlier layer.  It then projects queries only, and has no kv
        heads of its own (num_kv_heads is 0).
    query_rows: of `projection`; of families whose queries come with gates.
    """

    query_rows = 1

    def __init__(self, config: ModelConfig, in_features: int, shares_kv: bool = False) -> None:
        super().__init__()
        self.shares_kv = shares_kv
        self.num_heads, self.num_kv_heads = config.num_heads, 0 if shares_kv else config.num_kv_heads
        self.head_dim, self.rope = config.head_dim, config.rope
        self.values = PLAIN_VALUES  # what has to be done to values; families with another way set this
        self._scoring = PLAIN if config.attention_scale is None else Scoring(scale=config.attention_scale)
        self.qkv_proj = projection(config, in_features, self.num_kv_heads, self.query_rows)
        self.o_proj = Linear.row(self.num_heads * config.heads.value_dim, config.hidden_size, config.shard, config.o_bias)
        self.qk_norm = HeadsRMSNorm(config, self.num_heads + self.num_kv_heads) if config.qk_norm else None
        self.kv_scale_2K: Tensor | None = None  # scales of fp8 keys and values, if the checkpoint has any; caches read them

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """From x [T, in_features] to [T, H], or to [R, H] with rows_R.  The caller adds the result to the residual stream."""
        norm = self.qk_norm
        turned = None if self.rope.kind == NO_ROPE else rotation
        weight, eps = (norm.weight, norm.eps) if norm else (None, 0.0)
        prep = HeadPrep(turned, self.num_kv_heads, weight, eps, self.values)
        qkv_TXD = self.project(x_TH)
        inputs = QueryInputs(qkv_TXD, prep) if self.shares_kv else HeadInputs(qkv_TXD, prep)
        return self.o_proj(attn(layer, inputs, rows_R, self.scoring).flatten(1), partials=True)

    def project(self, x_TH: Tensor) -> Tensor:
        """Queries, keys and values of all heads [T, X, D], before the norm of each head and before positions turn them."""
        return self.qkv_proj(x_TH).unflatten(-1, (-1, self.head_dim))

    @property
    def scoring(self) -> Scoring:
        """How products of queries and keys become weights; families with another way override this."""
        return self._scoring


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x)), with gate and up fused into one projection, gate first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self.gate_up_proj = Linear.column(config.hidden_size, parts, config.shard, config.mlp_bias)
        self.down_proj = Linear.row(config.intermediate_size, config.hidden_size, config.shard, config.mlp_bias)

    def forward(self, x: Tensor, partials: bool = False) -> Tensor | Partials:
        """partials: see Linear.  With it a forward hook may find `Partials` in place of a tensor on an H200."""
        return self.down_proj(self.gate_up_proj.gated(x), partials=partials)


class ReluMLP(nn.Module):
    """An MLP without a gate: down(relu(up(x)) ** 2)."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.up_proj = Linear.column(config.hidden_size, {"up_proj": width}, config.shard)
        self.down_proj = Linear.row(width, config.hidden_size, config.shard)

    def forward(self, x: Tensor, partials: bool = False) -> Tensor | Partials:
        """partials: as of MLP."""
        return self.down_proj(relu2(added_up(self.up_proj(x))), partials=partials)
