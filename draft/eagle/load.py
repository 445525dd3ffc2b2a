"""Loads an EAGLE head from a folder of any layout that can be read, strictly.  Knows parts of a head, and no layout.

A reader (`formats/`) says what the folder means; every tensor is checked by its header before memory is taken, and used or
refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft.eagle.formats.detect import FORMATS, detect
from specdec.draft.eagle.formats.reading import Format, HeadFiles, Reading, check_tensors
from specdec.draft.eagle.head import HEADS, DraftHead, Eagle1Head, Eagle3Head
from specdec.draft.eagle.spec import HeadSpec
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import (
    build,
    copy_,
    fill_attention,
    fill_layer,
    fill_linear,
    fill_mlp,
    fill_norm,
)
from specdec.models.checkpoints.swapped import refuse_target_tensors
from specdec.models.config import ModelConfig, read_json
from specdec.models.layers import RMSNorm
from specdec.models.sharding import join, share_of
from specdec.models.target import Target


class HowToRead(NamedTuple):
    """What a caller says of a head's files.

    format: the layout's name, or "auto".  pickles: whether weights may come from a pickle.
    window: whether no layer reads more tokens back than the head was trained on.
    """

    format: str = "auto"
    pickles: bool = False
    window: bool = False


AS_FOUND = HowToRead()


class OpenHead(NamedTuple):
    """A head's folder, understood and checked, of which no weight was read."""

    files: HeadFiles
    format: Format
    reading: Reading


def open_head(folder: Path, target: ModelConfig | None, how: HowToRead = AS_FOUND) -> OpenHead:
    """Reads a head's config and headers.

    target: None if it is not known; then nothing is held against it.
    ValueError names any config key or tensor that is unknown, missing or contradicts the target.
    """
    raw = read_json(folder / "config.json")
    files = HeadFiles(folder, raw, Checkpoint(folder, pickles=how.pickles))
    refuse_target_tensors(files.checkpoint.names(), folder)
    chosen = detect(files) if how.format == "auto" else FORMATS[how.format]
    reading = chosen.read(files, target)
    if how.window:
        reading = replace(reading, spec=windowed(reading.spec))
    if target is not None and not reading.spec.own_embeddings and reading.spec.model.hidden_size != target.hidden_size:
        raise ValueError(
            f"{folder}: a head of hidden_size {reading.spec.model.hidden_size} needs embed_tokens.weight of its own, "
            f"since the target's is {target.hidden_size} wide"
        )
    if target is not None and not reading.spec.own_lm_head and reading.spec.model.hidden_size != target.hidden_size:
        raise ValueError(f"{folder}: a head of another hidden_size than its target's needs an lm_head.weight of its own")
    check_tensors(files, reading)
    return OpenHead(files, chosen, reading)


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


def windowed(spec: HeadSpec) -> HeadSpec:
    """The same head, whose layers read no more tokens back than it was trained on."""
    most = spec.trained_length
    kinds = tuple(replace(kind, window=min(kind.window or most, most)) for kind in spec.model.layer_kinds)
    return replace(spec, model=replace(spec.model, layer_kinds=kinds))


def build_head(opened: OpenHead, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """The head with its weights.  max_positions: length of the rotary table."""
    files, _, reading = opened
    spec, checkpoint = reading.spec, files.checkpoint
    own = replace(spec, model=share_of(spec.model, target.config.shard))
    head = build(lambda: HEADS[spec.kind](own, max_positions), device, dtype)
    if isinstance(head, Eagle3Head):
        _fill_eagle3(head, reading, checkpoint)
    else:
        assert isinstance(head, Eagle1Head)
        for layer, name in zip(head.layers, (reading.names.first, *reading.names.layers), strict=True):
            fill_layer(layer, checkpoint, name)
    fill_linear(head.fc, checkpoint, "fc")
    if spec.own_embeddings:
        copy_(head.embed_tokens.weight, checkpoint, "embed_tokens.weight")
    else:
        head.embed_tokens = target.embed_tokens
    if spec.own_lm_head:
        fill_linear(head.lm_head, checkpoint, "lm_head")
    else:
        head.lm_head = target.lm_head
    head.d2t_V = _offsets(spec.draft_ids, target.embed_tokens.weight.device)
    for name in ("rotary_emb.inv_freq", *reading.beside):
        checkpoint.ignore(name)
    checkpoint.finish()
    join(head, target.group)
    return head


def _fill_eagle3(head: Eagle3Head, reading: Reading, checkpoint: Checkpoint) -> None:
    names = reading.names
    for norm, name in zip(head.feature_norms, names.feature_norms, strict=True):
        assert isinstance(norm, RMSNorm)
        fill_norm(norm, checkpoint, name)
    for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        fill_norm(getattr(head, part), checkpoint, f"{names.first}.{part}")
    fill_attention(head.self_attn, checkpoint, f"{names.first}.self_attn")
    fill_mlp(head.mlp, checkpoint, f"{names.first}.mlp")
    for layer, name in zip(head.layers, names.layers, strict=True):
        fill_layer(layer, checkpoint, name, names.input_norm)
    fill_norm(head.norm, checkpoint, "norm")


def _offsets(draft_ids: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
    """What takes a draft id to the target's: None where all are 0."""
    if draft_ids is None:
        return None
    offsets_V = torch.tensor(draft_ids) - torch.arange(len(draft_ids))
    return offsets_V.to(device) if bool(offsets_V.any()) else None
