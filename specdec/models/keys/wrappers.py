"""Wrappers of texts and images: a text model's config inside another, and its tensors below another name.

Only the text model is computed.  Its config comes out of the wrapper as if it had stood there alone; the vision tower's tensors
are known by how their names begin, and passed over.  This file knows no weights and nothing of images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from specdec.models.checkpoints.config_values import NotComputedHere, flag, mapping, text

Tensor = TypeVar("Tensor")


class Wrapper(NamedTuple):
    """text_type: the model_type of the config inside.  inside: what names of the text model's tensors begin with in files, in
    place of "model.".  passed_over: how the names of all tensors begin that no text needs.
    """

    text_type: str
    inside: str = "model.language_model."
    passed_over: tuple[str, ...] = ("model.visual.",)

    def split(self, stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The text model's tensors by their names there, and by their own names those that are passed over."""
        over = {name: tensor for name, tensor in stored.items() if name.startswith(self.passed_over)}
        own = {name: f"{OWN}{name.removeprefix(self.inside)}" if name.startswith(self.inside) else name for name in stored}
        text = {own[name]: tensor for name, tensor in stored.items() if name not in over}
        if len(text) + len(over) < len(stored):
            twice = next(name for name, ours in own.items() if ours != name and ours in stored)
            raise ValueError(f"tensors {twice!r} and {own[twice]!r} are one in the text model; expected each once")
        return text, over


OWN = "model."
WRAPPERS = {"qwen3_5": Wrapper("qwen3_5_text"), "qwen3_5_moe": Wrapper("qwen3_5_moe_text")}  # by model_type
# Of the wrapper alone: which tokens stand for images.  Beside them it may say what holds for all of the model.
_IMAGES = {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_config"}
_OF_ALL = frozenset(
    "architectures bos_token_id dtype eos_token_id initializer_range model_type pad_token_id quantization_config "
    "compression_config tie_word_embeddings torch_dtype transformers_version unsloth_fixed unsloth_version use_cache".split()
)


def refuse_wrapped(names: Iterable[str], family: str, where: str) -> None:
    """ValueError if a text model's config stands beside tensors of its wrapper.  family: its model_type.  where: its file."""
    for model_type, wrapper in WRAPPERS.items():
        if wrapper.text_type == family and (name := next((name for name in names if name.startswith(wrapper.inside)), None)):
            raise ValueError(
                f"{where}: model_type must be {model_type!r}, since tensors are named as in that wrapper ({name!r}), got "
                f"{family!r}; nearest thing that works: the wrapper's own config.json, or model_type {model_type!r} and all of "
                "this file as text_config"
            )


def unwrapped(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The text model's config, under the wrapper's model_type and with what the wrapper says of all; others as they are.

    ValueError for a key of the wrapper that nobody has read about, or one that contradicts the config inside.
    """
    wrapper = WRAPPERS.get(raw["model_type"]) if isinstance(raw.get("model_type"), str) else None
    if wrapper is None:
        return raw
    inner, where_inside = mapping(raw, "text_config", where), f"{where}: text_config"
    if not inner:
        raise ValueError(f"{where} lacks text_config, of which a {raw['model_type']} model's config is made")
    if (found := text(inner, "model_type", where_inside)) != wrapper.text_type:
        raise ValueError(f"{where_inside}: model_type must be {wrapper.text_type!r}, got {found!r}")
    mapping(raw, "vision_config", where)
    if flag(raw, "language_model_only", where):  # written by tools; what it would change is not known
        raise NotComputedHere(f"{where}: language_model_only must be false or absent, got true")
    outer = {key: value for key, value in raw.items() if key not in {*_IMAGES, "text_config", "language_model_only"}}
    if unknown := sorted(key for key in outer if key not in _OF_ALL and not key.startswith("_")):
        raise NotComputedHere(f"{where}: unknown config keys {', '.join(unknown)}; they may change what the model computes")
    said = {key: value for key, value in outer.items() if value is not None}
    for key in ("tie_word_embeddings", "quantization_config"):
        if inner.get(key) is not None and key in said and said[key] != inner[key]:
            raise ValueError(f"{where}: {key} must be the same in text_config, got {said[key]!r} and {inner[key]!r}"[:500])
    return {**outer, **{key: value for key, value in inner.items() if value is not None}, "model_type": raw["model_type"]}
