"""How LFM2 and LFM2-MoE lie in checkpoints, whose names of almost everything are the family's own.

Shapes: C channels of a rank's share of the convolution.
"""

from __future__ import annotations

from functools import partial

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Names, Parts, copy_run, fill_attention, fill_linear, fill_mlp
from specdec.models.layers import MLP, SelfAttention
from specdec.models.lfm2.config import CONVOLUTION, Lfm2Config, parse_lfm2
from specdec.models.lfm2.modules import ShortConvolution, lfm2_layer
from specdec.models.linear import Stored
from specdec.models.mixtures.families.mixtral import PARTS as WORDS
from specdec.models.mixtures.fill import MixtureNames, expect_mixture, fill_mixture
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.recurrent.fill import by_ranks, expect_kinds, fill_taps

NORMS: Names = {
    "input_layernorm": ("operator_norm",), "post_attention_layernorm": ("ffn_norm",), "norm": ("embedding_norm",),
}  # fmt: skip
HEADS = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
MIXTURES = MixtureNames(
    "feed_forward.gate.weight", "feed_forward.expert_bias", experts="feed_forward.experts", parts=WORDS,
    count_keys="num_experts and hidden_size", layer_keys="num_dense_layers", dense="feed_forward.w1",
)  # fmt: skip
UNSAID = {
    "tie_word_embeddings": "true: the output layer's matrix is the embeddings",
    "max_position_embeddings": "128000",
    "conv_L_cache": "3",
}


def _fill_attention(attention: SelfAttention, checkpoint: Checkpoint, prefix: str) -> None:
    fill_attention(attention, checkpoint, prefix, called=HEADS)


def _fill_convolution(mixer: ShortConvolution, checkpoint: Checkpoint, prefix: str) -> None:
    """in_proj's rows are all of B, all of C, all of x.  prefix: the layer's name and that of the module."""
    prefix, (_, C), shard = f"{prefix.rpartition('.')[0]}.conv", mixer.conv_ZC.shape, mixer.shard
    whole = C * shard.size
    kinds = partial(by_ranks, sizes=(whole,) * 3, ranks=shard.size)
    fill_linear(mixer.in_proj, checkpoint, {"in_proj": f"{prefix}.in_proj"}, kinds)
    fill_linear(mixer.out_proj, checkpoint, f"{prefix}.out_proj")
    fill_taps(mixer.conv_ZC, checkpoint, f"{prefix}.conv.weight", shard)
    if mixer.bias_C is not None:
        copy_run(Stored(mixer.bias_C.detach(), (whole,), start=C * shard.rank), checkpoint, f"{prefix}.conv.bias")


def _fill_mlp(mlp: MLP, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mlp(mlp, checkpoint, f"{prefix.rpartition('.')[0]}.feed_forward", WORDS)


def _fill_mixture(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mixture(moe, checkpoint, prefix, MIXTURES)


def _expect(checkpoint: Checkpoint, config: Lfm2Config) -> None:
    """ValueError if a config's sizes are not those of the first layer of each kind, by the headers."""
    H, D, sizes, recurrent = config.hidden_size, config.head_dim, config.recurrent, config.recurrent_layers
    assert sizes is not None
    marks = "self_attn.q_layernorm.weight", "conv.conv.weight"
    expect_kinds(checkpoint, config, marks, ("full_attention", CONVOLUTION), "layer_types (or full_attn_idxs)")
    attention = f"model.layers.{min(set(range(config.num_layers)) - set(recurrent))}.self_attn"
    checkpoint.expect_matrix(f"{attention}.q_proj", (config.num_heads * D, H), "num_attention_heads, head_dim, hidden_size")
    checkpoint.expect_matrix(f"{attention}.k_proj", (config.num_kv_heads * D, H), "num_key_value_heads, head_dim, hidden_size")
    mixer = f"model.layers.{recurrent[0]}.conv"
    checkpoint.expect_matrix(f"{mixer}.in_proj", (3 * H, H), "hidden_size")
    checkpoint.expect(f"{mixer}.conv.weight", (H, 1, sizes.taps), "hidden_size and conv_L_cache")
    expect_mixture(checkpoint, config, MIXTURES)


PARTS: Parts = {
    SelfAttention: _fill_attention, ShortConvolution: _fill_convolution, MLP: _fill_mlp, MixtureOfExperts: _fill_mixture,
}  # fmt: skip
FAMILY = Family(parse_lfm2, lfm2_layer, _expect, PARTS, UNSAID, NORMS)
