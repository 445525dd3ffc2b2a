"""What Gemma 4's text models have of their own in checkpoints.  Knows names.

Shapes: E experts, H hidden size.
"""

from __future__ import annotations

from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import (
    Parts,
    copy_,
    fill_attention,
    fill_float32,
    fill_linear,
    fill_mlp,
    fill_norm,
    fill_stack,
)
from specdec.models.config import HeadSizes
from specdec.models.gemma4.config import GemmaConfig, parse_gemma4
from specdec.models.gemma4.modules import (
    GeluMLP,
    GemmaAttention,
    GemmaLM,
    GemmaMixture,
    LayerInput,
    LayerScale,
    ScaledRouter,
    gemma_layer,
)
from specdec.models.mixtures.fill import leave_others

_UNREAD = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight")  # of layers that share keys


def _expect(checkpoint: Checkpoint, config: GemmaConfig) -> None:
    """The sizes of the first layer of each kind."""
    H = config.hidden_size
    for kind in dict.fromkeys(config.layer_kinds):
        layer = config.layer_kinds.index(kind)
        prefix = "" if kind.window else "global_"
        _expect_heads(checkpoint, config.heads_of(layer), f"model.layers.{layer}.self_attn", H, prefix)
    gate = "intermediate_size, use_double_wide_mlp and hidden_size"
    for layer in {0, config.num_layers - 1}:
        checkpoint.expect_matrix(f"model.layers.{layer}.mlp.gate_proj", (config.mlp_width(layer), H), gate)
    if config.experts is not None:
        first, experts = "model.layers.0", config.experts
        checkpoint.expect(f"{first}.router.proj.weight", (experts.count, H), "num_experts and hidden_size")
        size = (experts.intermediate_size, H)
        checkpoint.expect_matrix(f"{first}.experts.0.gate_proj", size, "moe_intermediate_size and hidden_size")
    if config.input_size:
        inputs = config.num_layers * config.input_size
        said = "vocab_size, num_hidden_layers and hidden_size_per_layer_input"
        checkpoint.expect("model.embed_tokens_per_layer.weight", (config.vocab_size, inputs), said)


def _expect_heads(checkpoint: Checkpoint, heads: HeadSizes, attention: str, hidden: int, prefix: str) -> None:
    width, kv = f"{prefix}head_dim", f"num_{prefix}key_value_heads"
    q_shape, k_shape = (heads.num_heads * heads.head_dim, hidden), (heads.num_kv_heads * heads.head_dim, hidden)
    checkpoint.expect_matrix(f"{attention}.q_proj", q_shape, f"num_attention_heads, {width} and hidden_size")
    checkpoint.expect_matrix(f"{attention}.k_proj", k_shape, f"{kv}, {width} and hidden_size")


def _fill_attention(attention: GemmaAttention, checkpoint: Checkpoint, prefix: str) -> None:
    fill_attention(attention, checkpoint, prefix)
    if attention.shares_kv:
        for name in _UNREAD:
            checkpoint.ignore(f"{prefix}.{name}")


def _fill_mixture(moe: GemmaMixture, checkpoint: Checkpoint, prefix: str) -> None:
    """prefix: the layer's name and "experts".  The router reads x in units of its rms, times a vector and hidden_size ** -0.5:
    both are multiplied into its weight, in float32."""
    router, layer = moe.router, prefix.rpartition(".")[0]
    assert isinstance(router, ScaledRouter)
    weight_EH = fill_float32(router.weight, checkpoint, f"{layer}.router.proj.weight")
    scale_H = _read(checkpoint, f"{layer}.router.scale", weight_EH.new_empty(weight_EH.shape[1]))
    if checkpoint.has_data:
        weight_EH.mul_(scale_H * weight_EH.shape[1] ** -0.5)
    router.weight = weight_EH
    router.scale_E = fill_float32(router.scale_E, checkpoint, f"{layer}.router.per_expert_scale")
    for stack in (moe.gate_up_proj, moe.down_proj):
        fill_stack(stack, checkpoint, prefix)
    leave_others(moe, checkpoint, prefix)


def _read(checkpoint: Checkpoint, name: str, empty: Tensor) -> Tensor:
    kept: Tensor = fill_float32(empty, checkpoint, name)
    return kept


def _fill_scale(scale: LayerScale, checkpoint: Checkpoint, prefix: str) -> None:
    copy_(scale.weight, checkpoint, prefix)


def _fill_input(own: LayerInput, checkpoint: Checkpoint, prefix: str) -> None:
    layer = prefix.rpartition(".")[0]
    fill_linear(own.per_layer_input_gate, checkpoint, f"{layer}.per_layer_input_gate")
    fill_linear(own.per_layer_projection, checkpoint, f"{layer}.per_layer_projection")
    fill_norm(own.post_per_layer_input_norm, checkpoint, f"{layer}.post_per_layer_input_norm")


def _fill_more(model: GemmaLM, checkpoint: Checkpoint) -> None:
    if model.embed_tokens_per_layer is None:
        return
    assert model.per_layer_model_projection is not None and model.per_layer_projection_norm is not None
    copy_(model.embed_tokens_per_layer.weight, checkpoint, "model.embed_tokens_per_layer.weight")
    fill_linear(model.per_layer_model_projection, checkpoint, "model.per_layer_model_projection")
    fill_norm(model.per_layer_projection_norm, checkpoint, "model.per_layer_projection_norm")


PARTS: Parts = {
    GemmaAttention: _fill_attention,
    GeluMLP: fill_mlp,
    GemmaMixture: _fill_mixture,
    LayerScale: _fill_scale,
    LayerInput: _fill_input,
}
UNSAID = {
    "tie_word_embeddings": "true: the output layer is the embedding table",
    "global_head_dim": "512",
    "hidden_size_per_layer_input": "256",
    "head_dim": "256",
}
FAMILY = Family(parse_gemma4, gemma_layer, _expect, PARTS, UNSAID, model=GemmaLM, fill_more=_fill_more)
