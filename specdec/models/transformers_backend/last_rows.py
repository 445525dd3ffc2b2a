"""Runs the layers at a transformers model's end for some tokens of a pass only.

Layers that share keys and values store nothing.  Where all layers from some layer on do so, the tokens that nobody reads need
not go through them.  transformers' layers take everything that belongs to a token as arguments with a dimension of tokens, so
selecting the tokens' rows in those arguments is enough.  This file knows no family; a check at loading says whether a model
gives the same states that way.

Shapes: T tokens of a pass, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn


class Cut(NamedTuple):
    """From layer `first` on, a pass of `tokens` tokens has the rows rows_R (int64) only."""

    first: int
    tokens: int
    rows_R: Tensor


class LastRows:
    """Selects rows in the arguments of a model's layers, for passes within `cutting`.

    layers: all layers of the decoder.  first: the first one that can be limited to some rows.
    """

    def __init__(self, layers: nn.ModuleList, first: int) -> None:
        self._cut: ContextVar[Cut | None] = ContextVar("cut", default=None)
        for number in range(first, len(layers)):
            layers[number].register_forward_pre_hook(self._hook(number), with_kwargs=True)

    @contextmanager
    def cutting(self, cut: Cut | None) -> Iterator[None]:
        """Within this context, a pass is limited to the rows of `cut`; None: the pass keeps all rows."""
        token = self._cut.set(cut)
        try:
            yield
        finally:
            self._cut.reset(token)

    def _hook(self, number: int) -> Any:
        def select(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            cut = self._cut.get()
            if cut is None or number < cut.first:
                return None
            return tuple(rows_in(arg, cut) for arg in args), {name: rows_in(arg, cut) for name, arg in kwargs.items()}

        return select


def rows_in(argument: Any, cut: Cut) -> Any:
    """A layer's argument with the rows of the cut alone: of tensors [..., T, size], and of tuples of such tensors."""
    if isinstance(argument, tuple):
        return tuple(rows_in(part, cut) for part in argument)
    if isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[-2] == cut.tokens:
        return argument.index_select(-2, cut.rows_R)
    return argument
