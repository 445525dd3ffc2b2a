"""The config.json of Bamba, read strictly.  Knows no weights.

What a key that is absent means is what transformers' class means: it turns half of each head whatever a file says beside its
rope_parameters.
"""

from __future__ import annotations

from typing import Any

from specdec.attention.kinds import FULL, RECURRENT
from specdec.models.checkpoints.config_values import NotComputedHere, flag, number
from specdec.models.config import OutputNames
from specdec.models.keys.names import with_unsaid
from specdec.models.mamba.config import KEYS, MambaConfig, read_mamba
from specdec.models.mixtures.keys import layer_numbers, only, read_decoder

ATTENTION = "attn_layer_indices"
_KEYS = f"{KEYS} {ATTENTION} attention_bias mlp_bias num_logits_to_keep z_loss_coefficient"
_DECODER = {"hidden_size": 4096, "vocab_size": 128000, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "num_hidden_layers": 32}  # fmt: skip


def parse_bamba(raw: dict[str, Any], where: str) -> MambaConfig:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    only(raw, where, partial_rotary_factor=0.5)
    number(raw, "z_loss_coefficient", where, 0.0, or_zero=True)  # of training alone
    said = with_unsaid(raw, _DECODER)
    base = read_decoder(said, where, _KEYS, eps=1e-5, positions=262144, rotated=0.5)
    recurrent, biases = read_mamba(said, where)
    attention, biased = layer_numbers(raw, ATTENTION, base.num_layers, where), flag(raw, "attention_bias", where)
    if not attention:
        raise NotComputedHere(
            f"{where}: some layers must be of attention, by {ATTENTION}, which says none (as if it is absent)"
        )
    kinds = tuple(FULL if layer in attention else RECURRENT for layer in range(base.num_layers))
    own = {
        **biases, "out_bias": biases["in_bias"], "qkv_bias": biased, "o_bias": biased,
        "mlp_bias": flag(raw, "mlp_bias", where), "recurrent": recurrent, "layer_kinds": kinds,
        "output_names": OutputNames(mlp="feed_forward.down_proj", recurrent="mamba.out_proj"),
    }  # fmt: skip
    return MambaConfig(**{**vars(base), **own})
