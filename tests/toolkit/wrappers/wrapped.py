"""Tiny random wrappers of texts and images, written to disk by transformers' own classes, and what they say of texts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from specdec.attention.eager.dense import DenseAttention
from specdec.models.registry import choose_target, load_chosen
from toolkit.models import scaled

TEXT: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
TWO_HEADS: dict[str, Any] = dict(num_attention_heads=2, num_key_value_heads=1)
WIDTH: dict[str, Any] = dict(head_dim=16)
MIXTURE: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=24)
GLM_MIXTURE = MIXTURE | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1)
LATENT: dict[str, Any] = dict(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=12, num_key_value_heads=4,
    n_group=1, topk_group=1, num_nextn_predict_layers=0, **GLM_MIXTURE,
)  # fmt: skip
WINDOWS: dict[str, Any] = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8)
VISION: dict[str, Any] = dict(
    depth=1, num_hidden_layers=1, hidden_size=32, intermediate_size=16, num_heads=2, num_attention_heads=2, out_hidden_size=32,
    embed_dim=32, image_size=28, patch_size=14, mlp_ratio=2,
)  # fmt: skip


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


# By model_type: the config inside, where it is not the class's usual one its model_type too, and what differs of the wrapper.
WRAPPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (mrope(1, 1, 2), {}),
    "qwen2_5_vl": (mrope(1, 1, 2) | dict(use_sliding_window=True, sliding_window=8, max_window_layers=2), {}),
    "qwen3_vl": (WIDTH | mrope(4, 2, 2, mrope_interleaved=True), {"tie_word_embeddings": True}),
    "qwen3_vl_moe": (WIDTH | MIXTURE | mrope(4, 2, 2, mrope_interleaved=True) | dict(num_local_experts=4, num_experts=4), {}),
    "gemma3": (WIDTH | WINDOWS | dict(query_pre_attn_scalar=10), {}),
    "gemma4": (
        WIDTH | dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=3,
                     sliding_window=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=40, global_head_dim=16,
                     attention_k_eq_v=True, use_double_wide_mlp=True, pad_token_id=0, final_logit_softcapping=9.0), {},
    ),
    "glm4v": (TWO_HEADS | mrope(1, 1, 2, partial_rotary_factor=0.5), {}),
    "glm4v_moe": (GLM_MIXTURE | TWO_HEADS | mrope(1, 1, 2, partial_rotary_factor=0.5), {}),
    "glm46v": (GLM_MIXTURE | TWO_HEADS | mrope(1, 1, 2, partial_rotary_factor=0.5) | dict(model_type="glm4v_moe_text"), {}),
    "kimi_k25": (LATENT, {"tie_word_embeddings": False}),
    "llama4": (
        WIDTH | dict(attention_chunk_size=16, no_rope_layer_interval=2, interleave_moe_layer_step=2, num_local_experts=2,
                     intermediate_size_mlp=40, floor_scale=4, attn_scale=0.5), {},
    ),
    "mistral3": (WIDTH | dict(model_type="mistral", sliding_window=8), {}),
    "internvl": (dict(model_type="qwen2"), {}),
    "llava": (WIDTH | dict(model_type="llama"), {}),
    "llava_next": (WIDTH | dict(model_type="mistral"), {}),
    "llava_next_video": (WIDTH | dict(model_type="llama"), {}),
    "llava_onevision": (dict(model_type="qwen2"), {}),
    "vipllava": (WIDTH | dict(model_type="llama"), {}),
    "got_ocr2": (dict(model_type="qwen2"), {}),
    "lfm2_vl": (dict(model_type="lfm2", layer_types=["conv", "full_attention"] * 2), {}),
    "lighton_ocr": (WIDTH | dict(model_type="qwen3"), {}),
    "video_llama_3": (dict(model_type="qwen2"), {}),
    "exaone4_5": (WIDTH | WINDOWS | dict(model_type="exaone4"), {}),
    "idefics3": (WIDTH | dict(model_type="llama"), {}),
    "smolvlm": (WIDTH | dict(model_type="llama"), {}),
}  # fmt: skip


def wrapped_model(name: str, seed: int = 0, text: dict[str, Any] | None = None, **more: Any) -> PreTrainedModel:
    """The random wrapper itself, in float32.  text, more: what differs of the config inside, and of the wrapper's."""
    own, around = WRAPPED[name]
    usual = CONFIG_MAPPING[name]()
    inside = {**TEXT, "model_type": usual.text_config.model_type, **own, **(text or {})}
    seeing = usual.vision_config or CONFIG_MAPPING[f"{name}_vision"]()
    known = seeing.to_dict()
    vision = {"model_type": seeing.model_type, **{key: value for key, value in VISION.items() if key in known}}
    config = CONFIG_MAPPING[name](text_config=inside, vision_config=vision, **{**around, **more})
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each, weight in model.named_parameters():
            weight.copy_(scaled(each, torch.randn(weight.shape, generator=generator)))
    model.tie_weights()
    return model


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What the wrapper itself says of texts without images.  ids: [rows, tokens]."""
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits


@torch.inference_mode()
def our_logits(folder: Path, ids_T: Tensor) -> Tensor:
    """What specdec makes of the folder."""
    model = load_chosen(choose_target(folder), folder, 64, torch.device("cpu"), torch.float32, cuda_graphs=False)
    attention = DenseAttention(model.config.layer_kinds, kv_layers=model.config.kv_source)
    return model.logits(model(ids_T, torch.arange(len(ids_T)), attention).hidden_TH)
