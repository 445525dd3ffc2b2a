"""A pass over a text, layer after layer, which may make way for something else and go on later at the layer where it stopped.

This file knows modules and their arguments; it knows no family of models, no attention and no reason to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


class MadeWay(Exception):
    """Raised by a poll to stop a pass: on all ranks at the same place."""


@contextmanager
def around_forward(module: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module's forward pass is around(the one before, *its arguments)."""
    before, is_own = module.forward, "forward" in vars(module)
    setattr(module, "forward", partial(around, before))  # noqa: B010  # mypy refuses a method's name
    try:
        yield
    finally:
        if is_own:
            setattr(module, "forward", before)  # noqa: B010
        else:
            del module.forward


class Passage:
    """One pass through the layers of a model, each of which reads what the one before has left.

    layers: in their order.  poll: called before each of them; where it raises MadeWay, the pass stops.  It goes on when the
    model is called again in the same way: earlier layers then hand on whatever they are given, and the layer before which the
    pass has stopped reads what it was given the first time.
    """

    def __init__(self, layers: nn.ModuleList, poll: Callable[[], None]) -> None:
        self._layers, self._poll = layers, poll
        self._done = 0  # layers
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # to the layer before which the pass has stopped
        self._size: int | None = None  # how many values a layer gives back; None: one that is in no tuple

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, a call of the model is the pass, or what is left of it."""
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                stack.enter_context(around_forward(layer, partial(self._layer, number)))
            yield

    def _layer(self, number: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if number < self._done:
            return args[0] if self._size is None else (args[0], *[None] * (self._size - 1))
        if self._given is not None:
            args, kwargs = self._as_before(kwargs)
        self._given = args, kwargs
        self._poll()
        self._given = None
        out = forward(*args, **kwargs)
        assert isinstance(out, Tensor | tuple), f"a layer gave back {type(out).__name__}"
        self._done, self._size = number + 1, len(out) if isinstance(out, tuple) else None
        return out

    def _as_before(self, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the first time.  What layers have left for each other in mappings goes into those of this call,
        which later layers get too.
        """
        assert self._given is not None
        args, before = self._given
        for name, value in kwargs.items():
            if isinstance(value, MutableMapping):
                value.update(before[name])
        return args, {name: kwargs[name] if isinstance(value, MutableMapping) else value for name, value in before.items()}
