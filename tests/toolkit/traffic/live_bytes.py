"""How much memory torch's operations hold at once on a CPU, which torch itself counts on GPUs alone."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, counts the memory that operations have made and that somebody still holds.  most: the largest number so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        old = {each.untyped_storage().data_ptr() for each in tree_leaves((args, given)) if isinstance(each, Tensor)}
        for storage in (each.untyped_storage() for each in tree_leaves(out) if isinstance(each, Tensor)):
            if storage.data_ptr() not in old and storage not in self._known:
                self._known.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, size: int) -> None:
        self.now -= size
