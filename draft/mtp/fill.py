"""Makes MTP layers empty, and fills them from a checkpoint's tensors, by the names that the target's family gives these."""

from __future__ import annotations

import torch

from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.spec import MtpSpec
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import build, fill_dense, fill_layer, fill_norm


def empty_mtp(spec: MtpSpec) -> MtpHead:
    """The layers without their weights: what can be asked of them before anything is loaded."""
    return build(lambda: MtpHead(spec, 1), torch.device("meta"), torch.float32)


def fill(head: MtpHead, checkpoint: Checkpoint) -> None:
    """All layers, of a rank's share or whole."""
    spec = head.spec
    halves = (lambda rows: rows.roll(rows.shape[1] // 2, dims=1)) if spec.rules.hidden_first else None
    for index, names in enumerate(spec.layers):
        layer = head.layer(index)
        norms = {names.embed_norm: layer.embed_norm, names.hidden_norm: layer.hidden_norm, names.norm: layer.norm}
        for name, norm in norms.items():
            fill_norm(norm, checkpoint, name)
        fill_dense(layer.join, checkpoint, names.join, halves)
        fill_layer(layer.block, checkpoint, names.block, spec.block.parts, spec.block.norms)
