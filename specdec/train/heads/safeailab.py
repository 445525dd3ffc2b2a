"""The layout of SafeAILab's EAGLE-3 heads: the config and the tensors of a head that is saved in it.

This file knows names of tensors and keys.  It knows no training and no files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.draft.formats.parts import Part
from specdec.draft.formats.reading import PartNames
from specdec.draft.head import DraftHead
from specdec.models.config import RopeConfig
from specdec.models.yarn import YarnRope


def config_of(head: DraftHead) -> dict[str, Any]:
    """config.json.  head: with a draft vocabulary."""
    model = head.config.model
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab_size, "draft_vocab_size": head.config.draft_vocab_size, "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position, **rope_keys(model.rope), "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(head.config.aux_layers), "use_aux_hidden_state": True,
            "norm_before_residual": False, "norm_output": False,
        },
    }  # fmt: skip


def parts_of(head: DraftHead) -> list[Part]:
    """What the layout holds of a head, beside the map of its vocabulary."""
    return [*head.parts(PartNames("midlayer")), ("lm_head", head.lm_head)]


def vocabulary_map(head: DraftHead) -> dict[str, Tensor]:
    """d2t and t2d."""
    assert head.d2t_V is not None
    ids_V = head.d2t_V + torch.arange(len(head.d2t_V), dtype=torch.int64, device=head.d2t_V.device)
    t2d = torch.zeros(head.config.model.vocab_size, dtype=torch.bool, device=ids_V.device).index_fill_(0, ids_V, True)
    return {"d2t": head.d2t_V, "t2d": t2d}


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """The rotary settings by the names of transformers 4, which all readers of heads know."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if isinstance(rope, YarnRope):
        scaling |= {
            "original_max_position_embeddings": rope.original_max_position, "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow, "attention_factor": rope.amplitude, "truncate": rope.truncate,
        }  # fmt: skip
        factors = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        scaling |= {name: value for name, value in factors.items() if value}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }  # fmt: skip
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
