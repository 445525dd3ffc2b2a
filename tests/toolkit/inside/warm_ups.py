"""What a capture does before it captures, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from specdec.ops.cuda_graph import GraphSet

Trees = list[list[list[int]]]


class WarmUps(GraphSet):
    """Runs functions as captures do.  trees: forgets those that were drafted for nothing.  calls: how many were for nothing."""

    def __init__(self, trees: Trees) -> None:
        super().__init__(False)
        self.trees, self.calls = trees, 0

    def run(
        self,
        key: Hashable,
        fn: Callable[[], Any],
        mutable: list[Tensor],
        warm_ups: int = 2,
        before: Callable[[], object] = lambda: None,
    ) -> Any:
        self.calls += warm_ups
        saved, before_all = [tensor.clone() for tensor in mutable], len(self.trees)
        for _ in range(warm_ups):
            fn()
            for tensor, value in zip(mutable, saved, strict=True):
                tensor.copy_(value)
            before()
        del self.trees[before_all:]
        return fn()
