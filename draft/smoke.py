"""Whether a head, as it was read, drafts what its target would write: a quick look at one text when both are loaded.

A head that was misread loads without an error and drafts badly, and nothing in the text would show it.  So the head drafts a
chain from every place of a given text, and one number is taken: the share of the drafts that the target would accept.  The same
number of other readings of its files says whether it was misread: a reading is named only if it is clearly better.  How a head
is run along a text, and what its files are mistaken for, is the kind's own affair (`HeadLook`); which parts of files may be
broken is in `broken.py`.  This module knows no tokenizer, and decides nothing.

Shapes: T tokens, P places, C chains, F features of one token, H hidden, V draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from specdec.attention.eager.dense import DenseAttention
from specdec.draft.drafter import Impression
from specdec.draft.head import DraftHead
from specdec.draft.head import Head as AnyHead
from specdec.models.layers import Rotary
from specdec.models.target import Target

Module = TypeVar("Module", bound=nn.Module)

# Drafts of a chain: as many as the default tree has levels.  A misreading may spare a chain's first draft (one of the state
# that is recycled does), and several in a row tell readings apart that one draft hardly does.
DRAFTS = 5
# A threshold.  Some 160 damaged heads say what it means (benchmarks/texts/README.md, "The look at a head"): along texts of the
# target's own, the 87 with less than this make at most 1.2 tokens a round of the chain (5,1,6) and 1.4 of the tree (5,4,16).
# These rounds take about 1.3 times as long as a plain step of an 8B target.  A head that was trained on texts of another kind
# is right less often along this text than along those, so one with more may well pay.
MIN_ACCEPTED = 0.02
MIN_GAIN, MIN_RATIO = 0.05, 2.0  # of a reading that is clearly better
DOUBTFUL = 0.1  # below this share, parts of the files are doubted too, which takes memory for other tables
MAX_ORDERED = 4  # layers whose orders are all tried
MIN_PAIRS = 24  # with fewer, chance decides


class Misreading(NamedTuple):
    """head: read so.  layers: those whose outputs it reads then; None: its own."""

    name: str
    head: Any
    layers: tuple[int, ...] | None = None


class Finding(NamedTuple):
    """What was seen.

    accepted: the share of the drafts that the target would accept, of the head as it was read; first: of first drafts alone.
    better: the reading with the largest share, if that is clearly larger, and the share; None: there is none.
    broken: what is wrong with the files at sight, of a doubtful head without a better reading; empty: nothing is known.
    """

    accepted: float
    better: tuple[str, float] | None = None
    broken: str = ""
    first: float = 0.0

    @property
    def is_fine(self) -> bool:
        return self.accepted >= MIN_ACCEPTED and self.better is None and not self.broken


class TargetPass:
    """The target's states and choices along a text.

    kinds: of the target's layers.  kept: by layer, the keys and values that the head reads.
    """

    def __init__(self, head: AnyHead, target: Target, ids_T: Tensor) -> None:
        self.ids_T, N = ids_T, target.config.num_layers
        near = {layer + off for layer in layers_of(head) for off in (-1, 0, 1)}
        self.layers = tuple(sorted(layer for layer in near if 0 <= layer < N))
        if not self.layers and not target.config.features_refusal:
            self.layers = (N - 1,)
        borrowed = head.needs.borrowed
        kept = () if borrowed is None else borrowed.layers
        attn = DenseAttention(target.config.layer_kinds, 1, kv_layers=target.config.kv_source, kept_layers=kept)
        out = target(ids_T, torch.arange(len(ids_T), dtype=torch.int64, device=ids_T.device), attn, self.layers)
        self.kinds, self.kept = target.config.layer_kinds, attn.kept
        self.final_TH, self.states_TF = out.hidden_TH, out.aux_TA
        self.chosen_P = target.vocabulary.greedy(target.logits(out.hidden_TH))[1:]

    def features(self, layers: tuple[int, ...]) -> Tensor:
        if not layers:
            return self.final_TH
        assert self.states_TF is not None
        parts = self.states_TF.chunk(len(self.layers), -1)
        return torch.cat([parts[self.layers.index(layer)] for layer in layers], -1)


class HeadLook(ABC):
    """How heads of a kind are looked at."""

    def drafts(self, head: Any) -> int:
        """The length of a chain."""
        return DRAFTS

    @abstractmethod
    def rights(self, seen: TargetPass, head: Any, layers: tuple[int, ...]) -> Iterator[Tensor]:
        """For each draft of a chain in turn, whether it is what the target chooses there along the text: bool [C].

        layers: those whose outputs the head reads; empty: the final hidden state.
        """

    @abstractmethod
    def misreadings(self, head: Any, target: Target) -> Iterator[Misreading]:
        """What a head's files are mistaken for elsewhere."""

    def repairs(self, head: Any, target: Target, seen: TargetPass) -> Iterator[Misreading]:
        """The head with parts of its files replaced, which may be broken."""
        yield from ()

    def empty(self, head: Any) -> str:
        """Which weights of a doubtful head are certainly broken, at sight; empty: none is."""
        return ""

    def doubt(self, head: Any) -> str:
        """What in the files of a head that can't pay is likely to be the cause; empty: nothing is known."""
        return ""

    def accepted(self, seen: TargetPass, head: Any, layers: tuple[int, ...], least: float = 0.0) -> tuple[float, float]:
        """The share of all chains' drafts that the target would accept, and of their first drafts.

        Where the former can't reach `least`, it is not found out, and any number below is returned.
        """
        drafts, total, first, alive_C = self.drafts(head), 0, 0, None
        for done, right_C in enumerate(self.rights(seen, head, layers), 1):
            alive_C = right_C if alive_C is None else alive_C & right_C
            alive, of = int(alive_C.sum()), drafts * len(alive_C)
            total, first = total + alive, first if done > 1 else alive
            if total + alive * (drafts - done) < least * of:
                break
        return total / of, first * drafts / of

    @torch.inference_mode()
    def find(self, head: AnyHead, target: Target, ids_T: Tensor, seen: TargetPass | None = None) -> Finding | None:
        """Compares both along a text (int64).  None if the text is too short to tell.  seen: the target's part, if known."""
        if len(ids_T) < MIN_PAIRS + 2:
            return None
        seen = TargetPass(head, target, ids_T) if seen is None else seen
        (as_read, first), better = self.accepted(seen, head, layers_of(head)), None
        if as_read < DOUBTFUL and (broken := self.empty(head)):
            return Finding(as_read, None, broken, first)
        least = max(MIN_RATIO * as_read, as_read + MIN_GAIN)
        for name, other, layers in self._readings(head, target, seen, as_read) if least <= 1.0 else ():
            accepted, _ = self.accepted(seen, other, layers_of(other) if layers is None else layers, least)
            if accepted >= least:
                better, least = (name, accepted), accepted
        cant_pay = as_read < MIN_ACCEPTED and better is None
        return Finding(as_read, better, self.doubt(head) if cant_pay else "", first)

    def _readings(self, head: Any, target: Target, seen: TargetPass, as_read: float) -> Iterator[Misreading]:
        yield from self.misreadings(head, target)
        if as_read < DOUBTFUL:
            yield from self.repairs(head, target, seen)

    def impression(self, head: AnyHead, target: Target, ids_T: Tensor) -> Impression:
        """What was found, for users and for whoever chooses shapes."""
        found = self.find(head, target, ids_T)
        return Impression() if found is None else Impression(self.describe(head, found), found.first)

    def describe(self, head: AnyHead, found: Finding) -> str:
        """A finding, for users; empty if the head is fine."""
        if found.is_fine:
            return ""
        few = ", too few to pay" if found.accepted < MIN_ACCEPTED else ""
        line = f"along a short text the target would accept {found.accepted:.1%} of what the draft head drafts{few}"
        if found.better is not None:
            name, accepted = found.better
            return f"{line}; with {name} it would be {accepted:.1%}, so its files seem misread or broken  ({head.description})"
        why = found.broken or "no known misreading of its files is clearly better: undertrained, or trained for another target"
        return f"{line}; {why}  ({head.description})"


