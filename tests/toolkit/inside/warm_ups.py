"""What a capture does before it captures, and what a replay does, on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
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


class Replays(GraphSet):
    """Runs functions as replays do: the first one that came with a key, into what it returned then.  replays: by key's name."""

    def __init__(self) -> None:
        super().__init__(False)
        self.first: dict[Hashable, tuple[Callable[[], Any], Any]] = {}
        self.replays: Counter[str] = Counter()

    def run(
        self,
        key: Hashable,
        fn: Callable[[], Any],
        mutable: list[Tensor],
        warm_ups: int = 2,
        before: Callable[[], object] = lambda: None,
    ) -> Any:
        if key not in self.first:
            self.first[key] = fn, fn()
            return self.first[key][1]
        assert isinstance(key, tuple)
        captured, result = self.first[key]
        for held, now in zip(tensors_in(result), tensors_in(captured()), strict=True):
            if not torch.equal(held, now):  # a chain's parents can't be written, nor do they change
                held.copy_(now)
        self.replays[key[0]] += 1
        return result


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of what a phase returns: all that a later phase may read."""
    if isinstance(result, Tensor):
        return [result]
    parts: Any = result if isinstance(result, tuple | list) else ()
    if isinstance(result, dict):
        parts = result.values()
    elif is_dataclass(result):
        parts = [getattr(result, each.name) for each in fields(result)]
    return [tensor for part in parts for tensor in tensors_in(part)]
