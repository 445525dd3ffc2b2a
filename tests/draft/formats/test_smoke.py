"""A look at a text when a head is loaded: quiet about a sound head; of a misread one it names how it should have been read."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.heads.parts import Parts, random_parts, shipped_parts
from toolkit.heads.writers import safeailab, save, speculators

from specdec import SpecConfig, SpecDecoder, shipped
from specdec.draft.formats.body import default_aux_layers
from specdec.draft.smoke import FLOOR, standard_errors


def exchanged(parts: Parts, *names: str) -> Parts:
    first, second = names
    return replace(parts, tensors={**parts.tensors, first: parts.tensors[second], second: parts.tensors[first]})


def blocks_reversed(parts: Parts) -> Parts:
    blocks = parts.tensors["fc.weight"].chunk(3, 1)
    return replace(parts, tensors={**parts.tensors, "fc.weight": torch.cat(blocks[::-1], 1)})


MISREAD: list[tuple[str, Any, str]] = [
    ("norms", lambda p: exchanged(p, "layers.0.input_layernorm", "layers.0.hidden_norm"), "hidden_norm exchanged"),
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


@pytest.mark.parametrize(("name", "change", "better"), MISREAD)
def test_a_misreading_is_named(name: str, change: Any, better: str, tmp_path: Path) -> None:
    """Keeps out: a head that loads without a word and drafts a tenth of what it could."""
    folder = save(tmp_path, speculators(change(shipped_parts())))
    (said,) = load(folder)
    assert better in said and "its files seem misread or broken" in said and "(--no-smoke)" in said
    assert not load(folder, smoke=False)


def test_a_sound_head_is_loaded_quietly_and_a_foreign_one_is_not(tmp_path: Path) -> None:
    assert not load(shipped.draft_folder())
    options = replace(shipped_parts().options, aux=default_aux_layers(26))
    (said,) = load(save(tmp_path, safeailab(random_parts(options))))
    assert "in 0% of the places" in said and "is it for this target?" in said


def test_errors_are_counted_place_by_place() -> None:
    """Keeps out: a gain of one place, as large as it may be, that outweighs all others."""
    gain = torch.zeros(200)
    gain[7] = -FLOOR
    assert standard_errors(gain) < 1.1
    assert standard_errors(torch.randn(200, generator=torch.Generator().manual_seed(0)) + 0.5) > 4
