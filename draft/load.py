"""Loads a head of any kind from a folder of any layout that can be read, strictly.  Knows neither kinds nor layouts.

A reader (`formats/`) says what the folder means; every tensor is checked by its header before memory is taken, and used or
refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.draft.formats.empty import class_of, empty_head, fill_own
from specdec.draft.formats.facts import weights_of
from specdec.draft.formats.open import AS_FOUND, HowToRead, OpenHead, open_head
from specdec.draft.head import DraftHead
from specdec.draft.kind import OpenDrafter
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig
from specdec.models.sharding import join, share_of
from specdec.models.target import Target


class HeadDrafter(OpenDrafter):
    """A head's folder, opened for its target.  ValueError: see `open_head`."""

    is_apart = True

    def __init__(self, folder: Path, target: ModelConfig, how: HowToRead) -> None:
        self.opened = open_head(folder, target, how)
        super().__init__(empty_head(self.opened.parsed.spec))
        self.checkpoint = self.opened.files.checkpoint

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftHead:
        return build_head(self.opened, target, max_positions, device, dtype)

    @property
    def stored_as(self) -> str:
        return weights_of(self.opened)

    def unkept(self, target: Checkpoint) -> set[str]:
        """Copies of the target's are given back once they were compared with it, but for one of a matrix in 8 or 4 bits."""
        parsed = self.opened.parsed
        spec, copies = parsed.spec, parsed.copies
        kept = {"embed_tokens.weight": spec.own_embeddings and not copies}
        kept["lm_head.weight"] = spec.own_lm_head and (not copies or target.format_of("lm_head") is not None)
        return {"d2t", "t2d", *parsed.beside, *(name for name, is_kept in kept.items() if not is_kept)}


def load_head(
    folder: Path,
    target: Target,
    max_positions: int,
    device: torch.device,
    dtype: torch.dtype,
    how: HowToRead = AS_FOUND,
) -> DraftHead:
    """The head in the folder, sharing what it does not own with the target.  ValueError: see `open_head`."""
    return build_head(open_head(folder, target.config, how), target, max_positions, device, dtype)


def build_head(opened: OpenHead, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """The head with its weights.  max_positions: length of the rotary table."""
    files, _, parsed = opened
    spec, checkpoint = parsed.spec, files.checkpoint
    own = replace(spec, model=share_of(spec.model, target.config.shard, "draft head"))
    head = build(lambda: class_of(spec.kind)(own, max_positions), device, dtype, late=checkpoint.quantization is not None)
    fill_own(head, parsed, checkpoint)
    checkpoint.finish()
    if not spec.own_embeddings:
        head.embed_tokens = target.embed_tokens
    if not spec.own_lm_head:
        head.share_lm_head(target)
    if parsed.copies:
        _share_copies(head, target, files.folder)
    head.d2t_V = _offsets(spec.draft_ids, target.embed_tokens.weight.device)
    join(head, target.group)
    return head


def _share_copies(head: DraftHead, target: Target, folder: Path) -> None:
    """Gives the memory of copies back.  ValueError if they differ from what the target has.

    A target whose language-model head is stored in 8 or 4 bits has only nearly the same numbers, so the head keeps its copy.
    """
    weights = {"embed_tokens.weight": (head.embed_tokens.weight, target.embed_tokens.weight)}
    shares_lm_head = not target.lm_head.is_quantised
    if shares_lm_head:
        own_head, its_head = (part.tensors()["weight"].tensor for part in (head.lm_head, target.lm_head))
        weights["lm_head.weight"] = own_head, its_head
    for name, (own, its) in weights.items():
        if not torch.equal(own, its):
            raise ValueError(
                f"{folder}: {name} must be a copy of the target's in this layout, but differs: is the head for this target?"
            )
    head.embed_tokens = target.embed_tokens
    if shares_lm_head:
        head.share_lm_head(target)
    else:
        head.logits_scale = target.config.logits_scale


def _offsets(draft_ids: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
    """What takes a draft id to the target's: None where all are 0."""
    if draft_ids is None:
        return None
    ids_V = torch.tensor(draft_ids, dtype=torch.int64, device="cpu")
    offsets_V = ids_V - torch.arange(len(ids_V), dtype=torch.int64, device="cpu")
    return offsets_V.to(device) if bool(offsets_V.any()) else None
