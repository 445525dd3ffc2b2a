"""Every layout's files, broken in every way: each break ends in an error or a warning, or changes nothing.

The head is the trained one that ships with specdec, so that a wrong reading drafts visibly worse.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.mutations import all_changes
from toolkit.heads.parts import Parts, Tensors, shipped_parts
from toolkit.heads.writers import WRITERS, save

from specdec import shipped
from specdec.draft.formats.open import open_head
from specdec.draft.formats.reading import ParsedHead
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.load import build_head
from specdec.loading.about.drafters import TEXT
from specdec.models.target import Target
from specdec.prompts.tokenizer import Tokenizer

CPU = torch.device("cpu")


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
