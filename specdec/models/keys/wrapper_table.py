"""Which wrappers of texts and images are known, by model_type: a line each.  What becomes of them stands in `wrappers.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

Tensor = TypeVar("Tensor")


class TextType(NamedTuple):
    """What a text model within a wrapper is.

    family: the model_type that computes the same.
    unsaid: what keys that are absent mean, where its class means something else than the family; a function of the config, too.
    fixed: what its class computes whatever these keys say; another value is an error.
    """

    family: str
    unsaid: Mapping[str, Any | Callable[[dict[str, Any]], Any]] = {}
    fixed: Mapping[str, Any] = {}


class Wrapper(NamedTuple):
    """texts: by the model_type of the config inside, what it is; empty: any target may lie inside.
    passed_over: how the names of all tensors begin that no text needs.
    names: what names in files begin with, and what that becomes; the first that fits counts, and other names stay.
    flat: whether older configs have the text model's keys at their top.
    scales_logits: whether its class scales and caps logits as the text model alone does; most pass such keys over.
    """

    texts: Mapping[str, TextType]
    passed_over: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    flat: bool = False
    scales_logits: bool = False

    def own(self, name: str) -> str:
        """What a name in a file is in the text model alone."""
        found = next(((begin, own) for begin, own in self.names if name.startswith(begin)), None)
        return name if found is None else f"{found[1]}{name.removeprefix(found[0])}"

    @property
    def matrix_names(self) -> tuple[tuple[str, str], ...]:
        """As `names`, with those that stay: how rules about matrices may call them."""
        return (*self.names, ("lm_head", "lm_head"))

    def split(self, stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The text model's tensors by their names there, and by their own names those that are passed over."""
        over = {name: tensor for name, tensor in stored.items() if name.startswith(self.passed_over)}
        files: dict[str, str] = {}
        for name in stored.keys() - over.keys():
            if (other := files.setdefault(self.own(name), name)) != name:
                twice, once = sorted((name, other), key=len, reverse=True)
                raise ValueError(f"tensors {twice!r} and {once!r} are one in the text model; expected each once")
        return {own: stored[name] for own, name in files.items()}, over


# How names of text models' tensors begin in files: as transformers 5 calls its modules, and as most files have them.
_NESTED = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.lm_head", "lm_head"))
_BARE = (*_NESTED, ("model.", "model."))
_TEXT_MODEL = (("model.text_model.", "model."),)
_VISUAL = ("model.visual.", "visual.")
_TOWER = ("model.vision_tower.", "vision_tower.", "model.multi_modal_projector.", "multi_modal_projector.")
_NEWLINE = (*_TOWER, "model.image_newline", "image_newline")
_CONNECTOR = ("model.vision_model.", "model.connector.")
_ANY: dict[str, TextType] = {}
# Of wrappers alone: which tokens stand for images, and how images become tokens.
OF_IMAGES = frozenset(
    "_pad_token_id adapter_layer_norm_eps alignment_intermediate_size audio_config audio_token_id boa_token_id boi_token_id "
    "boi_token_index downsample_factor downsample_ratio eoa_token_id eoa_token_index eoi_token_id eoi_token_index "
    "ignore_index image_end_token_id image_grid_pinpoints image_seq_length image_size image_start_token_id image_token_id "
    "image_token_index media_placeholder_token_id mm_tokens_per_image multimodal_projector_bias perceiver_config "
    "projection_hidden_size projection_layer_norm_eps projector_bias projector_hidden_act projector_hidden_size "
    "projector_layernorm_eps projector_use_layernorm scale_factor spatial_merge_size spatial_pool_mode spatial_pool_stride "
    "use_image_newline_parameter use_unified_vision_chunk video_end_token_id video_placeholder video_seq_length "
    "video_start_token_id video_token_id video_token_index vision_aspect_ratio vision_config vision_end_token_id "
    "vision_feature_layer vision_feature_select_strategy vision_soft_tokens_per_image vision_start_token_id "
    "vision_token_id visual_indicator_token_ids".split()
)


def _as_they_are(*names: str) -> dict[str, TextType]:
    """Text models that have a family of their own."""
    return {name: TextType(name) for name in names}


