"""Tiny random hybrid targets, written to disk by transformers itself: recurrent layers beside ordinary attention.

Value heads are more than key heads, values are wider than keys, a quarter of a head is turned, and weights make every part
matter: zero-centred norms lie off 0, gates off one half.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from toolkit.models import MORE_TARGETS, scaled

COMMON: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
    max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, pad_token_id=None,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
)  # fmt: skip
DENSE: dict[str, Any] = dict(intermediate_size=48)
VISION: dict[str, Any] = dict(
    depth=1, hidden_size=8, intermediate_size=8, num_heads=2, patch_size=2, out_hidden_size=32, num_position_embeddings=4,
)  # fmt: skip
MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# Names of families, not of model types: (config class, class of the model, what differs from COMMON, the wrapper's config)
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, DENSE | EXPERTS | dict(mlp_only_layers=[1]), None),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, DENSE, None),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, EXPERTS, None),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForConditionalGeneration, DENSE, Qwen3_5Config),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForConditionalGeneration, EXPERTS, Qwen3_5MoeConfig),
}
SEEDS = {family: seed for seed, family in enumerate(FAMILIES)}  # where a family's gives near-ties, another


def tiny_hybrid(folder: Path, family: str, seed: int | None = None, **changes: Any) -> Path:
    """The folder with a random model of that family, as transformers saves it.  changes: of the text model's config."""
    hybrid_model(family, seed, **changes).save_pretrained(folder)
    return folder


WIDE: dict[str, Any] = dict(linear_key_head_dim=16, linear_value_head_dim=32)  # the least that kernels take
# With these, best logits lie 0.0097 above second ones in texts.PROMPTS and 24 tokens after each, experts 0.0003 above others.
WIDE_SEEDS = {"qwen3_next": 19, "qwen3_5_text": 7, "qwen3_5_moe_text": 19}
MORE_TARGETS |= {family: partial(tiny_hybrid, family=family) for family in FAMILIES}
MORE_TARGETS |= {
    f"{family} wide": partial(tiny_hybrid, family=family, seed=seed, **WIDE) for family, seed in WIDE_SEEDS.items()
}


def hybrid_model(family: str, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """The random model itself, in float32."""
    config_class, model_class, own, wrapper = FAMILIES[family]
    config = config_class(**{**COMMON, **own, **changes})
    if wrapper is not None:
        said = config.to_dict()
        config = wrapper(text_config=said, vision_config=VISION, tie_word_embeddings=said["tie_word_embeddings"],
                         image_token_id=30, video_token_id=31, vision_start_token_id=32, vision_end_token_id=33)  # fmt: skip
    model: PreTrainedModel = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(SEEDS[family] if seed is None else seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weight_of(name, torch.randn(weight.shape, generator=generator)))
    return model


def weight_of(name: str, noise: Tensor) -> Tensor:
    """Noise made into a weight of that name."""
    if name.endswith("A_log"):  # decays of a token from none to almost all
        return noise.clamp(-2, 1)
    if name.endswith("conv1d.weight"):
        return noise / 2
    if "norm" in name and not name.endswith("linear_attn.norm.weight"):  # zero-centred, but for the gated one
        return 0.2 * noise
    return scaled(name, noise)


def with_mtp(folder: Path, family: str, seed: int = 11, **changes: Any) -> Path:
    """Adds an MTP layer to a target that `tiny_hybrid` saved: a decoder layer of the family, a join, three norms."""
    text = family if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") else f"{family}_text"
    one = {**changes, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    with TemporaryDirectory() as place:
        hybrid_model(text, seed, **one, **({"mlp_only_layers": []} if family == "qwen3_next" else {})).save_pretrained(place)
        layer = load_file(Path(place) / "model.safetensors")
    own = {name.replace("model.", "mtp.", 1): x for name, x in layer.items() if name.startswith("model.layers.")}
    H, generator = layer["model.norm.weight"].numel(), torch.Generator().manual_seed(seed)
    shapes = {"mtp.fc.weight": (H, 2 * H), **{f"mtp.{name}.weight": (H,) for name in MTP_NORMS}}
    own |= {name: weight_of(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    if family != "qwen3_next":  # whose files don't say it
        raw.get("text_config", raw)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
