"""How the ranks that hold one model exchange what each has computed: sums of partial results, and what every rank found.

Every exchange is a call that all ranks make, in the same order and with tensors of the same shape and dtype.  Its result is the
same on all of them, bit for bit.  This module knows no model.

Shapes: T tokens, H hidden size, N ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from specdec.ops.norm import add_rms_norm


class Group(ABC):
    """The ranks of one model, and which of them this process is.

    one_order: whether a row's sums over the ranks, and its norm, must have the same bits whatever rows are beside it.
    """

    rank: int
    size: int
    one_order = False

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """[N, *x.shape]: x of every rank, in the order of ranks."""

    def broadcast(self, x: Tensor) -> Tensor:
        """What the first rank has, of the shape and dtype of x."""
        return self.all_gather(x)[0]

    def all_to_all(self, x: Tensor) -> Tensor:
        """[N, ...]: what each rank has for this one, in the order of ranks.  x: [N, ...], a piece for each rank."""
        return self.all_gather(x)[:, self.rank].contiguous()

    def all_gather_heads(self, x_THL: Tensor) -> Tensor:
        """[T, N * H, L]: each token's heads of every rank, in the order of ranks."""
        return self.all_gather(x_THL.transpose(0, 1)).flatten(0, 1).transpose(0, 1)  # head by head: copied once

    def neighbours(self, size: int) -> Group:
        """The group of `size` adjacent ranks to which this rank belongs; size divides N.  All ranks ask for it alike."""
        assert self.size % size == 0, (self.size, size)
        return self if size == self.size else Neighbours(self, size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """x of all ranks, added up in the order of ranks, in x's dtype or a wider one, and rounded once."""
        first, *others = self.all_gather(x)
        total = first.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        for other in others:  # not torch's sum, whose order depends on the shape
            total += other
        return total.to(x.dtype)

    def use_one_order(self, on: bool) -> None:
        """Sets `one_order`.  All ranks ask alike."""
        self.one_order = on

    def all_reduce_add(self, x_TH: Tensor, partial_TH: Tensor) -> Tensor:
        """x + all ranks' partial sums.  x: the same on all ranks, as the result is."""
        return x_TH + self.all_reduce(partial_TH)

    def all_reduce_add_rms_norm(
        self,
        x_TH: Tensor,
        partial_TH: Tensor,
        weight_H: Tensor,
        eps: float,
        out_TH: Tensor | None = None,
        below_CH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(x + all ranks' partial sums, its norm).  x: the same on all ranks, as both results are.

        out_TH, below_CH: as of the function of that name (ops/norm.py).
        """
        return add_rms_norm(x_TH, self.all_reduce(partial_TH), weight_H, eps, out_TH, below_CH)

    def all_reduce_min(self, value: float, device: torch.device) -> float:
        """The smallest of all ranks' values.  The host waits for it."""
        return self.all_gather(torch.tensor([value], dtype=torch.float64, device=device)).min().item()

    def problem(self) -> str:
        """Why exchanges have failed, if any has; what they gave since then means nothing.  The host does not wait for it."""
        return ""

    def abort(self) -> None:
        """Ends every exchange that waits for a rank, now and later; what they give means nothing.  Any thread may ask, more
        than once.

        Here there is nothing to end: the exchanges end by themselves when a rank is gone.
        """
        return


class Alone(Group):
    """One rank that holds the whole model: nothing is exchanged."""

    rank, size = 0, 1

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_min(self, value: float, device: torch.device) -> float:
        return value

    def use_one_order(self, on: bool) -> None:
        """There is nothing to add up."""


class GlooGroup(Group):
    """Ranks in processes on CPUs.

    backend: a process group that is not on torch.distributed's own list, so that a program may have several decoders, and
    groups of its own.
    at_once: bytes of a gather up to which each rank sends to all others at once.  Gloo's own gather goes around a ring: with
    eight ranks on two cores it took 2.1 ms of each rank's CPU instead of 0.4.
    """

    at_once = 1 << 19

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self._backend, self.rank, self.size = backend, rank, size

    def all_gather(self, x: Tensor) -> Tensor:
        all_N = x.new_empty((self.size, *x.shape))
        if all_N.nbytes <= self.at_once:
            self._backend.alltoall_base(all_N, x.expand_as(all_N).contiguous(), [], []).wait()
            return all_N
        self._backend.allgather([list(all_N.unbind())], [x.contiguous()]).wait()
        return all_N

    def all_to_all(self, x: Tensor) -> Tensor:
        received = x.new_empty(x.shape)
        self._backend.alltoall_base(received, x.contiguous(), [], []).wait()
        return received


class Neighbours(Group):
    """Some adjacent ranks of a larger group, all of whose ranks make the same calls: each takes what is its neighbours'."""

    def __init__(self, everyone: Group, size: int) -> None:
        self._everyone, self.size = everyone, size
        self.rank, self._first = everyone.rank % size, everyone.rank // size * size

    def all_gather(self, x: Tensor) -> Tensor:
        return self._everyone.all_gather(x)[self._first : self._first + self.size]


ALONE = Alone()
