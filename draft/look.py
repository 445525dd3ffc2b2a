"""Whether a head, as it was read, drafts what its target would write: a quick look at one text when both are loaded.

A head that was misread loads without an error and drafts badly, and nothing in the text would show it.  So the head's most
likely token is compared with the target's along a given text, and the known misreadings are tried beside it.  A misreading can
cost little: in deep targets the outputs of neighbouring layers are alike.  So readings are compared place by place, by the
log-probability that the head gives to the target's token.  This module knows heads of one level a pass and targets; it knows no
kind of head, no tokenizer, and decides nothing.

Shapes: T tokens, P pairs, F features of one token, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.step_head import StepHead
from specdec.models.target import Target

# Thresholds.  Heads of published quality agree with their target in half of the places or more, badly misread ones in a few
# percent.  A misreading is better if its mean gain is so many standard errors above 0.
LEAST_AGREEMENT, LEAST_ERRORS = 0.3, 4.0
LEAST_PAIRS = 24  # with fewer, chance decides
FLOOR = -12.0  # the log-probability of a token that the head can't draft


# A misreading's name, the head read so, and the target's layers that it then reads; none: the final hidden state.
Misreading = tuple[str, StepHead, tuple[int, ...]]


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
def look(head: StepHead, target: Target, ids_T: Tensor, misreadings: Iterable[Misreading]) -> Finding | None:
    """Compares both along a text (int64).  None if the text is too short to tell."""
    if len(ids_T) < LEAST_PAIRS + 2:
        return None
    own = features_of(head)
    seen = _Seen(own, target, ids_T)
    as_read = seen.score(head, own)
    better, most = None, LEAST_ERRORS
    for name, other, layers in misreadings:
        score = seen.score(other, layers)
        errors = standard_errors(score.logp_P - as_read.logp_P)
        if errors > most:
            better, most = (name, score.agreement), errors
    return Finding(as_read.agreement, better)


def complaint(head: StepHead, target: Target, ids_T: Tensor, misreadings: Iterable[Misreading]) -> str:
    """What `look` found, for users; empty if the head is fine, or nothing can be said."""
    found = look(head, target, ids_T, misreadings)
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

    def __init__(self, layers: tuple[int, ...], target: Target, ids_T: Tensor) -> None:
        """layers: those whose outputs the head reads, and near which misreadings do; empty: the final hidden state."""
        self.ids_T, N = ids_T, target.config.num_layers
        near = {layer + off for layer in layers for off in (-1, 0, 1)}
        self.layers = tuple(sorted(layer for layer in near if 0 <= layer < N))
        if not self.layers and not target.config.features_refusal:
            self.layers = (N - 1,)
        attn = DenseAttention(target.config.layer_kinds, 1, sources=target.config.kv_source)
        out = target(ids_T, torch.arange(len(ids_T), device=ids_T.device), attn, self.layers)
        self.final_TH, self.states_TF = out.hidden_TH, out.aux_TA
        self.chosen_P = target.vocabulary.greedy(target.logits(out.hidden_TH))[1:]

    def score(self, head: StepHead, layers: tuple[int, ...]) -> Score:
        """layers: as above."""
        P = len(self.chosen_P)
        next_P, positions_P = self.ids_T[1:], torch.arange(P, device=self.ids_T.device)
        hidden_PH, agreement = head.fuse(self._features(layers)[:P]), 0.0
        kinds, total_P = head.needs.models[0].layer_kinds, torch.zeros(P, device=self.ids_T.device)
        for step in range(2):
            hidden_PH = head(next_P, hidden_PH, positions_P, DenseAttention(kinds))
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


def features_of(head: StepHead) -> tuple[int, ...]:
    """The target's layers whose outputs the head reads; none: the final hidden state."""
    layers = head.needs.features
    assert layers is not None, "a head without features"
    return layers
