"""Fills gpt-oss targets from the tensor names of its own checkpoints, strictly.  Knows names and how rows lie.

Shapes: E experts, G = 2F rows of gate and up projections, H hidden size, Q query heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build, copy_, fill_attention, fill_ends, fill_norm, open_target
from specdec.models.config import ModelConfig
from specdec.models.gpt_oss.config import GptOssConfig
from specdec.models.gpt_oss.modules import BiasedExperts, GptOssLayer, GptOssLM, SinkAttention
from specdec.models.linear import LinearStack
from specdec.models.schemes.formats import ExpertBlocks
from specdec.models.sharding import share_of
from specdec.parallel.shard import WHOLE, Shard


def load_gpt_oss(
    folder: Path, config: ModelConfig, max_positions: int, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> GptOssLM:
    """A target with the folder's weights.  ValueError names any tensor that is missing, left over or of another shape.

    config: the whole model's.  shard: this rank's share of it.
    """
    assert isinstance(config, GptOssConfig)
    checkpoint = open_target(folder, config)
    _expect_sizes(checkpoint, config)
    own = cast(GptOssConfig, share_of(config, shard))
    model = build(lambda: GptOssLM(own, max_positions), device, dtype, late=True)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, GptOssLayer)
        prefix = f"model.layers.{index}"
        fill_norm(layer.input_layernorm, checkpoint, f"{prefix}.input_layernorm")
        fill_norm(layer.post_attention_layernorm, checkpoint, f"{prefix}.post_attention_layernorm")
        attention, experts = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        assert isinstance(attention, SinkAttention) and isinstance(experts, BiasedExperts)
        fill_attention(attention, checkpoint, f"{prefix}.self_attn")
        _fill_sinks(attention, checkpoint, f"{prefix}.self_attn.sinks", config.num_heads)
        _fill_experts(experts, checkpoint, f"{prefix}.mlp", shard)
    fill_ends(model, checkpoint)
    checkpoint.finish()
    return model


def _expect_sizes(checkpoint: Checkpoint, config: GptOssConfig) -> None:
    """ValueError if the config's sizes are not those of the tensors: keeps an absurd size from taking time and memory."""
    H, D, attention, mlp = config.hidden_size, config.head_dim, "model.layers.0.self_attn", "model.layers.0.mlp"
    checkpoint.expect_layers("model.layers", config.num_layers)
    checkpoint.expect("model.embed_tokens.weight", (config.vocab_size, H), "vocab_size and hidden_size")
    checkpoint.expect(f"{attention}.q_proj.weight", (config.num_heads * D, H), "num_attention_heads, head_dim and hidden_size")
    keys = "num_key_value_heads, head_dim and hidden_size"
    checkpoint.expect(f"{attention}.k_proj.weight", (config.num_kv_heads * D, H), keys)
    checkpoint.expect(f"{mlp}.router.weight", (config.count, H), "num_local_experts and hidden_size")
    biases = (config.count, 2 * config.intermediate_size)
    checkpoint.expect(f"{mlp}.experts.gate_up_proj_bias", biases, "num_local_experts and intermediate_size")


def _fill_sinks(attention: SinkAttention, checkpoint: Checkpoint, name: str, whole: int) -> None:
    start, own = attention.qkv_proj.rows_of("q_proj")[0] // attention.head_dim, attention.num_heads
    attention.sinks_Q = _kept_wide(attention.sinks_Q, checkpoint, name, slice(start, start + own), whole)


def _kept_wide(
    empty: Tensor, checkpoint: Checkpoint, name: str, own: slice = slice(None), whole: int | None = None
) -> nn.Buffer:  # fmt: skip
    """A tensor in float32 on the device of the empty one.  own: the rows that this rank has, of `whole`."""
    rows = checkpoint.take(name, (empty.shape[0] if whole is None else whole, *empty.shape[1:]))[own]
    kept = nn.Buffer(rows.to(empty.device, torch.float32))
    checkpoint.landed(name, kept)
    return kept


def _fill_experts(experts: BiasedExperts, checkpoint: Checkpoint, prefix: str, shard: Shard) -> None:
    """Gate rows, which alternate with up rows in the checkpoint, above these."""
    router = experts.router
    router.weight_EH = _kept_wide(router.weight_EH, checkpoint, f"{prefix}.router.weight")
    router.bias_E = _kept_wide(router.bias_E, checkpoint, f"{prefix}.router.bias")
    _fill_stack(experts.gate_up_proj, checkpoint, f"{prefix}.experts.gate_up_proj")
    _fill_stack(experts.down_proj, checkpoint, f"{prefix}.experts.down_proj")
    name, bias_EG = f"{prefix}.experts.gate_up_proj_bias", experts.gate_up_bias_EG
    width = bias_EG.shape[1] // 2
    whole_EG = checkpoint.take(name, (bias_EG.shape[0], 2 * width * shard.size))
    with torch.no_grad():
        for part in range(2):
            bias_EG[:, part * width : (part + 1) * width] = whole_EG[:, part::2].narrow(1, shard.rank * width, width)
    checkpoint.landed(name, bias_EG)
    if experts.down_bias_EH is None:
        checkpoint.ignore(f"{prefix}.experts.down_proj_bias")
    else:
        copy_(experts.down_bias_EH, checkpoint, f"{prefix}.experts.down_proj_bias")


def _fill_stack(stack: LinearStack, checkpoint: Checkpoint, name: str) -> None:
    """A projection of all experts.  The rows of its parts alternate."""
    format, parts = checkpoint.format_of(name), list(stack.parts.sizes)
    assert isinstance(format, ExpertBlocks)
    rows, columns = stack.shape(parts[0])
    shape = (len(parts) * rows, columns)
    for index, matrix in enumerate(format.matrices(checkpoint, name, shape, stack.device)):
        for place, part in enumerate(parts):

            def every(plane: Tensor, first: int = place) -> Tensor:
                return plane[first :: len(parts)]

            try:
                stack.fill(index, part, matrix.arranged(every))
            except ValueError as error:
                raise ValueError(f"{checkpoint.folder}: {name}: {error}") from error
