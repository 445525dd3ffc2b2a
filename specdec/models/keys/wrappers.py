"""Wrappers of texts and images: a text model's config inside another, and its tensors below another name.

Only the text model is computed.  Its config comes out of the wrapper as if it had stood there alone; tensors of vision towers
are known by how their names begin, and passed over (wrapper_table.py).  This file knows no weights and nothing of images.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from specdec.models.checkpoints.config_values import NotComputedHere, flag, mapping, text
from specdec.models.keys.rope import without_mrope
from specdec.models.keys.shared import EVERYWHERE
from specdec.models.keys.wrapper_table import OF_IMAGES, SCALED, SCALES, WRAPPERS, TextType, Wrapper

TIED = "tie_word_embeddings"
# Of the whole model where the wrapper says them, as transformers reads them.
_OUTSIDE_FIRST = {
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
}
# What a wrapper may say of all of the model beside these.
OF_ALL = _OUTSIDE_FIRST | set(
    "auto_map compression_config initializer_range model_type quantization_config tie_word_embeddings unsloth_fixed "
    "unsloth_version use_cache".split()
)
SETTINGS = frozenset(  # what transformers 4 wrote into every config too, and configs that stand alone may have
    "do_sample max_length output_attentions output_hidden_states return_dict sep_token_id temperature tokenizer_class top_k "
    "top_p torchscript use_bfloat16".split()
)


class Unwrapped(NamedTuple):
    """config: as if the text model had stood alone, under its family's model_type.  wrapper: its model_type; empty: none.

    is_tied: whether the output layer is the embeddings; None: the wrapper and the config inside don't say it, or not alike.
    """

    config: dict[str, Any]
    wrapper: str = ""
    is_tied: bool | None = None


def refuse_wrapped(names: Iterable[str], family: str, where: str) -> None:
    """ValueError if a text model's config stands beside tensors of its wrapper.  family: its model_type.  where: its file."""
    inside = {name: begin for name in names for begin in _INSIDE if name.startswith(begin)}
    if not inside:
        return
    found, begin = next(iter(inside.items()))
    named = {model_type: each for model_type, each in WRAPPERS.items() if any(begin == one for one, _ in each.names)}
    own = [name for name, each in named.items() if family in {text.family for text in each.texts.values()}]
    fitting = own or [name for name, each in named.items() if not each.texts][:3]
    if fitting:
        raise ValueError(
            f"{where}: model_type must be {' or '.join(map(repr, fitting))}, since tensors are named as in that wrapper "
            f"({found!r}), got {family!r}; nearest thing that works: the wrapper's own config.json, or model_type "
            f"{fitting[0]!r} and all of this file as text_config"
        )


_INSIDE = ("model.language_model.", "language_model.model.", "model.text_model.")


def unwrapped(raw: dict[str, Any], where: str) -> Unwrapped:
    """The text model's config, with what the wrapper says of all of the model; other configs as they are.

    ValueError for a key of the wrapper that nobody has read about, or one that contradicts the config inside.
    """
    name = raw.get("model_type")
    wrapper = WRAPPERS.get(name) if isinstance(name, str) else None
    if wrapper is None or not isinstance(name, str):
        return Unwrapped(raw)
    flag(raw, "language_model_only", where)  # vLLM serves no images then: texts are the same
    for key in ("vision_config", "audio_config", "perceiver_config"):
        mapping(raw, key, where)
    aside = {*OF_IMAGES, "text_config", "language_model_only"}
    outer = {key: value for key, value in raw.items() if key not in aside}
    inner, where_inside = mapping(raw, "text_config", where), f"{where}: text_config"
    if not inner and wrapper.flat:
        inner = {**outer, "model_type": next(iter(wrapper.texts))}
        outer, where_inside = {key: value for key, value in outer.items() if key in OF_ALL}, where
    if not inner:
        raise ValueError(f"{where} lacks text_config, of which a {name} model's config is made")
    inside = _text_type(inner, wrapper, where_inside)
    inner = {key: value for key, value in without_mrope(inner, where_inside).items() if key not in EVERYWHERE | SETTINGS}
    _refuse_outer(without_mrope(outer, where), inner, where)
    _refuse_fixed(inner, inside, where_inside)
    if not wrapper.scales_logits:
        _refuse_scales(inner, inside.family, name, where_inside)
    said = {key: value for key, value in outer.items() if value is not None and key in OF_ALL}
    first = {key: said[key] for key in _OUTSIDE_FIRST & said.keys()}
    if first.keys() & {"dtype", "torch_dtype"}:
        inner = {key: value for key, value in inner.items() if key not in ("dtype", "torch_dtype")}
    own = {key: value for key, value in inner.items() if value is not None or key not in said}
    config = {**said, **own, **first, **inside.fixed, "model_type": inside.family}
    ties = {flag(each, TIED, where) for each in (raw, inner) if each.get(TIED) is not None}
    is_tied = ties.pop() if len(ties) == 1 else None
    config.pop(TIED, None)
    return Unwrapped({**config, **_unsaid(config, inside), **({} if is_tied is None else {TIED: is_tied})}, name, is_tied)


