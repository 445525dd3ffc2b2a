"""What an EAGLE head's files are mistaken for elsewhere, for the look at a head that is loaded (draft/look.py)."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import torch
from torch import nn

from specdec.draft.eagle.head import DraftHead, Eagle3Head
from specdec.draft.eagle.spec import HeadSpec
from specdec.draft.look import Misreading
from specdec.models.layers import Rotary
from specdec.models.target import Target


def misreadings(head: DraftHead, target: Target) -> Iterator[Misreading]:
    """What a head's files are mistaken for elsewhere."""
    spec, N = head.config, target.config.num_layers
    layers = spec.aux_layers
    if not isinstance(head, Eagle3Head):
        if not target.config.features_refusal:
            yield "the feature taken before the target's final norm", head, (N - 1,)
        return
    for off, name in ((1, "higher"), (-1, "lower")):
        if 0 <= layers[0] + off and layers[-1] + off < N:
            yield f"ids of the target's layers read as one {name}", head, tuple(layer + off for layer in layers)
    if len(layers) > 1:
        yield "features put side by side in the opposite order", head, layers[::-1]
    yield (
        f"the residual taken as the {'raw' if spec.norm_before_residual else 'normed'} feature (norm_before_residual)",
        variant(head, replace(spec, norm_before_residual=not spec.norm_before_residual)),
        layers,
    )
    yield (
        "input_layernorm and hidden_norm exchanged",
        variant(head, spec, input_layernorm=head.hidden_norm, hidden_norm=head.input_layernorm),
        layers,
    )
    yield (
        f"the output recycled {'before' if spec.recycles_normed else 'after'} the final norm (norm_output)",
        variant(head, replace(spec, recycles_normed=not spec.recycles_normed)),
        layers,
    )
    yield (
        f"logits of the {'raw' if spec.norms_logits else 'normed'} output (norm_output)",
        variant(head, replace(spec, norms_logits=not spec.norms_logits, recycles_normed=False)),
        layers,
    )
    if spec.model.rope != target.config.rope and spec.model.head_dim == target.config.head_dim:
        rotary = Rotary(target.config.rope, spec.model.head_dim, len(head.rotary.table)).to(head.rotary.table)
        yield "the target's rope in place of the head's own", variant(head, spec, rotary=rotary), layers
    if spec.draft_ids is not None and head.d2t_V is not None:
        ids_V = torch.arange(len(spec.draft_ids), device=head.d2t_V.device)
        if bool((head.d2t_V.diff() > 0).all()):
            other = variant(head, spec)
            other.d2t_V = head.d2t_V - ids_V
            yield "d2t read as the target's ids, and not as offsets", other, layers


def variant(head: Eagle3Head, spec: HeadSpec, **parts: nn.Module) -> Eagle3Head:
    """The head under another spec, with some parts replaced.  It shares all weights."""
    other = copy(head)
    other._modules, other._buffers = {**head._modules, **parts}, dict(head._buffers)
    other.config = spec
    return other
