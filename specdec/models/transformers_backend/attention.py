"""The attention function that this module registers with transformers, under the name "specdec".

A transformers model that was built with this name calls the function instead of computing attention itself.  The function
passes each call on to an answer, a callable that the running forward pass has set.  A context variable holds the answer, so
several models may run at once in several threads.

Shapes: T tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "specdec"  # the attention function's name in transformers' registry


class AttentionCall(NamedTuple):
    """The arguments of one layer's call of attention.

    module: the layer's attention module.
    query: [1, H, T, D].  key, value: [1, K, T, D].  The model has normed and rotated queries and keys already.
    scaling: factor on products of queries and keys; None stands for D ** -0.5.
    sliding_window: how many keys a query reads, its own included; None stands for all.
    softcap: the limit c of logits c * tanh(logit / c), or None.
    sinks_H: one logit for each head that takes part in the softmax and has no value, or None.
    slopes_H: float32, ALiBi's slope of each head, or None.  Only modules whose forward pass is ours (own_attention/) pass it.
    extra: all other keyword arguments of the call.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    sinks_H: Tensor | None
    slopes_H: Tensor | None
    extra: dict[str, Any]


Answer = Callable[[AttentionCall], Tensor]  # [1, T, H, D]
_ANSWER: ContextVar[Answer] = ContextVar("answer")


@contextmanager
def answering(answer: Answer) -> Iterator[None]:
    """Within this context, `answer` computes the attention of models that were built with our attention function."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    slopes_H: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The pair ([1, T, H, D], None): one layer's attention, by the answer that the running pass has set."""
    extra["attention_mask"] = attention_mask
    call = AttentionCall(module, query, key, value, scaling, sliding_window, softcap, s_aux, slopes_H, extra)
    return _ANSWER.get()(call), None


# No mask function is registered under this name, so transformers builds no mask.
AttentionInterface.register(NAME, attend)
