"""How Qwen's hybrids lie in checkpoints: rows of fused matrices, mixtures, and the names of the gated delta net.

A checkpoint's matrix with several kinds of rows (queries and gates of each head; queries, keys, values and gates of each key
head) is one part of ours.  Its rows are brought into the order of ranks, and of each rank's kinds, before a rank takes its run.

Shapes: N rows; as of modules.py otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint, config_path
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import (
    Parts,
    copy_,
    fill_attention,
    fill_float32,
    fill_linear,
    fill_mlp,
    pairs_of,
)
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP
from specdec.models.mixtures.families.qwen_moe import NAMES
from specdec.models.mixtures.fill import expect_mixture, fill_mixture
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.qwen_hybrid.config import LINEAR, NEXT, parse_qwen_hybrid
from specdec.models.qwen_hybrid.modules import GatedAttention, hybrid_layer
from specdec.models.recurrent.delta_net import GatedDeltaNet
from specdec.models.recurrent.fill import by_ranks, expect_kinds, expect_rates, fill_taps

UNSAID = {
    "layer_types": f"three of {LINEAR} to one of full_attention, or by full_attention_interval",
    "tie_word_embeddings": "false: the output layer is a matrix of its own",
    "partial_rotary_factor": "0.25",
    "max_position_embeddings": "32768",
}


def by_groups(rows: Tensor, groups: int, sizes: Sequence[int], ranks: int) -> Tensor:
    """Rows that alternate by group, each with so many of every kind: of each rank, all of a kind together."""
    kinds = rows.unflatten(0, (ranks, groups // ranks, sum(sizes))).split(list(sizes), dim=2)
    return torch.cat([kind.flatten(1, 2) for kind in kinds], dim=1).flatten(0, 1)


def _fill_attention(attention: GatedAttention, checkpoint: Checkpoint, prefix: str) -> None:
    """As ordinary attention; of q_proj, whose queries and gates alternate head by head, the gates come first."""
    fill_attention(attention, checkpoint, prefix, {"q_proj": partial(_gates_first, attention=attention)})


def _gates_first(rows: Tensor, attention: GatedAttention) -> Tensor:
    D, turned = attention.head_dim, pairs_of(attention)
    heads = attention.qkv_proj.rows_of("q_proj")[1] // (2 * D)
    query, gate = rows.unflatten(0, (heads, 2, -1)).unbind(1)
    query = query.flatten(0, 1) if turned is None else turned(query.flatten(0, 1))
    both = torch.cat((gate.flatten(0, 1), query))
    return by_ranks(both, (heads * D, heads * D), heads // attention.num_heads)


def _fill_delta_net(net: GatedDeltaNet, checkpoint: Checkpoint, prefix: str) -> None:
    """in_proj_qkvz and in_proj_ba alternate by key head; in_proj_qkv and the convolution have queries before keys and values.

    prefix: the layer's name and that of the module, which checkpoints call otherwise.
    """
    prefix = f"{prefix.rpartition('.')[0]}.linear_attn"
    ranks = net.shard.size
    whole, G = net.sizes.times(ranks), net.sizes.key_heads * ranks
    group = whole.value_heads // G
    values, queries_first = group * whole.value_width, partial(by_ranks, sizes=whole.kinds, ranks=ranks)
    arrange = {
        "in_proj_qkv": queries_first,
        "in_proj_qkvz": partial(by_groups, groups=G, sizes=(*[whole.key_width] * 2, values, values), ranks=ranks),
        "in_proj_ba": partial(by_groups, groups=G, sizes=(group, group), ranks=ranks),
    }
    for matrix in filter(None, (net.in_proj, net.gates_proj)):
        fill_linear(matrix, checkpoint, {part: f"{prefix}.{part}" for part in matrix.parts.sizes}, arrange)
    fill_linear(net.out_proj, checkpoint, f"{prefix}.out_proj")
    fill_taps(net.conv_ZC, checkpoint, f"{prefix}.conv1d.weight", net.shard, queries_first)
    copy_(net.norm_E, checkpoint, f"{prefix}.norm.weight")
    own = net.shard.piece(whole.value_heads)
    expect_rates(checkpoint, f"{prefix}.A_log", (whole.value_heads,))
    net.A_log_V, net.dt_bias_V = (
        fill_float32(empty, checkpoint, f"{prefix}.{name}", own, whole.value_heads)
        for empty, name in ((net.A_log_V, "A_log"), (net.dt_bias_V, "dt_bias"))
    )


def _fill_mixture(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mixture(moe, checkpoint, prefix, NAMES)


def _expect(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer of each kind, by the headers."""
    H, D, sizes = config.hidden_size, config.head_dim, config.recurrent
    assert sizes is not None and sizes.rule is not None
    recurrent = config.recurrent_layers
    marks, words = ("self_attn.q_norm.weight", "linear_attn.A_log"), ("full_attention", LINEAR)
    expect_kinds(checkpoint, config, marks, words, "layer_types (or by full_attention_interval where that is absent)")
    attention = f"model.layers.{min(set(range(config.num_layers)) - set(recurrent))}.self_attn"
    checkpoint.expect_matrix(f"{attention}.q_proj", (2 * config.num_heads * D, H), "num_attention_heads, head_dim, hidden_size")
    checkpoint.expect_matrix(f"{attention}.k_proj", (config.num_kv_heads * D, H), "num_key_value_heads, head_dim, hidden_size")
    if config.qkv_bias:
        _expect_bias(checkpoint, f"{attention}.q_proj.bias", 2 * config.num_heads * D)
    net, outputs = f"model.layers.{recurrent[0]}.linear_attn", sizes.outputs
    fused, rows = ("in_proj_qkvz", sizes.channels + outputs) if config.family == NEXT else ("in_proj_qkv", sizes.channels)
    checkpoint.expect_matrix(f"{net}.{fused}", (rows, H), "the linear_* sizes of heads and hidden_size")
    checkpoint.expect(f"{net}.conv1d.weight", (sizes.channels, 1, sizes.taps), "linear_conv_kernel_dim")
    checkpoint.expect(f"{net}.A_log", (sizes.rule.value_heads,), "linear_num_value_heads")
    checkpoint.expect(f"{net}.norm.weight", (sizes.rule.value_width,), "linear_value_head_dim")
    expect_mixture(checkpoint, config, NAMES)


def _expect_bias(checkpoint: Checkpoint, name: str, rows: int) -> None:
    if name not in checkpoint:
        raise ValueError(
            f"{config_path(checkpoint.folder)}: attention_bias is true, but tensor {name!r} is missing; nearest thing that "
            "works: attention_bias false, if none of the attention layers has a bias"
        )
    checkpoint.expect(name, (rows,), "attention_bias, num_attention_heads and head_dim")


PARTS: Parts = {
    GatedAttention: _fill_attention, GatedDeltaNet: _fill_delta_net, MLP: fill_mlp, MixtureOfExperts: _fill_mixture,
}  # fmt: skip
FAMILY = Family(parse_qwen_hybrid, hybrid_layer, _expect, PARTS, UNSAID)
