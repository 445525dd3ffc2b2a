"""Fills DeepSeek targets from Hugging Face tensor names, strictly.  Knows names and fusing; files are `checkpoint.py`'s."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import (
    build,
    copy_,
    copy_run,
    fill_ends,
    fill_linear,
    fill_mlp,
    fill_norm,
    fill_stack,
    open_target,
)
from specdec.models.checkpoints.mtp_names import mtp_prefixes
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.deepseek.modules import DeepseekLayer, DeepseekLM, LatentAttention
from specdec.models.experts import MixtureOfExperts
from specdec.models.layers import MLP
from specdec.models.sharding import share_of
from specdec.parallel.shard import WHOLE, Shard


def load_deepseek(
    folder: Path, config: ModelConfig, max_positions: int, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> DeepseekLM:
    """A target with the folder's weights.  ValueError names any tensor that is missing, left over or of another shape.

    config: the whole model's.  shard: this rank's share of it.
    """
    assert isinstance(config, DeepseekConfig)
    checkpoint = open_target(folder)
    _expect_sizes(checkpoint, config)
    model = build(lambda: DeepseekLM(cast(DeepseekConfig, share_of(config, shard)), max_positions), device, dtype)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DeepseekLayer)
        fill_latent_layer(layer, checkpoint, f"model.layers.{index}", config)
    fill_ends(model, checkpoint)
    checkpoint.leave(mtp_prefixes(config))
    checkpoint.finish()
    return model


def _expect_sizes(checkpoint: Checkpoint, config: DeepseekConfig) -> None:
    """ValueError if the config's sizes are not those of the tensors: keeps an absurd size from taking time and memory."""
    H, C, hidden, query_dim = config.num_heads, config.rank, config.hidden_size, config.nope_dim + config.head_dim
    expect, attention, mlp = checkpoint.expect, "model.layers.0.self_attn", f"model.layers.{config.first_dense}.mlp"
    checkpoint.expect_layers("model.layers", config.num_layers)
    expect("model.embed_tokens.weight", (config.vocab_size, hidden), "vocab_size and hidden_size")
    queries = "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim and q_lora_rank"
    if config.q_rank is None:
        expect(f"{attention}.q_proj.weight", (H * query_dim, hidden), queries)
    else:
        expect(f"{attention}.q_a_proj.weight", (config.q_rank, hidden), "q_lora_rank and hidden_size")
        expect(f"{attention}.q_b_proj.weight", (H * query_dim, config.q_rank), queries)
    expect(f"{attention}.kv_a_proj_with_mqa.weight", (C + config.head_dim, hidden), "kv_lora_rank and qk_rope_head_dim")
    keys_values = "num_attention_heads, qk_nope_head_dim, v_head_dim and kv_lora_rank"
    expect(f"{attention}.kv_b_proj.weight", (H * (config.nope_dim + config.value_dim), C), keys_values)
    if (index := config.indexer) is not None:
        sizes = "index_n_heads, index_head_dim and q_lora_rank"
        expect(f"{attention}.indexer.wq_b.weight", (index.heads * index.head_dim, config.q_rank or 0), sizes)
        expect(f"{attention}.indexer.wk.weight", (index.head_dim, hidden), "index_head_dim and hidden_size")
        expect(f"{attention}.indexer.weights_proj.weight", (index.heads, hidden), "index_n_heads and hidden_size")
    if config.first_dense > 0:
        expect("model.layers.0.mlp.gate_proj.weight", (config.intermediate_size, hidden), "intermediate_size")
    if (experts := config.experts) is not None:
        size = experts.intermediate_size
        expect(f"{mlp}.gate.weight", (experts.count, hidden), "n_routed_experts, after first_k_dense_replace layers")
        expect(f"{mlp}.experts.0.gate_proj.weight", (size, hidden), "moe_intermediate_size")
        shared = (experts.shared * size, hidden)
        expect(f"{mlp}.shared_experts.gate_proj.weight", shared, "n_shared_experts and moe_intermediate_size")


