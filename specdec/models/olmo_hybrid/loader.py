"""How OLMo Hybrid lies in checkpoints: convolutions in three pieces, and norms under two names.

Published files have a convolution for queries, one for keys, one for values.  transformers 5 saves the same channels in three
pieces of equal size.  Either way they are one after the other; so they are put together, and then cut by kinds.

Shapes: as of modules.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Names, Parts, copy_, fill_float32, fill_linear, fill_mlp, fill_parts
from specdec.models.layers import MLP
from specdec.models.mixtures.wide_norms import WideNormAttention, fill_wide_norms
from specdec.models.olmo_hybrid.config import LINEAR, OlmoHybridConfig, parse_olmo_hybrid
from specdec.models.olmo_hybrid.modules import olmo_hybrid_layer
from specdec.models.recurrent.delta_net import GatedDeltaNet
from specdec.models.recurrent.fill import by_ranks, expect_kinds, expect_rates
from specdec.models.recurrent.sizes import RuleSizes

NORMS: Names = {
    "input_layernorm": ("attention_layer_norm", "input_layernorm"),
    "post_attention_layernorm": ("feedforward_layer_norm", "post_attention_layernorm"),
}
UNSAID = {
    "layer_types": f"three of {LINEAR} to one of full_attention",
    "rope_parameters": "no rope, as released checkpoints were trained; transformers 5 takes theta 10000 then",
    "tie_word_embeddings": "false: the output layer is a matrix of its own",
    "max_position_embeddings": "65536",
}


def _fill_delta_net(net: GatedDeltaNet, checkpoint: Checkpoint, prefix: str) -> None:
    """prefix: the layer's name and that of the module, which checkpoints call otherwise."""
    prefix, shard = f"{prefix.rpartition('.')[0]}.linear_attn", net.shard
    whole = net.sizes.times(shard.size)
    for matrix in filter(None, (net.in_proj, net.gates_proj)):
        fill_parts(matrix, checkpoint, prefix)
    fill_linear(net.out_proj, checkpoint, f"{prefix}.o_proj")
    _fill_taps(net, checkpoint, prefix, whole)
    copy_(net.norm_E, checkpoint, f"{prefix}.o_norm.weight")
    own = shard.piece(whole.value_heads)
    expect_rates(checkpoint, f"{prefix}.A_log", (whole.value_heads,))
    net.A_log_V, net.dt_bias_V = (
        fill_float32(empty, checkpoint, f"{prefix}.{name}", own, whole.value_heads)
        for empty, name in ((net.A_log_V, "A_log"), (net.dt_bias_V, "dt_bias"))
    )


def _fill_taps(net: GatedDeltaNet, checkpoint: Checkpoint, prefix: str, whole: RuleSizes) -> None:
    (Z, C), ranks = net.conv_ZC.shape, net.shard.size
    names = [f"{prefix}.{letter}_conv1d.weight" for letter in "qkv"]
    sizes: tuple[int, ...] = whole.kinds
    if all(name in checkpoint for name in names) and checkpoint.shape(names[0])[0] != sizes[0]:
        sizes = _thirds(sum(sizes))
    pieces = [checkpoint.take(name, (size, 1, Z)) for name, size in zip(names, sizes, strict=True)]
    if not checkpoint.has_data:
        return
    order = partial(by_ranks, sizes=whole.kinds, ranks=ranks)
    taps_C1Z: Tensor = order(torch.cat(pieces))[C * net.shard.rank :][:C]
    with torch.no_grad():
        net.conv_ZC.copy_(taps_C1Z[:, 0].t())
    for name in names:
        checkpoint.landed(name, net.conv_ZC)


def _thirds(channels: int) -> tuple[int, ...]:
    """Three pieces as torch's `chunk` makes them: the last one may be shorter."""
    size = -(-channels // 3)
    return size, size, channels - 2 * size


def _expect(checkpoint: Checkpoint, config: OlmoHybridConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer of each kind, by the headers."""
    H, D, sizes, recurrent = config.hidden_size, config.head_dim, config.recurrent, config.recurrent_layers
    assert sizes is not None and sizes.rule is not None
    marks = "self_attn.q_norm.weight", "linear_attn.A_log"
    expect_kinds(checkpoint, config, marks, ("full_attention", LINEAR), "layer_types")
    first = min(set(range(config.num_layers)) - set(recurrent))
    attention, matrix = f"model.layers.{first}.self_attn", checkpoint.expect_matrix
    matrix(f"{attention}.q_proj", (config.num_heads * D, H), "num_attention_heads, head_dim, hidden_size")
    matrix(f"{attention}.k_proj", (config.num_kv_heads * D, H), "num_key_value_heads, head_dim, hidden_size")
    matrix(f"model.layers.{first}.mlp.gate_proj", (config.intermediate_size, H), "intermediate_size and hidden_size")
    net, (keys, _, values) = f"model.layers.{recurrent[0]}.linear_attn", sizes.rule.kinds
    matrix(f"{net}.k_proj", (keys, H), "linear_num_key_heads, linear_key_head_dim, hidden_size")
    matrix(f"{net}.v_proj", (values, H), "linear_num_value_heads, linear_value_head_dim, hidden_size")
    checkpoint.expect(f"{net}.A_log", (sizes.rule.value_heads,), "linear_num_value_heads")
    checkpoint.expect(f"{net}.o_norm.weight", (sizes.rule.value_width,), "linear_value_head_dim")
    if (taps := checkpoint.shape(f"{net}.q_conv1d.weight")[-1]) != sizes.taps:
        raise checkpoint.refuse(f"{net}.q_conv1d.weight", f"must have {sizes.taps} taps by linear_conv_kernel_dim, got {taps}")


PARTS: Parts = {WideNormAttention: fill_wide_norms, GatedDeltaNet: _fill_delta_net, MLP: fill_mlp}
FAMILY = Family(parse_olmo_hybrid, olmo_hybrid_layer, _expect, PARTS, UNSAID, NORMS)
