"""What a target's MTP layers are mistaken for elsewhere, for the look at them when they are loaded (draft/smoke.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from specdec.draft.eagle.smoke import StepLook
from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.spec import MtpRules
from specdec.draft.smoke import Misreading, misread_feature, variant
from specdec.models.linear import Linear
from specdec.models.target import Target


def first_layer(head: MtpHead) -> MtpHead:
    """The first layer, which drafts the first level of every tree, as a head of its own."""
    return variant(head, layers=nn.ModuleList((head.layer(0),)))


class MtpLook(StepLook):
    """Of a head of one layer, which is run along a text as an EAGLE head is."""

    def misreadings(self, head: MtpHead, target: Target) -> Iterator[Misreading]:
        rules, layer = head.spec.rules, head.layer(0)
        H, first = head.spec.model.hidden_size, "hidden state" if rules.hidden_first else "embedding"
        halves = nn.Parameter(layer.join.by_head(1)[0].roll(H, dims=1), requires_grad=False)
        name = f"the join read the other way round (it was read {first} first)"
        yield Misreading(name, other_layer(head, rules, join=Linear.of(halves)))
        exchanged = other_layer(head, rules, embed_norm=layer.hidden_norm, hidden_norm=layer.embed_norm)
        yield Misreading("the norms of embedding and hidden state exchanged", exchanged)
        name = f"the output recycled {'before' if rules.recycles_normed else 'after'} the layer's final norm"
        yield Misreading(name, other_layer(head, replace(rules, recycles_normed=not rules.recycles_normed)))
        yield from misread_feature(head, target)


def other_layer(head: MtpHead, rules: MtpRules, **parts: nn.Module) -> MtpHead:
    """The head under other rules, with some parts of its layer replaced.  It shares all weights."""
    other = variant(head, layers=nn.ModuleList((variant(head.layer(0), **parts),)))
    other.spec = replace(head.spec, rules=rules)
    return other
