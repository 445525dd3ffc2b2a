"""How the ranks that hold one model exchange what each has computed: sums of terms, and what every rank found.

Every exchange is a call that all ranks make, in the same order and with tensors of the same shape and dtype.  Its result is the
same on all of them, bit for bit: terms are added in the order of ranks.  This module knows no model.

Shapes: T tokens, H hidden size, N ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.ops.norm import add_rms_norm


class Group(ABC):
    """The ranks of one model, and which of them this process is."""

    rank: int
    size: int

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """[N, *x.shape]: x of every rank, in the order of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """x of all ranks, added up in x's dtype or a wider one and rounded once."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.gather(x).to(wide).sum(0).to(x.dtype)

    def add_rms_norm(self, x_TH: Tensor, term_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + all ranks' terms, its norm).  x: the same on all ranks, as both results are."""
        return add_rms_norm(x_TH, self.sum(term_TH), weight_H, eps)


class Alone(Group):
    """One rank that holds the whole model: nothing is exchanged."""

    rank, size = 0, 1

    def gather(self, x: Tensor) -> Tensor:
        return x[None]

    def sum(self, x: Tensor) -> Tensor:
        return x

    def add_rms_norm(self, x_TH: Tensor, term_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x_TH, term_TH, weight_H, eps)


class ProcessGroup(Group):
    """Ranks in processes of their own, connected by torch.distributed (gloo, or NCCL on GPUs)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, x: Tensor) -> Tensor:
        all_N = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(all_N, x.contiguous(), group=self._group)
        return all_N


ALONE = Alone()
