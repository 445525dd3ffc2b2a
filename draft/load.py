"""Loads a head of any kind from a folder of any layout that can be read, strictly.  Knows kinds of heads, and no layout.

A reader (`formats/`) says what the folder means; every tensor is checked by its header before memory is taken, and used or
refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.fill import fill_dflash, fill_dspark, fill_peagle
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.eagle.fill import fill_eagle1, fill_eagle3
from specdec.draft.eagle.head import Eagle1Head, Eagle3Head
from specdec.draft.formats.open import AS_FOUND, HowToRead, OpenHead, open_head
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.head import DraftHead
from specdec.draft.kind import OpenDrafter
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build, copy_, fill_linear, fill_numbers
from specdec.models.config import ModelConfig
from specdec.models.sharding import join, share_of
from specdec.models.target import Target


class Kind(NamedTuple):
    """A kind of head.  make: from its spec and the most positions.  fill: from its tensors' names and the checkpoint."""

    make: Callable[..., DraftHead]
    fill: Callable[[Any, Any, Any], None]


KINDS = {
    "eagle1": Kind(Eagle1Head, fill_eagle1),
    "eagle3": Kind(Eagle3Head, fill_eagle3),
    "p-eagle": Kind(PEagleHead, fill_peagle),
    "dflash": Kind(DFlashHead, fill_dflash),
    "dspark": Kind(DSparkHead, fill_dspark),
}


def empty_head(spec: HeadSpec) -> DraftHead:
    """The head without its weights: what can be asked of it before anything is loaded."""
    return build(lambda: KINDS[spec.kind].make(spec, 1), torch.device("meta"), torch.float32)


class HeadDrafter(OpenDrafter):
    """A head's folder, opened for its target.  ValueError: see `open_head`."""

    is_apart = True

    def __init__(self, folder: Path, target: ModelConfig, how: HowToRead) -> None:
        self.opened = open_head(folder, target, how)
        self.model, self.checkpoint = empty_head(self.opened.reading.spec), self.opened.files.checkpoint

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftHead:
        return build_head(self.opened, target, max_positions, device, dtype)

    def unkept(self, target: Checkpoint) -> set[str]:
        """Copies of the target's are given back once they were compared with it, but for one of a matrix in 8 or 4 bits."""
        reading = self.opened.reading
        spec, copies = reading.spec, reading.copies
        kept = {"embed_tokens.weight": spec.own_embeddings and not copies}
        kept["lm_head.weight"] = spec.own_lm_head and (not copies or target.format_of("lm_head") is not None)
        return {"d2t", "t2d", *reading.beside, *(name for name, is_kept in kept.items() if not is_kept)}


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
    files, _, reading = opened
    spec, checkpoint = reading.spec, files.checkpoint
    own = replace(spec, model=share_of(spec.model, target.config.shard, "draft head"))
    kind = KINDS[spec.kind]
    head = build(lambda: kind.make(own, max_positions), device, dtype, late=checkpoint.quantization is not None)
    kind.fill(head, reading.names, checkpoint)
    if spec.own_embeddings:
        copy_(head.embed_tokens.weight, checkpoint, "embed_tokens.weight")
    else:
        head.embed_tokens = target.embed_tokens
    if spec.own_lm_head and reading.copies:  # what is shared with the target is not rounded for the head alone
        fill_numbers(head.lm_head, checkpoint, "lm_head")
    elif spec.own_lm_head:
        fill_linear(head.lm_head, checkpoint, "lm_head")
    else:
        head.lm_head = target.lm_head
    if reading.copies:
        _share_copies(head, target, files.folder)
    head.d2t_V = _offsets(spec.draft_ids, target.embed_tokens.weight.device)
    checkpoint.ignore_endings("rotary_emb.inv_freq")
    for name in reading.beside:
        checkpoint.ignore(name)
    checkpoint.finish()
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
        head.lm_head = target.lm_head


def _offsets(draft_ids: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
    """What takes a draft id to the target's: None where all are 0."""
    if draft_ids is None:
        return None
    ids_V = torch.tensor(draft_ids, dtype=torch.int64, device="cpu")
    offsets_V = ids_V - torch.arange(len(ids_V), dtype=torch.int64, device="cpu")
    return offsets_V.to(device) if bool(offsets_V.any()) else None
