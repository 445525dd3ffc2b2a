"""Tiny random BLOOM, MPT and Falcon targets, heads for them, and what transformers itself makes of them, in float32."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.bloom import modeling_bloom
from transformers.models.mpt import modeling_mpt

from toolkit.models import HEADS, scaled

COMMON = dict(vocab_size=40, bos_token_id=0, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
RW = dict(alibi=True, bias=True, multi_query=False, parallel_attn=False)
# name: (model_type, heads, head dim, what differs).  No count of heads but 8 is a power of two.
FAMILIES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "bloom": ("bloom", 5, 16, {}),
    "bloom-tied": ("bloom", 12, 8, dict(apply_residual_connection_post_layernorm=True, tie_word_embeddings=True)),
    "mpt": ("mpt", 6, 16, {}),
    "mpt-storywriter": ("mpt", 12, 8, dict(attn_config=dict(alibi_bias_max=16, clip_qkv=1.5, softmax_scale=0.5))),
    "falcon-rw": ("falcon", 8, 16, RW),
    "falcon-rw-odd": ("falcon", 12, 8, dict(RW, bias=False, parallel_attn=True)),
    "falcon-alibi-grouped": ("falcon", 6, 8, dict(alibi=True, new_decoder_architecture=True, num_kv_heads=2)),
    "falcon-7b": ("falcon", 5, 16, {}),
    "falcon-40b": ("falcon", 6, 16, dict(new_decoder_architecture=True, num_kv_heads=2)),
}


def save(folder: Path, name: str, layers: int = 3, **changes: Any) -> Path:
    """A random model of that family, as transformers saves it.  changes: keys of its config."""
    model_type, heads, head_dim, own = FAMILIES[name]
    sizes = dict(hidden_size=heads * head_dim, num_attention_heads=heads, num_hidden_layers=layers)
    make = CONFIG_MAPPING[model_type]
    named = {make().attribute_map.get(key, key): size for key, size in sizes.items()}
    config = make(**{**COMMON, **own, **changes}, **named)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(list(FAMILIES).index(name))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(_weight(key, torch.randn(weight.shape, generator=generator)))
    model.save_pretrained(folder)
    return folder


def _weight(name: str, noise: Tensor) -> Tensor:
    if any(norm in name for norm in ("norm", "ln_")) and name.endswith("weight"):
        return 1 + 0.2 * noise
    named_alike = name.replace("query_key_value", "q_proj").replace("Wqkv", "q_proj").replace("wte", "embed")
    return scaled(named_alike.replace("norm", ""), noise)


def save_head(folder: Path, target: Path, kind: str) -> Path:
    """A random draft head; the target's sizes are read under transformers' common names."""
    config = CONFIG_MAPPING[json.loads((target / "config.json").read_text())["model_type"]].from_pretrained(target)
    sizes = {key: getattr(config, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")}
    names = folder.with_name(f"{folder.name}-names")
    names.mkdir()
    (names / "config.json").write_text(json.dumps(sizes | {"num_key_value_heads": sizes["num_attention_heads"]}))
    return HEADS[kind](folder, names)


def oracle(folder: Path, exchanged: int = 0) -> PreTrainedModel:
    """transformers' model, whose attention is the family's default one.

    MPT's takes alibi_bias_max from the config, which transformers does not do, although MosaicML's own code does.
    exchanged: by how many heads BLOOM's and MPT's slopes are moved on, a planted fault; BLOOM needs an attention_mask then.
    """
    falcon = json.loads((folder / "config.json").read_text())["model_type"] == "falcon"
    # Falcon's eager attention adds the biases twice in transformers 5.23; its default does not.
    how = "sdpa" if falcon else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=how).eval()

    def of_mpt(heads: int, tokens: int, device: Any = None) -> Tensor:
        biases_H1X = modeling_mpt.build_mpt_alibi_tensor(heads, tokens, model.config.attn_config.alibi_bias_max, device)
        return biases_H1X.roll(exchanged, 0)

    def of_bloom(*args: Any, **kwargs: Any) -> Tensor:
        return modeling_bloom.build_alibi_tensor(*args, **kwargs).roll(exchanged, 0)

    if model.config.model_type == "mpt":
        model.transformer.build_mpt_alibi_tensor = of_mpt
    elif model.config.model_type == "bloom":
        model.transformer.build_alibi_tensor = of_bloom
    return model