def layers_of(head: AnyHead) -> tuple[int, ...]:
    """The target's layers whose outputs the head reads; none: the final hidden state."""
    layers = head.needs.features
    assert layers is not None, "a head without features"
    return layers


def is_right(head: AnyHead, logits: Tensor, chosen: Tensor) -> Tensor:
    """Whether the head's most likely tokens are the target's: bool [...].

    logits: [..., V].  chosen: int64 ids of the target's vocabulary, [...].
    """
    ids = logits.argmax(-1)
    return (ids if head.d2t_V is None else ids + head.d2t_V[ids]) == chosen


def misread_layers(head: DraftHead, target: Target) -> Iterator[Misreading]:
    """Other layers of the target, which heads of all kinds that read several may be mistaken for."""
    layers, N = head.config.aux_layers, target.config.num_layers
    for off, name in ((1, "higher"), (-1, "lower")):
        if 0 <= layers[0] + off and layers[-1] + off < N:
            yield Misreading(f"ids of the target's layers read as one {name}", head, tuple(layer + off for layer in layers))
    for order in list(permutations(layers))[1:] if len(layers) <= MAX_ORDERED else [layers[::-1]]:
        name = "the opposite order" if order == layers[::-1] else f"the order {', '.join(map(str, order))}"
        yield Misreading(f"features put side by side in {name}", head, order)


