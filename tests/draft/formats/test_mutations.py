"""Every layout's files, broken in every way: each break ends in an error or a warning, or changes nothing.

The head is the trained one that ships with specdec, so that a wrong reading drafts visibly worse.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.parts import Parts, Tensors, shipped_parts
from toolkit.heads.writers import WRITERS, Files, save

from specdec import shipped
from specdec.draft.formats.open import open_head
from specdec.draft.formats.reading import ParsedHead
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.load import build_head
from specdec.loading.about.drafters import TEXT
from specdec.models.target import Target
from specdec.prompts.tokenizer import Tokenizer

CPU = torch.device("cpu")
Change = tuple[str, dict[str, Any] | None, Tensors | None]  # a name; another config; other tensors


@pytest.fixture(scope="module")
def target() -> Target:
    folder = shipped.target_folder()
    return load_target(folder, read_target_config(folder), 512, CPU, torch.float32)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return torch.tensor(Tokenizer(shipped.target_folder()).encode(TEXT)[:256])


@pytest.fixture(scope="module")
def trained() -> Parts:
    return shipped_parts()


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


# What a file can't say of itself, and what costs too few drafts to be told from a head that was trained less: outputs of
# neighbouring layers are alike in a deep target, and a factor of 2 on eps or theta changes little in a short text.
TOO_LITTLE = {
    "ids one higher", "ids one lower", "ids other", "rms_norm_eps of another value", "rope_theta of another value",
    "norm_output of another value",
}  # fmt: skip
# Says how long the texts of training were; nothing in the files contradicts another number.
UNCHECKED = {"max_position_embeddings of another value"}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", WRITERS)
def test_no_broken_head_loads_quietly(
    name: str, trained: Parts, target: Target, text: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keeps out: what other runtimes do with such files: they load, and draft badly."""
    files = WRITERS[name](trained)
    sound = save(tmp_path / "sound", files)
    opened = open_head(sound, target.config)
    head = build_head(opened, target, 512, CPU, torch.float32)
    assert not head.smoke(target, text).complaint
    weights = head.state_dict()
    (broken := tmp_path / "broken").mkdir()
    count: Counter[str] = Counter()
    quiet = []
    for what, config, tensors in all_changes(files):
        (broken / "config.json").write_text(json.dumps(files[0] if config is None else config))
        (broken / "model.safetensors").unlink(missing_ok=True)
        if tensors is None:
            os.link(sound / "model.safetensors", broken / "model.safetensors")
        else:
            save_file({key: x.contiguous() for key, x in tensors.items()}, broken / "model.safetensors")
        end = end_of(broken, opened.parsed, weights, target, text)
        count[end] += 1
        if end == "quiet":
            quiet.append(what)
    with capsys.disabled():
        print(f"\n{name}: {sum(count.values())} breaks: {dict(count)}", end=" ")
    assert {what.rpartition(".")[2] if "." in what else what for what in quiet} <= TOO_LITTLE | UNCHECKED, quiet
    assert count["error"] > 100 and count["quiet"] <= 8


def end_of(folder: Path, sound: ParsedHead, weights: Tensors, target: Target, text: torch.Tensor) -> str:
    """How a break ends: in an error, in a warning, in the same head, or quietly."""
    try:
        opened = open_head(folder, target.config)
        head = build_head(opened, target, 512, CPU, torch.float32)
    except ValueError as error:
        assert len(str(error)) > 20
        return "error"
    is_same = computed(opened.parsed.spec) == computed(sound.spec)
    if is_same and all(torch.equal(tensor, weights[name]) for name, tensor in head.state_dict().items()):
        return "no change"
    return "warning" if head.smoke(target, text).complaint else "quiet"


def computed(spec: HeadSpec) -> HeadSpec:
    """The part of the spec from which logits follow, given the weights."""
    return replace(spec, own_embeddings=False, model=replace(spec.model, dtype=None))
