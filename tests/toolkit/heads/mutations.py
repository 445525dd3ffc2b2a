"""A head's files, broken in every way: tensors, vocabulary maps, keys of the config, ids of the target's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from toolkit.heads.parts import Tensors
from toolkit.heads.writers import Files

Change = tuple[str, dict[str, Any] | None, Tensors | None]  # a name; another config; other tensors


def tensor_changes(tensors: Tensors) -> Iterator[Change]:
    for name, tensor in tensors.items():
        rest = {other: x for other, x in tensors.items() if other != name}
        yield f"{name} dropped", None, rest
        yield f"{name} renamed", None, {**rest, name.replace("weight", "weights") if "weight" in name else f"{name}s": tensor}
        if tensor.dim() == 2:
            yield f"{name} transposed", None, {**rest, name: tensor.T}
        yield f"{name} of another type", None, {**rest, name: tensor.float() if "2" in name else tensor.int()}
        yield f"{name} twice", None, {**tensors, f"copy.{name}": tensor.clone()}
        if tensor.is_floating_point():
            broken = tensor.clone()
            broken.flatten()[3] = torch.nan
            yield f"{name} with NaN", None, {**rest, name: broken}


def vocabulary_changes(tensors: Tensors) -> Iterator[Change]:
    d2t = tensors["d2t"]
    size = len(d2t)
    changes = {
        "absolute": d2t + torch.arange(size), "unsorted": d2t.flip(0), "out of range": d2t + 2048, "negative": d2t - 5,
        "shifted": d2t + 1, "shorter": d2t[:-1], "a double": torch.cat((d2t[:5], d2t[4:5] - 1, d2t[6:])),
    }  # fmt: skip
    for name, changed in changes.items():
        yield f"d2t {name}", None, {**tensors, "d2t": changed}
    if "t2d" in tensors:
        yield "t2d inverted", None, {**tensors, "t2d": ~tensors["t2d"]}
        yield "t2d shifted", None, {**tensors, "t2d": tensors["t2d"].roll(1)}


def key_changes(config: dict[str, Any], part: dict[str, Any], at: str) -> Iterator[Change]:
    """part: the config or an object in it, which is changed in place while the change is in use."""
    for key, value in list(part.items()):
        if isinstance(value, dict):
            yield from key_changes(config, value, f"{at}{key}.")
        other: Any = [1] if isinstance(value, str) else {"a": 1} if value is None else "x"
        del part[key]
        yield f"{at}{key} removed", config, None
        part[f"{key}s"] = value
        yield f"{at}{key} misspelt", config, None
        del part[f"{key}s"]
        part[key] = other
        yield f"{at}{key} of another type", config, None
        if isinstance(value, bool) or type(value) in (int, float):
            part[key] = not value if isinstance(value, bool) else value * 2
            yield f"{at}{key} of another value", config, None
        part[key] = value


def id_changes(config: dict[str, Any]) -> Iterator[Change]:
    nested = config.get("eagle_config", config)
    ids = nested["eagle_aux_hidden_state_layer_ids"]
    changes = {
        "one higher": [i + 1 for i in ids], "one lower": [i - 1 for i in ids], "beyond": [*ids[:2], 40], "twice": [1, 1, 24],
        "two of three": ids[:2], "other": [2, 10, 20],
    }  # fmt: skip
    for name, changed in changes.items():
        nested["eagle_aux_hidden_state_layer_ids"] = changed
        yield f"ids {name}", config, None
    nested["eagle_aux_hidden_state_layer_ids"] = ids


def all_changes(files: Files) -> Iterator[Change]:
    config, tensors = files
    yield from tensor_changes(tensors)
    yield from vocabulary_changes(tensors)
    yield from key_changes(config, config, "")
    yield from id_changes(config)
