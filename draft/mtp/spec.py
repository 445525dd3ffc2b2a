"""The normal form of a target's MTP layers, whatever its family calls them.

Readers (`layouts.py`) make an `MtpSpec`; modules, the loader and `specdec inspect` know nothing else of the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec.models.causal_lm import PreNormLayer
from specdec.models.checkpoints.loader import OUR_NAMES, Names, Parts
from specdec.models.config import ModelConfig


@dataclass(frozen=True)
class MtpRules:
    """Where runtimes differ, by what the family's own reference does.

    Every family reads the target's state after its final norm as the feature of its first layer.
    hidden_first: the checkpoint's join reads [hidden, embedding]; else [embedding, hidden].
    zeroes_first: the embedding of a text's first pair, which belongs to its second token, is zero.
    recycles_normed: the feature of the next pair is the layer's output after its own final norm; else the output before it.
    chains: layer k reads what layer k - 1 made of the token before; else it reads what that layer read, so that every layer
        reads the target's own states.  This means something for several layers alone.
    """

    hidden_first: bool
    zeroes_first: bool
    recycles_normed: bool = True
    chains: bool = True


@dataclass(frozen=True)
class MtpNames:
    """How a family calls the parts of an MTP layer; {0}, {1}, ... stand for the prefixes of the layer's tensors.

    norm: the layer's final norm, which may be the target's own.  block: below what the decoder layer's parts stand.
    copies: tensors that repeat one of the target's, by the name of the target's.
    """

    embed_norm: str
    hidden_norm: str
    join: str
    norm: str
    block: str = "{0}"
    copies: tuple[tuple[str, str], ...] = ()

    def of(self, prefixes: tuple[str, ...]) -> MtpNames:
        """The names of one layer."""
        names = (self.embed_norm, self.hidden_norm, self.join, self.norm, self.block)
        embed, hidden, join, norm, block = (name.format(*prefixes) for name in names)
        return MtpNames(embed, hidden, join, norm, block, tuple((name.format(*prefixes), own) for name, own in self.copies))


class MtpBlock(NamedTuple):
    """The decoder layer inside of an MTP layer.

    make: from its config and number.  parts: how its modules are filled.  norms: of norms whose names are others.
    """

    make: Callable[[Any, int], PreNormLayer]
    parts: Parts
    norms: Names = OUR_NAMES


@dataclass(frozen=True)
class MtpSpec:
    """model: the sizes of the layers alone; num_layers is their number.

    by_layer: how the names of each layer's tensors begin, without a dot at the end.
    """

    family: str
    model: ModelConfig
    by_layer: tuple[tuple[str, ...], ...]
    names: MtpNames
    rules: MtpRules
    block: MtpBlock

    @property
    def prefixes(self) -> tuple[str, ...]:
        """How the names of all tensors begin that only the layers have."""
        return tuple(f"{prefix}." for prefixes in self.by_layer for prefix in prefixes)

    @property
    def layers(self) -> list[MtpNames]:
        """The names of each layer's parts."""
        return [self.names.of(prefixes) for prefixes in self.by_layer]

    @property
    def state_size(self) -> int:
        """The width of what the pass of the next token needs of a token (see MtpHead)."""
        kept = self.model.num_layers - 1
        return (max(1, kept) if self.rules.chains else 1 + kept) * self.model.hidden_size

    @property
    def keeps_states(self) -> bool:
        """Whether the state of each page's last token is kept, too."""
        return self.model.num_layers > 1

    @property
    def description(self) -> str:
        """One line for whoever loads the layers."""
        count = self.model.num_layers
        what = "its own MTP layer" if count == 1 else f"its own {count} MTP layers"
        return f"{what}, as {self.family} has them: {', '.join(self.said)}"

    @property
    def said(self) -> tuple[str, ...]:
        """What the rules mean, in words."""
        rules = self.rules
        layers = () if self.model.num_layers == 1 else (f"each layer reads {self.read_by_layers}",)
        return (
            f"join of {'hidden state and embedding' if rules.hidden_first else 'embedding and hidden state'}",
            f"embedding of the first pair {'zeroed' if rules.zeroes_first else 'kept'}",
            f"recycled {'after' if rules.recycles_normed else 'before'} the layer's final norm",
            *layers,
        )

    @property
    def read_by_layers(self) -> str:
        """What each of several layers reads beside a token, in words."""
        return "the layer before" if self.rules.chains else "the target's states"