def misread_feature(head: AnyHead, target: Target) -> Iterator[Misreading]:
    """The final hidden state, which some runtimes take before its norm."""
    if not target.config.features_refusal:
        yield Misreading("the feature taken before the target's final norm", head, (target.config.num_layers - 1,))


def misread_config(head: DraftHead, target: Target) -> Iterator[Misreading]:
    """Another rope, and another vocabulary map."""
    spec, rope = head.config, target.config.rope.of_whole_heads
    if spec.model.rope != rope and spec.model.head_dim == target.config.head_dim:
        rotary = Rotary(rope, spec.model.head_dim, len(head.rotary.table)).to(head.rotary.table)
        yield Misreading("the target's rope in place of the head's own", variant(head, rotary=rotary))
    if spec.draft_ids is not None and head.d2t_V is not None:
        ids_V = torch.arange(len(spec.draft_ids), dtype=torch.int64, device=head.d2t_V.device)
        if bool((head.d2t_V.diff() > 0).all()):
            other = variant(head)
            other.d2t_V = head.d2t_V - ids_V
            yield Misreading("d2t read as the target's ids, and not as offsets", other)


def misread_residual(head: Any) -> Iterator[Misreading]:
    """The first layer of EAGLE-3 and P-EAGLE heads: its residual, and its norms."""
    before = head.config.norm_before_residual
    name = f"the residual taken as the {'raw' if before else 'normed'} feature (norm_before_residual)"
    yield Misreading(name, respecified(head, norm_before_residual=not before))
    exchanged = variant(head, input_layernorm=head.hidden_norm, hidden_norm=head.input_layernorm)
    yield Misreading("input_layernorm and hidden_norm exchanged", exchanged)


def variant(module: Module, **parts: nn.Module) -> Module:
    """The module with some parts replaced.  It shares all weights."""
    other = copy(module)
    other._modules, other._buffers = {**module._modules, **parts}, dict(module._buffers)
    return other


def respecified(head: Any, **fields: Any) -> Any:
    """The head with other fields of its spec."""
    other = variant(head)
    other.config = replace(head.config, **fields)
    return other
