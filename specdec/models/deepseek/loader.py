"""Fills DeepSeek targets from Hugging Face tensor names, strictly.  Knows names and fusing; files are `checkpoint.py`'s."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build, copy_, fill_ends, fill_mlp, fill_norm, open_target
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.deepseek.modules import DeepseekLayer, DeepseekLM, LatentAttention
from specdec.models.experts import MixtureOfExperts
from specdec.models.layers import MLP


def load_deepseek(
    folder: Path, config: ModelConfig, max_positions: int, device: torch.device, dtype: torch.dtype
) -> DeepseekLM:
    """A target with the folder's weights.  ValueError names any tensor that is missing, left over or of another shape.

    Layers of multi-token prediction, which the config counts after the others, are left where they are.
    """
    assert isinstance(config, DeepseekConfig)
    checkpoint = open_target(folder)
    _expect_sizes(checkpoint, config)
    model = build(lambda: DeepseekLM(config, max_positions), device, dtype)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DeepseekLayer)
        _fill_layer(layer, checkpoint, f"model.layers.{index}", config)
    fill_ends(model, checkpoint)
    extra = tuple(f"model.layers.{config.num_layers + index}." for index in range(config.extra_layers))
    for name in checkpoint.names():
        if name.startswith(extra):
            checkpoint.ignore(name)
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


def _fill_layer(layer: DeepseekLayer, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> None:
    fill_norm(layer.input_layernorm, checkpoint, f"{prefix}.input_layernorm")
    fill_norm(layer.post_attention_layernorm, checkpoint, f"{prefix}.post_attention_layernorm")
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    assert isinstance(attention, LatentAttention) and isinstance(mlp, MLP | MixtureOfExperts)
    _fill_attention(attention, checkpoint, f"{prefix}.self_attn", config)
    if isinstance(mlp, MLP):
        fill_mlp(mlp, checkpoint, f"{prefix}.mlp")
    else:
        _fill_experts(mlp, checkpoint, f"{prefix}.mlp")


def _fill_attention(attention: LatentAttention, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig) -> None:
    """Queries (or what they come from), the latent and the indexer's part in one weight; rotated pairs as halves of a head."""
    queries, latent, index_key, index_weights = attention.in_proj.weight.split(attention.splits)
    bias = attention.in_proj.bias
    by_head = (config.num_heads, attention.query_dim)
    halved = partial(_copy_halved, checkpoint, config.head_dim if config.interleaved else 0)
    if bias is not None:
        bias.zero_()  # transformers gives q_proj and the indexer none
    if attention.q_b_proj is None:
        halved(queries, f"{prefix}.q_proj.weight", by_head)
    else:
        copy_(queries, checkpoint, f"{prefix}.q_a_proj.weight")
        if bias is not None:
            copy_(bias[: attention.splits[0]], checkpoint, f"{prefix}.q_a_proj.bias")
        assert attention.q_a_layernorm is not None
        fill_norm(attention.q_a_layernorm, checkpoint, f"{prefix}.q_a_layernorm")
        halved(attention.q_b_proj.weight[: attention.queries], f"{prefix}.q_b_proj.weight", by_head)
    halved(latent, f"{prefix}.kv_a_proj_with_mqa.weight", (1, latent.shape[0]))
    if bias is not None:
        own = bias.split(attention.splits)[1]
        halved(own, f"{prefix}.kv_a_proj_with_mqa.bias", (1, own.shape[0]))
    if attention.k_norm is not None:
        _fill_indexer(attention, index_key, index_weights, checkpoint, f"{prefix}.indexer", config)
    fill_norm(attention.kv_a_layernorm, checkpoint, f"{prefix}.kv_a_layernorm")
    copy_(attention.kv_b_HXC.flatten(0, 1), checkpoint, f"{prefix}.kv_b_proj.weight")
    copy_(attention.o_proj.weight, checkpoint, f"{prefix}.o_proj.weight")
    if attention.o_proj.bias is not None:
        copy_(attention.o_proj.bias, checkpoint, f"{prefix}.o_proj.bias")


def _fill_indexer(
    attention: LatentAttention, key: Tensor, weights: Tensor, checkpoint: Checkpoint, prefix: str, config: DeepseekConfig
) -> None:
    """An indexer's rows of the layer's projections, and its norm.  key, weights: its rows of in_proj."""
    index, norm, q_b_proj = config.indexer, attention.k_norm, attention.q_b_proj
    assert index is not None and norm is not None and q_b_proj is not None
    halved = partial(_copy_halved, checkpoint, config.head_dim if index.interleaved else 0, first=True)
    halved(key, f"{prefix}.wk.weight", (1, index.head_dim))
    halved(q_b_proj.weight[attention.queries :], f"{prefix}.wq_b.weight", (index.heads, index.head_dim))
    copy_(weights, checkpoint, f"{prefix}.weights_proj.weight")
    for name, vector in norm.named_parameters():
        halved(vector, f"{prefix}.k_norm.{name}", (1, index.head_dim))


def _copy_halved(
    checkpoint: Checkpoint, R: int, target: Tensor, name: str, heads: tuple[int, int], first: bool = False
) -> None:
    """Copies rows of heads, whose last R rows (first: the first R) are rotated in pairs that lie side by side: there the pairs'
    first members move before their second ones.  Queries and keys alike, so that their products stay as they are.
    """
    rows = checkpoint.take(name, tuple(target.shape)).unflatten(0, heads)
    if R:
        rotated, rest = (rows[:, :R], rows[:, R:]) if first else (rows[:, -R:], rows[:, :-R])
        turned = rotated.unflatten(1, (R // 2, 2)).transpose(1, 2).flatten(1, 2)
        rows = torch.cat((turned, rest) if first else (rest, turned), dim=1)
    target.copy_(rows.flatten(0, 1))
    checkpoint.landed(name, target)


def _fill_experts(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    """Each expert's gate above its up in one weight.  The router's correction stays float32 in any dtype."""
    copy_(moe.gate.weight, checkpoint, f"{prefix}.gate.weight")
    if moe.gate.config.gate == "sigmoid":
        name = f"{prefix}.gate.e_score_correction_bias"
        correction_E = checkpoint.take(name, tuple(moe.gate.correction_E.shape))
        moe.gate.correction_E = nn.Buffer(correction_E.to(moe.gate.weight.device, torch.float32))
        checkpoint.landed(name, moe.gate.correction_E)
    F = moe.down_proj.shape[2]
    for index, (gate_up, down) in enumerate(zip(moe.gate_up_proj, moe.down_proj)):
        copy_(gate_up[:F], checkpoint, f"{prefix}.experts.{index}.gate_proj.weight")
        copy_(gate_up[F:], checkpoint, f"{prefix}.experts.{index}.up_proj.weight")
        copy_(down, checkpoint, f"{prefix}.experts.{index}.down_proj.weight")
    fill_mlp(moe.shared_experts, checkpoint, f"{prefix}.shared_experts")
