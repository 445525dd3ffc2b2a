"""What a target's MTP layers are mistaken for elsewhere, for the look at them when they are loaded (draft/smoke.py)."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from torch import nn

from specdec.draft.eagle.smoke import StepLook
from specdec.draft.mtp.head import MtpHead
from specdec.draft.mtp.spec import MtpRules
from specdec.draft.smoke import Misreading
from specdec.models.linear import Linear
from specdec.models.target import Target


def first_layer(head: MtpHead) -> MtpHead:
    """The first layer, which drafts the first level of every tree, as a head of its own."""
    first = _with(head, layers=nn.ModuleList((head.layer(0),)))
    assert isinstance(first, MtpHead)
    return first


class MtpLook(StepLook):
    """Of a head of one layer, which is run along a text as an EAGLE head is."""

    def misreadings(self, head: MtpHead, target: Target) -> Iterator[Misreading]:
        rules, layer = head.spec.rules, head.layer(0)
        H, first = head.spec.model.hidden_size, "hidden state" if rules.hidden_first else "embedding"
        halves = nn.Parameter(layer.join.by_head(1)[0].roll(H, dims=1), requires_grad=False)
        yield f"the join read the other way round (it was read {first} first)", variant(head, rules, join=Linear.of(halves)), ()
        exchanged = variant(head, rules, embed_norm=layer.hidden_norm, hidden_norm=layer.embed_norm)
        yield "the norms of embedding and hidden state exchanged", exchanged, ()
        other = replace(rules, recycles_normed=not rules.recycles_normed)
        yield (
            f"the output recycled {'before' if rules.recycles_normed else 'after'} the layer's final norm",
            variant(head, other),
            (),
        )
        if not target.config.features_refusal:
            yield "the feature taken before the target's final norm", head, (target.config.num_layers - 1,)


def variant(head: MtpHead, rules: MtpRules, **parts: nn.Module) -> MtpHead:
    """The head under other rules, with some parts of its layer replaced.  It shares all weights."""
    other = _with(head, layers=nn.ModuleList((_with(head.layer(0), **parts),)))
    assert isinstance(other, MtpHead)
    other.spec = replace(head.spec, rules=rules)
    return other


def _with(module: nn.Module, **parts: nn.Module) -> nn.Module:
    other = copy(module)
    other._modules = {**module._modules, **parts}
    return other
