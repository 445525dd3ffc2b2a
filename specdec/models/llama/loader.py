"""How targets of the Llama family lie in checkpoints.  All of it is what families have in common (checkpoints/loader.py)."""

from __future__ import annotations

from specdec.models.causal_lm import decoder_layer
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import LLAMA_PARTS, expect_attention
from specdec.models.config import ModelConfig
from specdec.models.llama.config import parse_llama

UNSAID = {
    "num_key_value_heads": "as many as num_attention_heads",
    "tie_word_embeddings": "false: the output layer is a matrix of its own",
    "max_position_embeddings": "2048",
    "rms_norm_eps": "1e-6",
}


def expect_llama(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer, by the headers."""
    expect_attention(checkpoint, config)
    mlp_shape = (config.intermediate_size, config.hidden_size)
    checkpoint.expect_matrix("model.layers.0.mlp.gate_proj", mlp_shape, "intermediate_size and hidden_size")


FAMILY = Family(parse_llama, decoder_layer, expect_llama, LLAMA_PARTS, UNSAID)
