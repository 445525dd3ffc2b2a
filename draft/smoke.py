"""Whether a head, as it was read, drafts what its target would write: a quick look at one text when both are loaded.

A head that was misread loads without an error and drafts badly, and nothing in the text would show it.  So the head's most
likely token is compared with the target's along a given text, and the known misreadings are tried beside it.  A misreading can
cost little: in deep targets the outputs of neighbouring layers are alike.  So readings are compared place by place, by the
log-probability that the head gives to the target's token.  How a head is run along a text, and what its files are mistaken for,
is the kind's own affair (`Look`).  This module knows no tokenizer, and decides nothing.

Shapes: T tokens, P places, F features of one token, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.formats.spec import HeadSpec
from specdec.draft.head import DraftHead
from specdec.draft.step_head import StepHead
from specdec.models.layers import Rotary
from specdec.models.target import Target

Head = TypeVar("Head", bound=DraftHead)
AnyHead = DraftHead | StepHead
Misreading = tuple[str, Any, tuple[int, ...]]  # a name, the head read so, the layers that it reads

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


class Seen:
    """The target's states and choices along a text."""

    def __init__(self, head: AnyHead, target: Target, ids_T: Tensor) -> None:
        self.ids_T, N = ids_T, target.config.num_layers
        near = {layer + off for layer in layers_of(head) for off in (-1, 0, 1)}
        self.layers = tuple(sorted(layer for layer in near if 0 <= layer < N))
        if not self.layers and not target.config.features_refusal:
            self.layers = (N - 1,)
        attn = DenseAttention(target.config.layer_kinds, 1, sources=target.config.kv_source)
        out = target(ids_T, torch.arange(len(ids_T), dtype=torch.int64, device=ids_T.device), attn, self.layers)
        self.final_TH, self.states_TF = out.hidden_TH, out.aux_TA
        self.chosen_P = target.vocabulary.greedy(target.logits(out.hidden_TH))[1:]

    def features(self, layers: tuple[int, ...]) -> Tensor:
        if not layers:
            return self.final_TH
        assert self.states_TF is not None
        parts = self.states_TF.chunk(len(self.layers), -1)
        return torch.cat([parts[self.layers.index(layer)] for layer in layers], -1)


class Look(ABC):
    """How heads of a kind are looked at."""

    @abstractmethod
    def score(self, seen: Seen, head: Any, layers: tuple[int, ...]) -> Score:
        """A reading along the text.  layers: those whose outputs the head reads; empty: the final hidden state."""

    @abstractmethod
    def misreadings(self, head: Any, target: Target) -> Iterator[Misreading]:
        """What a head's files are mistaken for elsewhere."""

    @torch.inference_mode()
    def find(self, head: AnyHead, target: Target, ids_T: Tensor, seen: Seen | None = None) -> Finding | None:
        """Compares both along a text (int64).  None if the text is too short to tell.  seen: the target's part, if known."""
        if len(ids_T) < LEAST_PAIRS + 2:
            return None
        seen = Seen(head, target, ids_T) if seen is None else seen
        as_read = self.score(seen, head, layers_of(head))
        better, most = None, LEAST_ERRORS
        for name, other, layers in self.misreadings(head, target):
            score = self.score(seen, other, layers)
            errors = standard_errors(score.logp_P - as_read.logp_P)
            if errors > most:
                better, most = (name, score.agreement), errors
        return Finding(as_read.agreement, better)

    def complaint(self, head: AnyHead, target: Target, ids_T: Tensor) -> str:
        """What was found, for users; empty if the head is fine, or nothing can be said."""
        found = self.find(head, target, ids_T)
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


def layers_of(head: AnyHead) -> tuple[int, ...]:
    """The target's layers whose outputs the head reads; none: the final hidden state."""
    layers = head.needs.features
    assert layers is not None, "a head without features"
    return layers


def logp_of(head: AnyHead, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of the target's tokens, and whether they are the head's most likely ones; both [...].

    logits: [..., V].  chosen: int64 ids of the target's vocabulary, [...].
    """
    logp = logits.float().log_softmax(-1)
    ids_V = torch.arange(logp.shape[-1], dtype=torch.int64, device=logp.device)
    ids_V = ids_V if head.d2t_V is None else ids_V + head.d2t_V
    own = torch.where(chosen[..., None] == ids_V, logp, FLOOR).amax(-1).clamp(min=FLOOR)
    return own, ids_V[logp.argmax(-1)] == chosen


def misread_layers(head: Head, target: Target) -> Iterator[tuple[str, Head, tuple[int, ...]]]:
    """Other layers of the target, which heads of all kinds that read several may be mistaken for."""
    layers, N = head.config.aux_layers, target.config.num_layers
    for off, name in ((1, "higher"), (-1, "lower")):
        if 0 <= layers[0] + off and layers[-1] + off < N:
            yield f"ids of the target's layers read as one {name}", head, tuple(layer + off for layer in layers)
    if len(layers) > 1:
        yield "features put side by side in the opposite order", head, layers[::-1]


def misread_config(head: Head, target: Target) -> Iterator[tuple[str, Head, tuple[int, ...]]]:
    """Another rope, and another vocabulary map."""
    spec = head.config
    if spec.model.rope != target.config.rope and spec.model.head_dim == target.config.head_dim:
        rotary = Rotary(target.config.rope, spec.model.head_dim, len(head.rotary.table)).to(head.rotary.table)
        yield "the target's rope in place of the head's own", variant(head, spec, rotary=rotary), spec.aux_layers
    if spec.draft_ids is not None and head.d2t_V is not None:
        ids_V = torch.arange(len(spec.draft_ids), dtype=torch.int64, device=head.d2t_V.device)
        if bool((head.d2t_V.diff() > 0).all()):
            other = variant(head, spec)
            other.d2t_V = head.d2t_V - ids_V
            yield "d2t read as the target's ids, and not as offsets", other, spec.aux_layers


def variant(head: Head, spec: HeadSpec, **parts: nn.Module) -> Head:
    """The head under another spec, with some parts replaced.  It shares all weights."""
    other = copy(head)
    other._modules, other._buffers = {**head._modules, **parts}, dict(head._buffers)
    other.config = spec
    return other


def misread_residual(head: Any) -> Iterator[Misreading]:
    """The first layer of EAGLE-3 and P-EAGLE heads: its residual, and its norms."""
    spec = head.config
    yield (
        f"the residual taken as the {'raw' if spec.norm_before_residual else 'normed'} feature (norm_before_residual)",
        variant(head, replace(spec, norm_before_residual=not spec.norm_before_residual)),
        spec.aux_layers,
    )
    yield (
        "input_layernorm and hidden_norm exchanged",
        variant(head, spec, input_layernorm=head.hidden_norm, hidden_norm=head.input_layernorm),
        spec.aux_layers,
    )
