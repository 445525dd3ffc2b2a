"""Fills our fused modules from Hugging Face tensor names.  Knows names and fusing; files are `checkpoint.py`'s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from specdec.models.causal_lm import CausalLM, DecoderLayer
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.config_values import DTYPE_NAMES, token_ids
from specdec.models.checkpoints.kv_scales import take_kv_scale
from specdec.models.checkpoints.mtp_names import mtp_prefixes
from specdec.models.checkpoints.swapped import refuse_head_tensors
from specdec.models.config import ModelConfig, parse_config, read_json
from specdec.models.layers import MLP, RMSNorm, SelfAttention
from specdec.models.linear import ONLY, Linear, LinearStack, Stored
from specdec.models.sharding import share_of
from specdec.parallel.shard import WHOLE, Shard

M = TypeVar("M", bound=nn.Module)
Arrange = Callable[[Tensor], Tensor]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def read_target_config(folder: Path) -> ModelConfig:
    """The target's config, by the Llama family's rules."""
    path = folder / "config.json"
    return with_generation_eos(parse_config(read_json(path), str(path)), folder)


def with_generation_eos(config: ModelConfig, folder: Path) -> ModelConfig:
    """EOS ids from generation_config.json where it has some, as transformers does."""
    generation = folder / "generation_config.json"
    raw = read_json(generation) if generation.is_file() else {}
    eos_ids = token_ids(raw, "eos_token_id", str(generation), config.vocab_size)
    return replace(config, eos_ids=eos_ids) if eos_ids else config


def build(make: Callable[[], M], device: torch.device, dtype: torch.dtype) -> M:
    """A module with empty weights of that dtype on the device, ready to be filled; rotary tables are real."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = make()
    finally:
        torch.set_default_dtype(before)
    return module.to(dtype).eval().requires_grad_(False)


