"""Heads without their weights, of which everything but numbers can be asked."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from specdec.draft.formats.parts import Part, fill, matrices_of, tensors_of
from specdec.draft.formats.reading import ParsedHead, PartNames
from specdec.draft.formats.spec import KINDS, HeadSpec
from specdec.draft.formats.stored import Shapes
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build, copy_, fill_dense, fill_linear

if TYPE_CHECKING:
    from specdec.draft.head import DraftHead


def class_of(kind: str) -> Callable[[HeadSpec, int], DraftHead]:
    """What makes a head of that kind, from its spec and the most positions."""
    module, name = KINDS[kind].where.split(":")
    return getattr(import_module(module), name)


def empty_head(spec: HeadSpec) -> DraftHead:
    return build(lambda: class_of(spec.kind)(spec, 1), torch.device("meta"), torch.float32)


def wanted_tensors(spec: HeadSpec, names: PartNames) -> Shapes:
    """Every tensor that a head of that spec needs, but for its vocabulary map, with its shape; matrices unquantised."""
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(_all_parts(spec, names)).items()}


def own_matrices(spec: HeadSpec, names: PartNames) -> list[str]:
    """Those of `wanted_tensors` that files may hold in 8 or 4 bits, without an ending."""
    return list(matrices_of(_all_parts(spec, names)))


def check_by_filling(parsed: ParsedHead, checkpoint: Checkpoint) -> None:
    """Fills a head without memory from headers alone.  ValueError for what shows there: quantised values and scales that are
    missing, left over, of another shape or dtype, and parts of one matrix that are stored in unlike ways.
    """
    headers = checkpoint.headers()
    fill_own(empty_head(parsed.spec), parsed, headers)
    headers.finish()


def fill_own(head: DraftHead, parsed: ParsedHead, checkpoint: Checkpoint) -> None:
    """Fills all of a head that its files bring, but for its vocabulary map."""
    spec = parsed.spec
    fill(head.parts(parsed.names), checkpoint)
    if spec.own_embeddings:
        copy_(head.embed_tokens.weight, checkpoint, "embed_tokens.weight")
    if spec.own_lm_head and parsed.copies:  # what is shared with the target is not rounded for the head alone
        fill_dense(head.lm_head, checkpoint, "lm_head")
    elif spec.own_lm_head:
        fill_linear(head.lm_head, checkpoint, "lm_head")
    checkpoint.ignore_endings("rotary_emb.inv_freq")
    for name in parsed.beside:  # which the reader of the layout has read, where they are read
        checkpoint.ignore(name)


def _all_parts(spec: HeadSpec, names: PartNames) -> list[Part]:
    head = empty_head(spec)
    parts = [*head.parts(names)]
    parts += [("lm_head", head.lm_head)] if spec.own_lm_head else []
    return parts + ([("embed_tokens", head.embed_tokens)] if spec.own_embeddings else [])
