"""Fills DiffLlama targets from Hugging Face tensor names, strictly.  This module knows names, fusing and the order of heads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import (
    build,
    expect_sizes,
    fill_ends,
    fill_linear,
    fill_mlp,
    fill_norm,
    fill_parts,
    open_target,
)
from specdec.models.config import ModelConfig
from specdec.models.diffllama.config import DiffLlamaConfig, lambda_init
from specdec.models.diffllama.modules import DifferentialAttention, DiffLlamaLayer, DiffLlamaLM
from specdec.models.layers import MLP
from specdec.models.sharding import share_of
from specdec.parallel.shard import WHOLE, Shard


def load_diffllama(
    folder: Path, config: ModelConfig, max_positions: int, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> DiffLlamaLM:
    """A target with the folder's weights.  ValueError names any tensor that is missing, left over or of another shape.

    config: the whole model's.  shard: this rank's share of it.
    """
    assert isinstance(config, DiffLlamaConfig)
    checkpoint = open_target(folder, config)
    expect_sizes(checkpoint, config)
    late = config.quantization is not None
    model = build(lambda: DiffLlamaLM(share_of(config, shard), max_positions), device, dtype, late)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DiffLlamaLayer)
        prefix = f"model.layers.{index}"
        fill_norm(layer.input_layernorm, checkpoint, f"{prefix}.input_layernorm")
        fill_norm(layer.post_attention_layernorm, checkpoint, f"{prefix}.post_attention_layernorm")
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        assert isinstance(attention, DifferentialAttention) and isinstance(mlp, MLP)
        _fill_attention(attention, checkpoint, f"{prefix}.self_attn", index, config)
        fill_mlp(mlp, checkpoint, f"{prefix}.mlp")
    fill_ends(model, checkpoint)
    checkpoint.finish()
    return model


def _fill_attention(
    attention: DifferentialAttention, checkpoint: Checkpoint, prefix: str, index: int, config: ModelConfig
) -> None:
    """Stacks q, k and v in one weight, the heads of a pair side by side."""
    fill_parts(attention.qkv_proj, checkpoint, prefix, partial(paired, num_kv_heads=config.num_kv_heads))
    fill_linear(attention.o_proj, checkpoint, f"{prefix}.o_proj")
    attention.factor = nn.Buffer(_factor(attention, checkpoint, prefix, index))


def paired(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Rows of heads, of which the checkpoint holds the first half of the pairs' heads before the second half, in our order.

    Pair i's heads are moved together: to 2i and 2i + 1 of keys and values, and to these keys' groups of queries.
    """
    return rows.unflatten(0, (2, num_kv_heads // 2, -1)).transpose(0, 1).flatten(0, 2)


def _factor(attention: DifferentialAttention, checkpoint: Checkpoint, prefix: str, index: int) -> Tensor:
    """The layer's lambda, summed in float32: exp(q1 . k1) - exp(q2 . k2) + lambda_init."""
    vectors: dict[str, Tensor] = {}
    device = attention.factor.device
    for name in ("q1", "k1", "q2", "k2"):
        vectors[name] = checkpoint.take(f"{prefix}.lambda_{name}", (attention.head_dim,)).float()
        checkpoint.landed(f"{prefix}.lambda_{name}", vectors[name].to(device))
    first, second = ((vectors[f"q{half}"] * vectors[f"k{half}"]).sum().exp() for half in (1, 2))
    factor = first - second + lambda_init(index)
    if not factor.isfinite() and all(bool(vector.isfinite().all()) for vector in vectors.values()):
        raise ValueError(
            f"{checkpoint.folder}: {prefix} has a lambda of {float(factor)}; expected smaller vectors lambda_q, _k"
        )
    return factor.to(device)
