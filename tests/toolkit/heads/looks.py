"""Looks at a trained head whose files were damaged (damages.py), as loading looks at it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.draft.eagle.head import EagleHead
from specdec.draft.eagle.smoke import EagleLook
from specdec.draft.formats.open import open_head
from specdec.draft.load import build_head
from specdec.draft.smoke import Finding, TargetPass, layers_of
from specdec.loading.about.drafters import MAX_TOKENS, TEXT
from specdec.models.target import Target
from specdec.prompts.tokenizer import Tokenizer
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.heads.damages import Damage, damaged, read_files
from toolkit.heads.writers import save

CPU, POSITIONS = torch.device("cpu"), 512


class Looked(NamedTuple):
    """refused: the error of loading, or empty; the head and what was found of it are there if it is empty."""

    damage: Damage
    refused: str
    head: EagleHead | None = None
    found: Finding | None = None
    said: str = ""


def target_and_text(folder: Path, tokens: int = MAX_TOKENS) -> tuple[Target, torch.Tensor]:
    """The target in float32, and what loading looks at with it."""
    target = load_target(folder, read_target_config(folder), POSITIONS, CPU, torch.float32)
    return target, torch.tensor(Tokenizer(folder).encode(TEXT)[:tokens])


def looks(target: Target, head: Path, ids_T: torch.Tensor) -> Iterator[Looked]:
    """One for each damage that the head can have, the first of which is none."""
    seen: dict[tuple[int, ...], TargetPass] = {}  # by the layers that are read: the target's part is the same for many heads
    for damage, files in damaged(read_files(head), target.embed_tokens.weight.detach()):
        with tempfile.TemporaryDirectory() as folder:
            try:
                opened = open_head(save(Path(folder) / "head", files), target.config)
                drafter = build_head(opened, target, POSITIONS, CPU, torch.float32)
            except ValueError as error:
                yield Looked(damage, str(error))
                continue
        assert isinstance(drafter, EagleHead)
        layers = layers_of(drafter)
        if layers not in seen:
            with torch.inference_mode():
                seen[layers] = TargetPass(drafter, target, ids_T)
        found = EagleLook().find(drafter, target, ids_T, seen[layers])
        assert found is not None
        yield Looked(damage, "", drafter, found, EagleLook().describe(drafter, found))
