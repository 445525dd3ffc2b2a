"""Our attention function in transformers' interface: a model built with it asks us instead of computing attention itself.

Who answers is bound to the forward pass that runs, not to the process: several models may run, in several threads.

Shapes: T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "specdec"  # of the attention function


class AttentionCall(NamedTuple):
    """What a layer hands over: queries [1, H, T, D], keys and values [1, K, T, D], normed and rotated, and how it scores.

    extra: what else it passed.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    sinks_H: Tensor | None
    extra: dict[str, Any]


Answer = Callable[[AttentionCall], Tensor]  # [1, T, H, D]
_ANSWER: ContextVar[Answer] = ContextVar("answer")


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Inside, models built with our attention function get their attention from `answer`."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    extra["attention_mask"] = attention_mask
    return _ANSWER.get()(AttentionCall(module, query, key, value, scaling, sliding_window, softcap, s_aux, extra)), None


AttentionInterface.register(NAME, _attend)  # no mask function of that name is: transformers then makes no mask at all
