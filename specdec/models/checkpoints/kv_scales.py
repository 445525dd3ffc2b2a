"""Scales of fp8 keys and values that a checkpoint brings: stored times scale is the value.  Knows the exporters' names.

Shapes: K kv heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.attention.kinds import LayerKind
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.layers import SelfAttention

# Where exporters put a layer's scales, below its attention: llm-compressor (and AutoFP8), vLLM's own names, ModelOpt, Quark.
_NAMES = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
# Of queries and softmax weights, for kernels that multiply in fp8.  Ours don't.
_UNUSED = ("q_scale", "attn.q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_scale", "prob_output_scale")


def take_kv_scale(checkpoint: Checkpoint, prefix: str, num_kv_heads: int, own: slice = slice(None)) -> Tensor | None:
    """[2, K] float32 of the attention named `prefix`, one number spread over the heads; None if it has none.

    num_kv_heads: of all ranks.  own: those that this rank holds.

    ValueError if just one of the two is there, or they are no positive numbers, one for all heads or one for each.
    """
    for name in _UNUSED:
        checkpoint.ignore(f"{prefix}.{name}")
    for pair in _NAMES:
        names = [f"{prefix}.{name}" for name in pair]
        if any(name in checkpoint for name in names):
            return torch.stack([_scale(checkpoint, name, num_kv_heads)[own] for name in names])
    return None


def kv_scales(model: nn.Module, kinds: Sequence[LayerKind]) -> list[Tensor | None]:
    """Of every layer, in order; one that attends to no keys has none.  kinds: of all layers of the model."""
    found = (module.kv_scale_2K for module in model.modules() if isinstance(module, SelfAttention))
    return [next(found, None) if kind.attends else None for kind in kinds]


def _scale(checkpoint: Checkpoint, name: str, num_kv_heads: int) -> Tensor:
    scale = checkpoint.take(name).float().flatten()
    wanted = f"{checkpoint.folder}: {name} must be one positive number, or one for each of {num_kv_heads} kv heads"
    if scale.numel() not in (1, num_kv_heads):
        raise ValueError(f"{wanted}; got {scale.numel()} numbers")
    if checkpoint.has_data and not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(f"{wanted}; got {scale.numel()} numbers, the least of which is {scale.min()}")
    return scale.expand(num_kv_heads)
