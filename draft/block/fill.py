"""Fills heads of one pass from the tensors of a checkpoint, as a layout calls them.  Knows parts of a head, and no layout."""

from __future__ import annotations

import torch

from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.peagle import PEagleHead
from specdec.draft.eagle.fill import fill_eagle3
from specdec.draft.formats.reading import Names
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import copy_, fill_layer, fill_linear, fill_norm


def fill_peagle(head: PEagleHead, names: Names, checkpoint: Checkpoint) -> None:
    fill_eagle3(head, names, checkpoint)
    with torch.no_grad():
        head.mask_hidden_F.copy_(checkpoint.take("mask_hidden").flatten())
    checkpoint.landed("mask_hidden", head.mask_hidden_F)


def fill_dflash(head: DFlashHead, names: Names, checkpoint: Checkpoint) -> None:
    fill_linear(head.fc, checkpoint, names.fc)
    fill_norm(head.hidden_norm, checkpoint, "hidden_norm")
    for layer, name in zip(head.layers, (names.first, *names.layers), strict=True):
        fill_layer(layer, checkpoint, name)
    fill_norm(head.norm, checkpoint, "norm")


def fill_dspark(head: DSparkHead, names: Names, checkpoint: Checkpoint) -> None:
    fill_dflash(head, names, checkpoint)
    markov = head.markov
    copy_(markov.w1.weight, checkpoint, f"{names.markov}markov_w1.weight")
    fill_linear(markov.w2, checkpoint, f"{names.markov}markov_w2")
    for matrix, name in ((markov.gate, "gate_proj"), (markov.joint, "joint_proj")):
        if matrix is not None:
            fill_linear(matrix, checkpoint, f"{names.markov}{name}")
    if head.confidence is not None:
        fill_linear(head.confidence, checkpoint, names.confidence)
