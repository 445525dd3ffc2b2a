"""A head's own vocabulary: `d2t` and `t2d`, read into the target's id of each draft id.  The same in all layouts.

`d2t` holds offsets: the target's id is the draft id plus its offset.  `t2d` marks the target's ids that the head can draft.

Shapes: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from specdec.draft.formats.reading import HeadFiles

Presence = Literal["may", "must", "must not"]
MIN_TO_JUDGE = 16  # a threshold: offsets of fewer ids may always grow by chance


def read_draft_ids(
    files: HeadFiles, draft_size: int, vocab_size: int, *, t2d: Presence = "may", full: Presence = "may"
) -> tuple[int, ...] | None:
    """The target's id of each draft id; None: both use one vocabulary.

    t2d: whether the layout has the tensor beside a `d2t`.  full: whether it has both where the vocabularies are equally large.
    ValueError unless the tensors are there as the layout has them, hold ascending ids, and agree.
    """
    checkpoint, is_full = files.checkpoint, draft_size == vocab_size
    held = [name for name in ("d2t", "t2d") if name in checkpoint]
    if is_full and held and full == "must not":
        raise ValueError(
            f"{files.folder}: {held[0]} must be absent where draft_vocab_size is the whole vocabulary, {vocab_size}"
        )
    if is_full and not held:
        if full == "must":
            raise ValueError(f"{files.folder}: tensors d2t and t2d are missing; this layout has them at any draft_vocab_size")
        return None
    if is_full and "d2t" not in checkpoint:
        raise ValueError(f"{files.folder}: tensor t2d is there, but d2t is missing")
    if "d2t" not in checkpoint:
        raise ValueError(f"{files.where}: draft_vocab_size {draft_size} (of {vocab_size}) needs a d2t tensor that maps its ids")
    if t2d == "must" and "t2d" not in checkpoint:
        raise ValueError(f"{files.folder}: tensor t2d is missing; this layout has it beside d2t")
    if t2d == "must not" and "t2d" in checkpoint:
        raise ValueError(f"{files.folder}: tensor t2d must be absent; this layout has d2t alone")
    offsets_W = checkpoint.take_integers("d2t", (draft_size,)).long()
    ids_W = offsets_W + torch.arange(draft_size, dtype=torch.int64, device="cpu")
    _check_ids(files, offsets_W, ids_W, vocab_size, is_told="t2d" in checkpoint)
    if "t2d" in checkpoint:
        marks_V = checkpoint.take_integers("t2d", (vocab_size,)).bool()
        if int(marks_V.sum()) != draft_size or not bool(marks_V[ids_W].all()):
            zeros = "d2t is all zeros, and " if not bool(offsets_W.any()) else ""
            raise ValueError(
                f"{checkpoint.file('t2d')}: {zeros}t2d does not mark the {draft_size} target ids that d2t maps to; "
                f"it marks {int(marks_V.sum())}, of which d2t maps to {int(marks_V[ids_W.unique()].sum())}"
            )
    return None if is_full else tuple(ids_W.tolist())


def _check_ids(files: HeadFiles, offsets_W: Tensor, ids_W: Tensor, vocab_size: int, is_told: bool) -> None:
    """ValueError unless the offsets give ascending ids.  is_told: whether `t2d` says too which ids are meant."""
    # Each id is compared with the vocabulary too: the difference of two ids near the ends of int64 wraps around.
    is_sound = bool(((ids_W >= 0) & (ids_W < vocab_size)).all() and (ids_W.diff() > 0).all())
    # Offsets that always grow would leave out an id after every id; absolute ids always grow.
    in_range = bool(((offsets_W >= 0) & (offsets_W < vocab_size)).all())
    looks_absolute = in_range and len(offsets_W) >= MIN_TO_JUDGE and bool((offsets_W.diff() > 0).all())
    if is_sound and (is_told or not looks_absolute):
        return
    got = "ascending numbers, which are absolute ids" if looks_absolute else "others (absolute ids?)"
    raise ValueError(
        f"{files.checkpoint.file('d2t')}: d2t must hold offsets (target id = draft id + d2t[draft id]) that give ascending ids "
        f"in [0, {vocab_size - 1}]; got {got}"
    )
