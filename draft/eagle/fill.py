"""Fills EAGLE heads from the tensors of a checkpoint, as a layout calls them.  Knows parts of a head, and no layout."""

from __future__ import annotations

from specdec.draft.eagle.head import Eagle1Head, Eagle3Head
from specdec.draft.formats.reading import Names
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import fill_attention, fill_layer, fill_linear, fill_mlp, fill_norm
from specdec.models.layers import RMSNorm


def fill_eagle1(head: Eagle1Head, names: Names, checkpoint: Checkpoint) -> None:
    for layer, name in zip(head.layers, (names.first, *names.layers), strict=True):
        fill_layer(layer, checkpoint, name)
    fill_linear(head.fc, checkpoint, names.fc)


def fill_eagle3(head: Eagle3Head, names: Names, checkpoint: Checkpoint) -> None:
    for norm, name in zip(head.feature_norms, names.feature_norms, strict=True):
        assert isinstance(norm, RMSNorm)
        fill_norm(norm, checkpoint, name)
    for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        fill_norm(getattr(head, part), checkpoint, f"{names.first}.{part}")
    fill_attention(head.self_attn, checkpoint, f"{names.first}.self_attn")
    fill_mlp(head.mlp, checkpoint, f"{names.first}.mlp")
    for layer, name in zip(head.layers, names.layers, strict=True):
        fill_layer(layer, checkpoint, name, input_norm=names.input_norm)
    fill_norm(head.norm, checkpoint, "norm")
    fill_linear(head.fc, checkpoint, names.fc)
