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
    """

    texts: Mapping[str, TextType]
    passed_over: tuple[str, ...]
    names: tuple[tuple[str, str], ...]
    flat: bool = False

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
_VISUAL = ("model.visual.", "visual.")
# Of wrappers alone: which tokens stand for images, and how images become tokens.
OF_IMAGES = frozenset("image_token_id video_token_id vision_start_token_id vision_end_token_id vision_config".split())


def _as_they_are(*names: str) -> dict[str, TextType]:
    """Text models that have a family of their own."""
    return {name: TextType(name) for name in names}


WRAPPERS = {
    "qwen3_5": Wrapper(_as_they_are("qwen3_5_text"), _VISUAL, _NESTED),
    "qwen3_5_moe": Wrapper(_as_they_are("qwen3_5_moe_text"), _VISUAL, _NESTED),
}
