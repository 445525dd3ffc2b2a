"""How Kimi Linear lies in checkpoints: names of its delta rule, latents as DeepSeek's, mixtures as Mixtral's.

transformers 5 saves MLPs of dense layers under the name of mixtures, too, and reads either name; so does this.

Shapes: as of modules.py.
"""

from __future__ import annotations

import torch
from torch import nn

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, copy_, fill_float32, fill_linear, fill_mlp, fill_parts
from specdec.models.deepseek.loader import PARTS as LATENT_PARTS
from specdec.models.kimi_linear.config import LINEAR, parse_kimi_linear
from specdec.models.kimi_linear.modules import KimiDeltaAttention, kimi_linear_layer
from specdec.models.latent.attention import LatentAttention
from specdec.models.latent.config import LatentConfig
from specdec.models.latent.weights import expect_latents
from specdec.models.layers import MLP
from specdec.models.mixtures.families.mixtral import PARTS as WORDS
from specdec.models.mixtures.fill import MixtureNames, expect_mixture, fill_mixture
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.recurrent.fill import expect_kinds, expect_rates, fill_taps

MIXTURES = MixtureNames(
    "block_sparse_moe.gate.weight", "block_sparse_moe.gate.e_score_correction_bias", experts="block_sparse_moe.experts",
    parts=WORDS, shared="block_sparse_moe.shared_experts", count_keys="num_experts, after the dense layers, and hidden_size",
    shared_keys="num_shared_experts and moe_intermediate_size", layer_keys="first_k_dense_replace (or mlp_layer_types)",
)  # fmt: skip
SAVED = MIXTURES._replace(dense="block_sparse_moe.gate_proj")  # by transformers 5
UNSAID = {
    "linear_attn_config": "sizes of linear_head_dim, linear_num_heads and linear_conv_kernel_dim, and layer_types",
    "first_k_dense_replace": "1",
    "tie_word_embeddings": "false: the output layer is a matrix of its own",
}


def _fill_delta(net: KimiDeltaAttention, checkpoint: Checkpoint, prefix: str) -> None:
    rule, shard, C = net.sizes, net.shard, net.sizes.outputs
    heads = rule.value_heads * shard.size
    for matrix in filter(None, (net.in_proj, net.gates_proj, net.f_b_proj, net.g_b_proj)):
        fill_parts(matrix, checkpoint, prefix)
    fill_linear(net.o_proj, checkpoint, f"{prefix}.o_proj")
    for letter, taps_ZC in zip("qkv", net.conv_ZC.detach().split(C, dim=1), strict=True):
        fill_taps(taps_ZC, checkpoint, f"{prefix}.{letter}_conv1d.weight", shard)
    copy_(net.norm_E, checkpoint, f"{prefix}.o_norm.weight")
    expect_rates(checkpoint, f"{prefix}.A_log", (1, 1, heads, 1))
    rates_H = checkpoint.take(f"{prefix}.A_log", (1, 1, heads, 1)).flatten()[shard.piece(heads)]
    net.A_log_H = nn.Buffer(rates_H.to(net.A_log_H.device, torch.float32))
    checkpoint.landed(f"{prefix}.A_log", net.A_log_H)
    whole = C * shard.size
    net.dt_bias_C = fill_float32(net.dt_bias_C, checkpoint, f"{prefix}.dt_bias", shard.piece(whole), whole)


def _fill_mlp(mlp: MLP, checkpoint: Checkpoint, prefix: str) -> None:
    saved = f"{prefix.rpartition('.')[0]}.block_sparse_moe"
    fill_mlp(mlp, checkpoint, saved if any(name.startswith(f"{saved}.gate_proj.") for name in checkpoint.names()) else prefix)


def _fill_mixture(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mixture(moe, checkpoint, prefix, MIXTURES)


def _expect(checkpoint: Checkpoint, config: LatentConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer of each kind, by the headers."""
    sizes, recurrent = config.recurrent, config.recurrent_layers
    assert sizes is not None and sizes.rule is not None
    marks = "self_attn.kv_a_layernorm.weight", "self_attn.A_log"
    expect_kinds(checkpoint, config, marks, ("full_attention", LINEAR), "layer_types (or linear_attn_config)")
    expect_latents(checkpoint, config, min(set(range(config.num_layers)) - set(recurrent)))
    net, words = f"model.layers.{recurrent[0]}.self_attn", "head_dim and num_heads of linear_attn_config, hidden_size"
    checkpoint.expect_matrix(f"{net}.q_proj", (sizes.outputs, config.hidden_size), words)
    checkpoint.expect(f"{net}.q_conv1d.weight", (sizes.outputs, 1, sizes.taps), "short_conv_kernel_size")
    checkpoint.expect(f"{net}.A_log", (1, 1, sizes.rule.value_heads, 1), "num_heads of linear_attn_config")
    checkpoint.expect(f"{net}.o_norm.weight", (sizes.rule.value_width,), "head_dim of linear_attn_config")
    expect_mixture(checkpoint, config, MIXTURES, SAVED)


PARTS: Parts = {
    KimiDeltaAttention: _fill_delta, LatentAttention: LATENT_PARTS[LatentAttention], MixtureOfExperts: _fill_mixture,
    MLP: _fill_mlp,
}  # fmt: skip
FAMILY = Family(parse_kimi_linear, kimi_linear_layer, _expect, PARTS, UNSAID)
