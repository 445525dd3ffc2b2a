"""The config.json of Falcon-H1, read strictly.

Every layer keeps keys and a state.  What a key that is absent means is what transformers' class means.  This module knows no
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.attention.kinds import LayerKind
from specdec.models.checkpoints.config_values import flag, number, whole
from specdec.models.config import OutputNames
from specdec.models.keys.names import with_unsaid
from specdec.models.mamba.config import KEYS, MambaConfig, read_mamba
from specdec.models.mixtures.keys import only, read_decoder
from specdec.ops.recurrent.gates.gated_norm import FALCON, FALCON_GATE_FIRST

_MULTIPLIERS = (
    "attention_in_multiplier attention_out_multiplier embedding_multiplier key_multiplier lm_head_multiplier ssm_in_multiplier "
    "ssm_out_multiplier"
)
_KEYS = (
    f"{KEYS} {_MULTIPLIERS} attention_bias attn_layer_indices intermediate_size mamba_d_ssm mamba_norm_before_gate "
    "mamba_rms_norm mamba_use_mlp mlp_bias mlp_multipliers num_logits_to_keep projectors_bias ssm_multipliers"
)
_DECODER = {"hidden_size": 4096, "vocab_size": 128000, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "num_hidden_layers": 32}  # fmt: skip
BOTH = LayerKind(recurrent=True)


@dataclass(frozen=True)
class Multipliers:
    """What a layer multiplies: inputs and outputs of attention and of Mamba-2; keys; gates and outputs of the MLP.

    projected: of Mamba-2's z, x, B, C, dt.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    projected: tuple[float, ...] = (1.0,) * 5


@dataclass(frozen=True)
class FalconConfig(MambaConfig):
    multipliers: Multipliers = field(default_factory=Multipliers)


def parse_falcon_h1(raw: dict[str, Any], where: str) -> FalconConfig:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    only(raw, where, attn_layer_indices=None, mamba_use_mlp=True)
    said = with_unsaid(raw, _DECODER)
    base = read_decoder(said, where, _KEYS, eps=1e-5, positions=8192)
    outputs = None if "mamba_d_ssm" in raw and raw["mamba_d_ssm"] is None else whole(raw, "mamba_d_ssm", where, 1024)
    recurrent, biases = read_mamba(said, where, outputs)
    form = FALCON if flag(raw, "mamba_norm_before_gate", where, True) else FALCON_GATE_FIRST
    biased = flag(raw, "attention_bias", where)
    by_key = {key: number(said, key, where, 1.0) for key in _MULTIPLIERS.split()}
    gate, down = _several(raw, "mlp_multipliers", 2, where)
    times = Multipliers(
        by_key["attention_in_multiplier"], by_key["attention_out_multiplier"], by_key["key_multiplier"],
        by_key["ssm_in_multiplier"], by_key["ssm_out_multiplier"], gate, down, _several(raw, "ssm_multipliers", 5, where),
    )  # fmt: skip
    own = {
        **biases, "out_bias": flag(raw, "projectors_bias", where), "qkv_bias": biased, "o_bias": biased,
        "mlp_bias": flag(raw, "mlp_bias", where), "embedding_multiplier": by_key["embedding_multiplier"],
        "logits_multiplier": by_key["lm_head_multiplier"], "multipliers": times, "recurrent": recurrent,
        "layer_kinds": (BOTH,) * base.num_layers,
        "output_names": OutputNames(mlp="feed_forward.down_proj", recurrent="mamba.out_proj"),
        "gated_norm": form if flag(raw, "mamba_rms_norm", where) else None,
    }  # fmt: skip
    return FalconConfig(**{**vars(base), **own})


def _several(raw: dict[str, Any], key: str, count: int, where: str) -> tuple[float, ...]:
    """So many numbers above 0; ones where the key is absent."""
    values = [1.0] * count if raw.get(key) is None else raw[key]
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{where}: {key} must be null or a list of {count} numbers, got {values!r}"[:500])
    return tuple(number({key: value}, key, where) for value in values)
