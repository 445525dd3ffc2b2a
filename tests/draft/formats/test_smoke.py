"""A look at a text when a head is loaded: quiet about a sound head; of a misread one it names how it should have been read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toolkit.heads.parts import Parts, random_parts, shipped_parts
from toolkit.heads.writers import safeailab, save, speculators

from specdec import SpecConfig, SpecDecoder, shipped
from specdec.draft.formats.body import default_aux_layers


def with_tensor(parts: Parts, name: str, tensor: torch.Tensor) -> Parts:
    return replace(parts, tensors={**parts.tensors, name: tensor.double()})


def blocks_reversed(parts: Parts) -> Parts:
    blocks = parts.tensors["fc.weight"].chunk(3, 1)
    return with_tensor(parts, "fc.weight", torch.cat(blocks[::-1], 1))


MISREAD: list[tuple[str, Any, str]] = [
    ("embeddings", lambda p: with_tensor(p, "embed_tokens.weight", torch.randn(2048, 96) * 0.06), "the target's embeddings"),
    ("features", blocks_reversed, "opposite order"),
    ("residual", lambda p: p.changed(before_residual=True), "raw feature"),
    ("recycled", lambda p: p.changed(recycles_normed=True), "recycled before the final norm"),
]


def load(folder: Path, **options: Any) -> list[str]:
    """The warnings with which the pair loads."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        target = shipped.target_folder()
        SpecDecoder.from_pretrained(target, folder, SpecConfig(2, 1, 3), device="cpu", max_seq_len=300, **options).close()
    return [str(each.message) for each in seen]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "change", "better"), MISREAD)
def test_a_misreading_is_named(name: str, change: Any, better: str, tmp_path: Path) -> None:
    """Keeps out: a head that loads without a word and drafts a tenth of what it could."""
    folder = save(tmp_path, speculators(change(shipped_parts())))
    (said,) = load(folder)
    assert better in said and "its files seem misread or broken" in said and "(--no-smoke)" in said
    assert not load(folder, smoke=False)


@pytest.mark.parametrize("draft_vocab", [512, 256])
def test_a_map_of_zeros_may_be_meant(draft_vocab: int, tmp_path: Path) -> None:
    """Keeps out: a head that drafts the first ids of the vocabulary, as it was trained to, and is called broken for it: one
    that drafts well, and one that drafts little and yet enough to pay."""
    parts, table = shipped_parts(), load_file(shipped.target_folder() / "model.safetensors")
    assert parts.draft_ids is not None
    rows = table["model.embed_tokens.weight"].double()
    rows[parts.draft_ids] = parts.tensors["lm_head.weight"]
    parts = with_tensor(parts, "lm_head.weight", rows[:draft_vocab].clone())
    options = replace(parts.options, draft_vocab=draft_vocab)
    folder = save(tmp_path, speculators(replace(parts, options=options, draft_ids=torch.arange(draft_vocab))))
    assert not load_file(folder / "model.safetensors")["d2t"].any()
    assert not load(folder)


def test_a_sound_head_is_loaded_quietly_and_a_foreign_one_is_not(tmp_path: Path) -> None:
    assert not load(shipped.draft_folder())
    options = replace(shipped_parts().options, aux=default_aux_layers(26))
    (said,) = load(save(tmp_path, safeailab(random_parts(options))))
    assert "would accept 0.0% of what" in said and "undertrained, or trained for another target" in said
