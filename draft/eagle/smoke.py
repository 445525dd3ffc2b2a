"""Whether a head, as it was read, drafts what its target would write: a quick look at one text when both are loaded.

A head that was misread loads without an error and drafts badly, and nothing in the text would show it.  So the head's most
likely token is compared with the target's along a given text, and the known misreadings are tried beside it.  A misreading can
cost little: in deep targets the outputs of neighbouring layers are alike.  So readings are compared place by place, by the
log-probability that the head gives to the target's token.  This module knows heads and targets; it knows no tokenizer, and
decides nothing.

Shapes: T tokens, P pairs, F features of one token, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.eagle.head import Eagle3Head, EagleHead
from specdec.draft.formats.spec import HeadSpec
from specdec.models.layers import Rotary
from specdec.models.target import Target

# Thresholds.  Heads of published quality agree with their target in half of the places or more, badly misread ones in a few
# percent.  A misreading is better if its mean gain is so many standard errors above 0.
LEAST_AGREEMENT, LEAST_ERRORS = 0.3, 4.0
LEAST_PAIRS = 24  # with fewer, chance decides
FLOOR = -12.0  # the log-probability of a token that the head can't draft


class Score(NamedTuple):
    """A reading along a text.

    agreement: the share of places in which the head's most likely token is the target's.
    logp_P: the log-probability of the target's token in each place, from the target's true features and from the head's own
        output one place before, added up.
    """

    agreement: float
    logp_P: Tensor


class Finding(NamedTuple):
    """What was seen.

    agreement: of the head as it was read.  better: the misreading that is better by most, and its agreement; None: none is.
    """

    agreement: float
    better: tuple[str, float] | None

    @property
    def is_fine(self) -> bool:
        return self.agreement >= LEAST_AGREEMENT and self.better is None


@torch.inference_mode()
def look(head: EagleHead, target: Target, ids_T: Tensor) -> Finding | None:
    """Compares both along a text (int64).  None if the text is too short to tell."""
    if len(ids_T) < LEAST_PAIRS + 2:
        return None
    seen = _Seen(head, target, ids_T)
    as_read = seen.score(head, head.config.aux_layers)
    better, most = None, LEAST_ERRORS
    for name, other, layers in misreadings(head, target):
        score = seen.score(other, layers)
        errors = standard_errors(score.logp_P - as_read.logp_P)
        if errors > most:
            better, most = (name, score.agreement), errors
    return Finding(as_read.agreement, better)


def complaint(head: EagleHead, target: Target, ids_T: Tensor) -> str:
    """What `look` found, for users; empty if the head is fine, or nothing can be said."""
    found = look(head, target, ids_T)
    if found is None or found.is_fine:
        return ""
    low = f"below {LEAST_AGREEMENT:.0%}" if found.agreement < LEAST_AGREEMENT else "fewer than it could"
    line = f"the draft head chooses its target's token in {found.agreement:.0%} of the places of a short text, {low}"
    if found.better is None:
        return f"{line}, and no known misreading of its files would be better: is it for this target?  ({head.description})"
    name, agreement = found.better
    return f"{line}; with {name} it would be {agreement:.0%}, so its files seem misread or broken  ({head.description})"


def standard_errors(gain_P: Tensor) -> float:
    """By how many standard errors the mean gain is above 0."""
    return float(gain_P.mean() / (gain_P.std() / len(gain_P) ** 0.5).clamp(min=1e-6))


class _Seen:
    """The target's states and choices along a text."""

    def __init__(self, head: EagleHead, target: Target, ids_T: Tensor) -> None:
        self.ids_T, N = ids_T, target.config.num_layers
        near = {layer + off for layer in head.config.aux_layers for off in (-1, 0, 1)}
        self.layers = tuple(sorted(layer for layer in near if 0 <= layer < N))
        if not self.layers and not target.config.features_refusal:
            self.layers = (N - 1,)
        attn = DenseAttention(target.config.layer_kinds, 1, sources=target.config.kv_source)
        out = target(ids_T, torch.arange(len(ids_T), device=ids_T.device), attn, self.layers)
        self.final_TH, self.states_TF = out.hidden_TH, out.aux_TA
        self.chosen_P = target.vocabulary.greedy(target.logits(out.hidden_TH))[1:]

    def score(self, head: EagleHead, layers: tuple[int, ...]) -> Score:
        """layers: those whose outputs the head reads; empty: the final hidden state."""
        P = len(self.chosen_P)
        next_P, positions_P = self.ids_T[1:], torch.arange(P, device=self.ids_T.device)
        hidden_PH, agreement = head.fuse(self._features(layers)[:P]), 0.0
        total_P = torch.zeros(P, device=self.ids_T.device)
        for step in range(2):
            hidden_PH = head(next_P, hidden_PH, positions_P, DenseAttention(head.config.model.layer_kinds))
            logp_PV = head.logits(hidden_PH).float().log_softmax(-1)
            ids_V = torch.arange(logp_PV.shape[1], device=logp_PV.device)
            ids_V = ids_V if head.d2t_V is None else ids_V + head.d2t_V
            is_chosen_PV = self.chosen_P[:, None] == ids_V
            own_P = torch.where(is_chosen_PV, logp_PV, FLOOR).amax(-1).clamp(min=FLOOR)
            total_P = total_P + own_P.where(positions_P >= step, 0.0)
            if not step:
                agreement = float((ids_V[logp_PV.argmax(-1)] == self.chosen_P).float().mean())
            hidden_PH = torch.cat((hidden_PH[:1], hidden_PH[:-1]))
        return Score(agreement, total_P)

    def _features(self, layers: tuple[int, ...]) -> Tensor:
        if not layers:
            return self.final_TH
        assert self.states_TF is not None
        parts = self.states_TF.chunk(len(self.layers), -1)
        return torch.cat([parts[self.layers.index(layer)] for layer in layers], -1)


def misreadings(head: EagleHead, target: Target) -> Iterator[tuple[str, EagleHead, tuple[int, ...]]]:
    """What a head's files are mistaken for elsewhere: (name, the head read so, the layers that it reads)."""
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