def _head_dim(config: dict[str, Any]) -> Any:
    """Of classes that read no head_dim."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


_QWEN2_VL = TextType(
    "qwen2",
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_window_layers": 80,
    },
)
_QWEN3_VL = TextType(
    "qwen3", {"num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 5e5}, {"use_sliding_window": False}
)
_QWEN3_VL_MOE = TextType(
    "qwen3_moe",
    {"num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e5, "head_dim": _head_dim},
    {"norm_topk_prob": True, "use_sliding_window": False},
)
_GLM4V = TextType(
    "glm4",
    {"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
     "head_dim": _head_dim},
    {"attention_bias": True},
)  # fmt: skip
_GLM4V_MOE = TextType(
    "glm4_moe",
    {"num_key_value_heads": 8, "max_position_embeddings": 65536, "attention_bias": True, "head_dim": _head_dim,
     "first_k_dense_replace": 1},
    {"use_qk_norm": False},
)  # fmt: skip
_GLM4VS = {"glm4v_text": _GLM4V, "glm4v_moe_text": _GLM4V_MOE}
_KIMI = ("vision_tower.", "model.vision_tower.", "mm_projector.", "model.mm_projector.")
_GEMMA4 = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")

WRAPPERS = {
    "qwen2_vl": Wrapper({"qwen2_vl_text": _QWEN2_VL}, _VISUAL, _BARE, flat=True),
    "qwen2_5_vl": Wrapper({"qwen2_5_vl_text": _QWEN2_VL}, _VISUAL, _BARE, flat=True),
    "qwen3_vl": Wrapper({"qwen3_vl_text": _QWEN3_VL}, _VISUAL, _NESTED),
    "qwen3_vl_moe": Wrapper({"qwen3_vl_moe_text": _QWEN3_VL_MOE}, _VISUAL, _NESTED),
    "qwen3_5": Wrapper(_as_they_are("qwen3_5_text"), _VISUAL, _NESTED),
    "qwen3_5_moe": Wrapper(_as_they_are("qwen3_5_moe_text"), _VISUAL, _NESTED),
    "gemma3": Wrapper(_as_they_are("gemma3_text"), _TOWER, _NESTED),
    "gemma4": Wrapper(_as_they_are("gemma4_text"), _GEMMA4, _NESTED, scales_logits=True),
    "glm4v": Wrapper(_GLM4VS, _VISUAL, _NESTED),
    "glm4v_moe": Wrapper(_GLM4VS, _VISUAL, _NESTED),
    "glm46v": Wrapper(_GLM4VS, _VISUAL, _NESTED),
    # transformers 5.23 saves layers as blocks, for which it takes the vision tower's.
    "kimi_k25": Wrapper(
        {name: TextType("deepseek_v3") for name in ("deepseek_v3", "kimi_k2")},
        _KIMI,
        (("language_model.model.blocks.", "model.layers."), *_NESTED),
    ),
    "llama4": Wrapper(_as_they_are("llama4_text"), (*_TOWER, "vision_model.", "model.vision_model."), _NESTED),
    "mistral3": Wrapper(_ANY, _TOWER, _NESTED),
    "internvl": Wrapper(_ANY, _TOWER, _NESTED),
    "llava": Wrapper(_ANY, _TOWER, _NESTED),
    "llava_next": Wrapper(_ANY, _NEWLINE, _NESTED),
    "llava_next_video": Wrapper(_ANY, _NEWLINE, _NESTED),
    "llava_onevision": Wrapper(_ANY, _NEWLINE, _NESTED),
    "vipllava": Wrapper(_ANY, _TOWER, _NESTED),
    "got_ocr2": Wrapper(_ANY, _TOWER, _NESTED),
    "lfm2_vl": Wrapper(_ANY, _TOWER, _NESTED),
    "lighton_ocr": Wrapper(_ANY, ("model.vision_encoder.", "model.vision_projection."), _NESTED),
    "video_llama_3": Wrapper(_ANY, ("model.vision_model.", "model.projector."), _NESTED),
    "exaone4_5": Wrapper(_ANY, _VISUAL, _NESTED),
    "idefics3": Wrapper(_ANY, _CONNECTOR, _TEXT_MODEL),
    "smolvlm": Wrapper(_ANY, _CONNECTOR, _TEXT_MODEL),
}
# What text models alone do to their logits, and the values that do nothing; and families whose class does so unsaid.
SCALES = {
    "final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1, "logits_divisor": 1, "lm_head_multiplier": 1,
    "output_multiplier": 1,
}  # fmt: skip
SCALED = ("cohere", "cohere2", "cohere2_moe", "gemma2")
# Why others are not: their text model is no target that stands alone.
LEFT = {
    "paligemma": "its attention over a prompt looks ahead",
    "mllama": "its text model has layers of cross-attention",
    "ernie4_5_vl_moe": "its text model has a mixture for images beside that for texts",
    "aya_vision": "its logits are not the text model's, whose logit_scale it passes over",
    "cohere2_vision": "its logits are not the text model's, whose logit_scale it passes over",
    "gemma3n": "its embeddings of each layer were not tried within it",
}
