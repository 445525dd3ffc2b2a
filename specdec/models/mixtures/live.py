"""Which tokens of a pass anybody needs, told to its mixtures: padded rows, and columns after a row's last, choose no expert.

Whoever runs a pass over rows of the batch knows; the layers in between need not.  It is a value of this context (contextvars),
which no other thread sees.  Code that is captured in a graph reads it as it is captured, and keeps its tensors.

Shapes: B rows of the batch, T tokens: equally many of each row, one row's after another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from specdec.ops.products.own_pairs import LiveRows

_LIVE: ContextVar[LiveRows | None] = ContextVar("live", default=None)


@contextmanager
def live_rows(active_B: Tensor, last_B: Tensor | None = None) -> Iterator[None]:
    """Inside, passes are over these rows.

    active_B: int32, 0 where a row is padding.  last_B: int64, the last column of each row that is needed, where a pass has more
    than one; None: all are.  A single row is never padding.
    """
    is_whole = last_B is None and len(active_B) == 1
    token = _LIVE.set(None if is_whole else LiveRows(active_B, last_B))
    try:
        yield
    finally:
        _LIVE.reset(token)


def live_now() -> LiveRows | None:
    """None: all tokens are needed, or nobody says which are not."""
    return _LIVE.get()