def flattened(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A draft head's config whose sizes stand in a text_config, as those of the wrapper do that it was made for, on one level.

    ValueError if both levels say something and contradict each other.  Configs without text_config stay as they are.
    """
    inner = mapping(raw, "text_config", where)
    if not inner:
        return raw
    outer = {key: value for key, value in raw.items() if key not in OF_IMAGES | {"text_config"} and value is not None}
    for key in sorted(outer.keys() & inner.keys() - _OUTSIDE_FIRST - {"model_type"}):
        if inner[key] not in (None, outer[key]):
            raise ValueError(f"{where}: {key} must be the same in text_config, got {outer[key]!r} and {inner[key]!r}"[:500])
    return {**inner, **outer, "model_type": inner.get("model_type", outer.get("model_type"))}


def _text_type(inner: dict[str, Any], wrapper: Wrapper, where: str) -> TextType:
    found = text(inner, "model_type", where)
    if not wrapper.texts:
        if found is None:
            raise ValueError(f"{where} lacks model_type; expected the name of a family, such as 'llama'")
        return TextType(found)
    if found is None or found not in wrapper.texts:
        raise ValueError(f"{where}: model_type must be {' or '.join(map(repr, wrapper.texts))}, got {found!r}")
    return wrapper.texts[found]


def _refuse_outer(outer: dict[str, Any], inner: dict[str, Any], where: str) -> None:
    """ValueError for what a wrapper says beside its images, unless it is of all of the model, or repeats the config inside."""
    unknown = []
    for key, value in outer.items():
        if key in EVERYWHERE | SETTINGS | OF_ALL - {"quantization_config", "compression_config"} or key.startswith("_"):
            continue
        if key not in inner and key not in OF_ALL:
            unknown.append(key)
        elif key in inner and value not in (None, inner[key]) and not (key in OF_ALL and inner[key] is None):
            if key == "sliding_window" and not inner.get("use_sliding_window"):
                continue  # a number that is switched off
            raise ValueError(f"{where}: {key} must be the same in text_config, got {value!r} and {inner[key]!r}"[:500])
    if unknown:
        raise NotComputedHere(
            f"{where}: unknown config keys {', '.join(sorted(unknown))}; they may change what the model computes"
        )


def _refuse_fixed(inner: dict[str, Any], inside: TextType, where: str) -> None:
    for key, value in inside.fixed.items():
        if inner.get(key) not in (None, value):
            raise NotComputedHere(
                f"{where}: {key} must be {value!r} or absent, got {inner[key]!r}: transformers' class of the text model passes "
                "the key over"
            )


def _refuse_scales(inner: dict[str, Any], family: str, name: str, where: str) -> None:
    """NotComputedHere if the text model alone would scale or cap logits, which transformers' class of the wrapper does not."""
    said = [f"{key} {inner[key]!r}" for key, nothing in SCALES.items() if inner.get(key) not in (None, nothing)]
    if said or family in SCALED:
        raise NotComputedHere(
            f"{where}: logits of a {family} model must be neither scaled nor capped within {name}, whose class in transformers "
            f"passes that over, got {' and '.join(said) or 'what the family does by default'}: which of the two was trained is "
            "not known; nearest thing that works: the text model in a folder of its own"
        )


def _unsaid(config: dict[str, Any], inside: TextType) -> dict[str, Any]:
    """Values of keys that the config leaves out."""
    ropes = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    within = {key for rope in ropes if isinstance(rope, dict) for key in rope}
    missing = {key: value for key, value in inside.unsaid.items() if key not in config and key not in within}
    return {key: value(config) if callable(value) else value for key, value in missing.items()}