def fill_latent_layer(layer: DeepseekLayer, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> None:
    """One decoder layer.  config: the whole model's."""
    fill_norm(layer.input_layernorm, checkpoint, f"{prefix}.input_layernorm")
    fill_norm(layer.post_attention_layernorm, checkpoint, f"{prefix}.post_attention_layernorm")
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    assert isinstance(attention, LatentAttention) and isinstance(mlp, MLP | MixtureOfExperts)
    _fill_attention(attention, checkpoint, f"{prefix}.self_attn", config)
    if isinstance(mlp, MLP):
        fill_mlp(mlp, checkpoint, f"{prefix}.mlp")
    else:
        fill_experts(mlp, checkpoint, f"{prefix}.mlp")


def _fill_attention(attention: LatentAttention, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> None:
    """Queries (or what they come from), the latent and the indexer's part in one weight; rotated pairs as halves of a head."""
    in_proj, fill = attention.in_proj, partial(fill_linear, checkpoint=checkpoint)
    rotated = config.head_dim if config.interleaved else 0
    queries = partial(halved, heads=config.num_heads, rotated=rotated)
    if attention.q_b_proj is None:
        copy_run(in_proj.tensors("q")["weight"], checkpoint, f"{prefix}.q_proj.weight", queries)
        if (bias := in_proj.tensors("q").get("bias")) is not None:
            bias.tensor.zero_()  # transformers gives q_proj none
    else:
        assert attention.q_a_layernorm is not None
        fill(in_proj, names={"q": f"{prefix}.q_a_proj"})
        fill_norm(attention.q_a_layernorm, checkpoint, f"{prefix}.q_a_layernorm")
        fill(attention.q_b_proj, names={"q": f"{prefix}.q_b_proj"}, arrange=queries)
    fill(in_proj, names={"latent": f"{prefix}.kv_a_proj_with_mqa"}, arrange=partial(halved, heads=1, rotated=rotated))
    if attention.k_norm is not None:
        _fill_indexer(attention, checkpoint, f"{prefix}.indexer", config)
    fill_norm(attention.kv_a_layernorm, checkpoint, f"{prefix}.kv_a_layernorm")
    fill(attention.kv_b_proj, names=f"{prefix}.kv_b_proj")
    fill(attention.o_proj, names=f"{prefix}.o_proj")


def _fill_indexer(attention: LatentAttention, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> None:
    """An indexer's rows of the layer's projections, and its norm."""
    index, norm, q_b_proj = config.indexer, attention.k_norm, attention.q_b_proj
    assert index is not None and norm is not None and q_b_proj is not None
    key, weights = attention.in_proj.tensors("index_key"), attention.in_proj.tensors("index_weights")
    arrange = partial(halved, rotated=config.head_dim if index.interleaved else 0, first=True)
    copy_run(key["weight"], checkpoint, f"{prefix}.wk.weight", partial(arrange, heads=1))
    copy_run(weights["weight"], checkpoint, f"{prefix}.weights_proj.weight")
    for bias in (key.get("bias"), weights.get("bias")):
        if bias is not None:
            bias.tensor.zero_()  # transformers gives the indexer none
    fill_linear(q_b_proj, checkpoint, {"index_q": f"{prefix}.wq_b"}, partial(arrange, heads=index.heads))
    for name, vector in norm.named_parameters():
        copy_(vector, checkpoint, f"{prefix}.k_norm.{name}", partial(arrange, heads=1))


def halved(rows: Tensor, heads: int, rotated: int, first: bool = False) -> Tensor:
    """Rows of heads (of a weight or a bias), whose last `rotated` rows (first: the first ones) are rotated in pairs that lie
    side by side: there the pairs' first members move before their second ones.  Queries and keys alike, so that their products
    stay as they are.
    """
    if not rotated:
        return rows
    by_head, R = rows.unflatten(0, (heads, -1)), rotated
    turned, rest = (by_head[:, :R], by_head[:, R:]) if first else (by_head[:, -R:], by_head[:, :-R])
    turned = turned.unflatten(1, (R // 2, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, rest) if first else (rest, turned), dim=1).flatten(0, 1)


def fill_experts(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    """Each expert's gate above its up in one weight.  The router's correction stays float32 in any dtype."""
    copy_(moe.gate.weight, checkpoint, f"{prefix}.gate.weight")
    if moe.gate.config.gate == "sigmoid":
        name = f"{prefix}.gate.e_score_correction_bias"
        correction_E = checkpoint.take(name, tuple(moe.gate.correction_E.shape))
        moe.gate.correction_E = nn.Buffer(correction_E.to(moe.gate.weight.device, torch.float32))
        checkpoint.landed(name, moe.gate.correction_E)
    for stack in (moe.gate_up_proj, moe.down_proj):
        fill_stack(stack, checkpoint, f"{prefix}.experts")
    fill_mlp(moe.shared_experts, checkpoint, f"{prefix}.shared_experts")
