"""What distinguishes one attention layer from another: which keys it may read, and how products become softmax weights.

Knows no model: a target's config is read elsewhere.  Layers of one kind share their plans.

Shapes: T queries, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerKind:
    """Which keys a query at position p reads, besides being causal.

    window W: the keys at p - W + 1 .. p (Mistral, Gemma, gpt-oss).  chunk C: those of its own chunk, p // C * C .. p
    (Llama 4).  Neither: all.
    """

    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.chunk is None, "a layer is windowed or chunked, not both"
        assert self.span is None or self.span > 0, self

    @property
    def span(self) -> int | None:
        """The most keys that one query reads; None: no bound."""
        return self.window or self.chunk

    def first_keys(self, positions: Tensor) -> Tensor:
        """The first position that a query at each of these positions reads.  Not for the full kind."""
        if self.window is not None:
            return (positions - (self.window - 1)).clamp_(min=0)
        assert self.chunk is not None
        return positions - positions % self.chunk

    def __str__(self) -> str:
        return f"window {self.window}" if self.window else f"chunk {self.chunk}" if self.chunk else "full"


FULL = LayerKind()


@dataclass(frozen=True)
class Scoring:
    """How a layer's products of queries and keys become softmax weights.

    scale: of the products; None: head_dim ** -0.5.  softcap c: logits are c * tanh(logit / c), before the mask (Gemma 2).
    sinks_H: a logit per head that takes its share of the softmax and has no value (gpt-oss); float32.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    def factor(self, head_dim: int) -> float:
        """What products are multiplied by."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def capped(self, scores: Tensor) -> Tensor:
        """Scaled products with the softcap, if there is one."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()


PLAIN = Scoring()
