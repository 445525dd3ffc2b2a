"""How one attention layer differs from another: which keys it may read, and how products become softmax weights.

This module knows no model: other modules read a target's config.  Layers of one kind share their plans.

Shapes: T queries, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerKind:
    """Which keys a query at position p reads; none lies after p.

    window W: the keys p - W + 1 to p (Mistral, Gemma, gpt-oss).
    chunk C: the keys of p's own chunk up to p, (p // C) * C to p (Llama 4).
    If neither is set, the query reads all keys up to p.
    skip: the first keys of a text that no query reads, in a layer that otherwise reads all keys or a window.
    alibi: whether the layer's scoring has slopes (ALiBi), so that its plans need the queries' positions.
    attends: whether the layer reads keys at all.  recurrent: whether it keeps a state of the text by row.  A layer may do both
        (Falcon-H1), or neither: it is an MLP or a mixture then (Nemotron-H).
    """

    window: int | None = None
    chunk: int | None = None
    alibi: bool = False
    skip: int = 0
    attends: bool = True
    recurrent: bool = False

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, "a layer is windowed or chunked, not both"
        assert not self.skip or self.chunk is None, "a layer that skips keys reads no chunks"
        assert self.span is None or self.span > 0, self

    @property
    def span(self) -> int | None:
        """The most keys that one query reads; None: there is no bound."""
        return self.window or self.chunk

    @property
    def reads_all(self) -> bool:
        """Whether every query reads all keys up to its own."""
        return self.span is None and not self.skip

    def first_keys(self, positions: Tensor) -> Tensor:
        """The first position that a query at each of these positions reads.  Not defined for layers that read all keys."""
        if self.chunk is not None:
            return positions - positions % self.chunk
        if self.window is not None:
            return (positions - (self.window - 1)).clamp_(min=self.skip)
        assert self.skip
        return torch.full_like(positions, self.skip)

    def __str__(self) -> str:
        if not self.attends:
            return "recurrent" if self.recurrent else "without a memory"
        name = f"window {self.window}" if self.window else f"chunk {self.chunk}" if self.chunk else "full"
        name = f"{name} but the first {self.skip}" if self.skip else name
        name = f"{name} with alibi" if self.alibi else name
        return f"{name}, and recurrent" if self.recurrent else name


FULL = LayerKind()
RECURRENT = LayerKind(attends=False, recurrent=True)


@dataclass(frozen=True)
class Scoring:
    """How a layer turns products of queries and keys into softmax weights.

    scale: the factor of the products; None: head_dim ** -0.5.
    softcap: with a softcap c, logits become c * tanh(logit / c) before the mask (Gemma 2).
    sinks_H: float32, a logit per head that takes part in the softmax's sum and has no value (gpt-oss).
    slopes_H: float32, ALiBi's slope of each head (Bloom, MPT).  A layer adds slope * (key's position - query's position) to its
        logits, after a softcap if there is one.  Only layers whose kind has alibi may have slopes.
    sqrt_alibi: whether a layer with slopes subtracts slope * sqrt(query's position - key's position) instead.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    slopes_H: Tensor | None = None
    sqrt_alibi: bool = False

    def __post_init__(self) -> None:
        assert self.slopes_H is not None or not self.sqrt_alibi, "the root of a distance needs slopes"

    def factor(self, head_dim: int) -> float:
        """The factor of the products."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def latent_factor(self) -> float:
        """The factor of the products of absorbed queries with latents, whose width does not tell it."""
        assert self.scale is not None, "the scale can't be derived from the width of absorbed queries"
        assert self.softcap is None and self.slopes_H is None, "no model of latent attention has a softcap or slopes"
        return self.scale

    def alibi(self, slopes: Tensor, distance: Tensor) -> Tensor:
        """What ALiBi adds to logits.  distance: a key's position minus the query's, in the slopes' dtype; 0 or less."""
        return slopes * (-distance.neg().clamp(min=0).sqrt() if self.sqrt_alibi else distance)

    def capped(self, scores: Tensor) -> Tensor:
        """Applies the softcap, if there is one, to scaled products."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()


PLAIN = Scoring()