def load_target(
    folder: Path, config: ModelConfig, max_positions: int, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> CausalLM:
    """A target with the folder's weights.  ValueError names any tensor that is missing, left over or of another shape.

    config: the whole model's.  shard: this rank's share of it.
    """
    checkpoint = open_target(folder)
    expect_sizes(checkpoint, config)
    model = build(lambda: CausalLM(share_of(config, shard), max_positions), device, dtype)
    for index, layer in enumerate(model.layers):
        fill_layer(layer, checkpoint, f"model.layers.{index}")
    fill_ends(model, checkpoint)
    checkpoint.leave(mtp_prefixes(config))
    checkpoint.finish()
    return model


def open_target(folder: Path) -> Checkpoint:
    """The folder's tensors.  ValueError if they are a draft head's."""
    checkpoint = Checkpoint(folder)
    refuse_head_tensors(checkpoint.names(), folder)
    return checkpoint


def expect_sizes(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if the config's sizes are not those of the tensors: keeps an absurd size from taking time and memory."""
    checkpoint.expect_layers("model.layers", config.num_layers)
    checkpoint.expect("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), "vocab_size and hidden_size")
    expect_layer_sizes(checkpoint, "model.layers.0", config, config.hidden_size)


def expect_layer_sizes(checkpoint: Checkpoint, prefix: str, config: ModelConfig, in_features: int) -> None:
    """The same for one decoder layer.  in_features: what its attention reads."""
    q_shape, k_shape = ((heads * config.head_dim, in_features) for heads in (config.num_heads, config.num_kv_heads))
    checkpoint.expect(f"{prefix}.self_attn.q_proj.weight", q_shape, "num_attention_heads, head_dim and hidden_size")
    checkpoint.expect(f"{prefix}.self_attn.k_proj.weight", k_shape, "num_key_value_heads, head_dim and hidden_size")
    mlp_shape = (config.intermediate_size, config.hidden_size)
    checkpoint.expect(f"{prefix}.mlp.gate_proj.weight", mlp_shape, "intermediate_size and hidden_size")


def fill_ends(model: CausalLM, checkpoint: Checkpoint) -> None:
    """All but the layers."""
    copy_(model.embed_tokens.weight, checkpoint, "model.embed_tokens.weight")
    copy_(model.norm.weight, checkpoint, "model.norm.weight")
    if not model.config.tie_embeddings:
        fill_linear(model.lm_head, checkpoint, "lm_head")
    elif "lm_head.weight" in checkpoint:
        head = checkpoint.take("lm_head.weight", tuple(model.embed_tokens.weight.shape))
        if not torch.equal(head, checkpoint.take("model.embed_tokens.weight")):
            raise ValueError(
                f"{checkpoint.folder}: config.json ties lm_head to the embeddings, but the checkpoint's own differs from them; "
                "expected tie_word_embeddings false"
            )
    checkpoint.ignore("rotary_emb.inv_freq")  # old exports wrote this buffer; it follows from the config


def copy_(target: Tensor, checkpoint: Checkpoint, name: str, arrange: Arrange | None = None) -> None:
    """Copies one tensor, in the target's dtype and onto its device, where `checkpoint.finish` refuses values not finite.

    arrange: brings its rows into our order.
    """
    copy_run(Stored(target, tuple(target.shape)), checkpoint, name, arrange)


def copy_run(stored: Stored, checkpoint: Checkpoint, name: str, arrange: Arrange | None = None) -> None:
    """Copies what this rank holds of one tensor.  See `copy_`."""
    whole = checkpoint.take(name, stored.shape)
    with torch.no_grad():
        stored.tensor.copy_(stored.run(whole if arrange is None else arrange(whole)))
    checkpoint.landed(name, stored.tensor)


def fill_linear(linear: Linear, checkpoint: Checkpoint, names: str | Mapping[str, str], arrange: Arrange | None = None) -> None:
    """Fills a matrix without parts from the tensors of that name, or parts from the tensors of each part's name.

    arrange: brings the rows of each part, of the weight and of the bias, into our order.
    """
    for part, name in ({ONLY: names} if isinstance(names, str) else names).items():
        for ending, stored in linear.tensors(part).items():
            copy_run(stored, checkpoint, f"{name}.{ending}", arrange)
        for ending in linear.unread:
            checkpoint.ignore(f"{name}.{ending}")


def fill_stack(stack: LinearStack, checkpoint: Checkpoint, prefix: str) -> None:
    """Fills matrices whose names are a number below the prefix, and then the name of a part."""
    for index in range(len(stack.weight_NOI)):
        for part in stack.parts.sizes:
            for ending, stored in stack.tensors(index, part).items():
                copy_run(stored, checkpoint, f"{prefix}.{index}.{part}.{ending}")


def fill_parts(linear: Linear, checkpoint: Checkpoint, prefix: str, arrange: Arrange | None = None) -> None:
    """Fills a matrix whose parts have the checkpoint's own names, below the prefix."""
    fill_linear(linear, checkpoint, {part: f"{prefix}.{part}" for part in linear.parts.sizes}, arrange)


def fill_layer(layer: nn.Module, checkpoint: Checkpoint, prefix: str, input_norm: str = "input_layernorm") -> None:
    """A decoder layer; an input norm that is no norm (EAGLE-1's first layer) has no tensor.  input_norm: what it is called."""
    assert isinstance(layer, DecoderLayer)
    if isinstance(layer.input_layernorm, RMSNorm):
        fill_norm(layer.input_layernorm, checkpoint, f"{prefix}.{input_norm}")
    fill_norm(layer.post_attention_layernorm, checkpoint, f"{prefix}.post_attention_layernorm")
    fill_attention(layer.self_attn, checkpoint, f"{prefix}.self_attn")
    fill_mlp(layer.mlp, checkpoint, f"{prefix}.mlp")


def fill_norm(norm: RMSNorm, checkpoint: Checkpoint, prefix: str) -> None:
    copy_(norm.weight, checkpoint, f"{prefix}.weight")


def fill_attention(attention: SelfAttention, checkpoint: Checkpoint, prefix: str, turned: Arrange | None = None) -> None:
    """Stacks the rows of q, k and v in one weight, repeats q/k norms for each head, and takes fp8 KV scales, if any.

    Attention that reads another layer's keys and values has queries only.
    turned: brings the rows of queries and keys into our order, which their rotation needs.
    """
    if not attention.shares_kv:
        keys, D = attention.qkv_proj.tensors("k_proj")["weight"], attention.head_dim
        first = keys.start // D
        own = slice(first, first + attention.num_kv_heads)
        attention.kv_scale_2K = take_kv_scale(checkpoint, prefix, keys.shape[0] // D, own)
    for part in attention.qkv_proj.parts.sizes:
        fill_linear(attention.qkv_proj, checkpoint, {part: f"{prefix}.{part}"}, None if part == "v_proj" else turned)
    fill_linear(attention.o_proj, checkpoint, f"{prefix}.o_proj")
    if attention.qk_norm is not None:
        weight, Q = attention.qk_norm.weight, attention.num_heads
        for letter, heads in (("q", weight[:Q]), ("k", weight[Q:])):
            if not len(heads):
                continue
            name = f"{prefix}.{letter}_norm.weight"
            norm_D = checkpoint.take(name, (attention.head_dim,))
            with torch.no_grad():
                heads.copy_((norm_D if turned is None else turned(norm_D)).expand_as(heads))
            checkpoint.landed(name, heads)


def fill_mlp(mlp: MLP, checkpoint: Checkpoint, prefix: str) -> None:
    fill_parts(mlp.gate_up_proj, checkpoint, prefix)
    fill_linear(mlp.down_proj, checkpoint, f"{prefix}.down_proj")
