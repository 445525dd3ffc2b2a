"""Heads without their weights, of which everything but numbers can be asked."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from specdec.draft.formats.parts import tensors_of
from specdec.draft.formats.reading import PartNames, Shapes
from specdec.draft.formats.spec import KINDS, HeadSpec
from specdec.models.checkpoints.loader import build

if TYPE_CHECKING:
    from specdec.draft.head import DraftHead


def class_of(kind: str) -> Callable[[HeadSpec, int], DraftHead]:
    """What makes a head of that kind, from its spec and the most positions."""
    module, name = KINDS[kind].where.split(":")
    return getattr(import_module(module), name)


def empty_head(spec: HeadSpec) -> DraftHead:
    return build(lambda: class_of(spec.kind)(spec, 1), torch.device("meta"), torch.float32)


def wanted_tensors(spec: HeadSpec, names: PartNames) -> Shapes:
    """Every tensor that a head of that spec needs, but for its vocabulary map, with its shape."""
    head = empty_head(spec)
    parts = [*head.parts(names)]
    parts += [("lm_head", head.lm_head)] if spec.own_lm_head else []
    parts += [("embed_tokens", head.embed_tokens)] if spec.own_embeddings else []
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(parts).items()}
