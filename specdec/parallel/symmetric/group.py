"""A group of ranks whose GPUs reach each other's memory: exchanges run in one kernel, without NCCL.

The group that this one was made from does what the kernels can't, or not well: other dtypes, rows longer than the inbox was
made for, odd sizes, large tensors to gather, and sums of many rows over more than two ranks, unless all sums must have one
order: then whether a kernel adds rows up depends on their length alone.

Shapes: T tokens, H hidden size, N ranks.
"""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import Tensor

from specdec.ops.launch import KERNEL_DTYPES
from specdec.parallel.group import Group
from specdec.parallel.symmetric.inbox import BLOCK, Inbox, Unreachable, open_inboxes

# Seconds that a GPU waits for a rank.  It is long because a rank may compile kernels, or capture, while others wait for it; the
# end of a rank's process is noticed by the first rank's at once, which aborts.
PATIENCE = 300.0
ABORTED = -1  # what `abort` writes into the inbox's fault
# Bytes that a rank sends up to which they go as messages: twice as many bytes, but no fence.
MAX_AS_MESSAGES = 3 << 18
# Bytes that a rank may send beyond those that it sends in NCCL's ring: here each sends its whole partial sum to every other
# one.  With two ranks that is what a ring sends too.
MAX_BEYOND_RING = 2 << 20


class SymmetricGroup(Group):
    """The ranks of `base`, with an inbox each.  base: does what the kernels can't."""

    def __init__(self, base: Group, inbox: Inbox) -> None:
        assert inbox.layout.ranks == base.size > 1
        self.base, self.inbox, self.rank, self.size = base, inbox, base.rank, base.size
        self.patience = PATIENCE

    def all_gather(self, x: Tensor) -> Tensor:
        if not self._has_words(x, self.inbox.layout.words):
            return self.base.all_gather(x)
        from specdec.parallel.symmetric.flat_triton import launch_flat

        return launch_flat(self.inbox, self.rank, self.nanoseconds, x, "gather")

    def all_gather_heads(self, x_THL: Tensor) -> Tensor:
        (T, H, L), row_bytes = x_THL.shape, x_THL[0].nbytes if len(x_THL) else 0
        if row_bytes % 8 or not self._has_words(x_THL, self.inbox.layout.words):
            return super().all_gather_heads(x_THL)
        from specdec.parallel.symmetric.flat_triton import launch_flat

        gathered = launch_flat(self.inbox, self.rank, self.nanoseconds, x_THL, "gather", rows=T)
        return gathered.view(T, self.size * H, L)

    def all_to_all(self, x: Tensor) -> Tensor:
        if not self._has_words(x[0], self.inbox.layout.words):
            return self.base.all_to_all(x)
        from specdec.parallel.symmetric.flat_triton import launch_flat

        return launch_flat(self.inbox, self.rank, self.nanoseconds, x, "all_to_all")

    def neighbours(self, size: int) -> Group:
        return self if size == self.size else self.base.neighbours(size)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._has_words(x, self.inbox.layout.channels * BLOCK * 2) and x.dtype in KERNEL_DTYPES:
            from specdec.parallel.symmetric.flat_triton import launch_flat

            return launch_flat(self.inbox, self.rank, self.nanoseconds, x, "sum")
        return self._rows(None, x, None, 0.0)[0] if self._has_rows(x) else self.base.all_reduce(x)

    def all_reduce_add(self, x_TH: Tensor, partial_TH: Tensor) -> Tensor:
        if self._has_rows(partial_TH) and x_TH.dtype == partial_TH.dtype:
            return self._rows(x_TH, partial_TH, None, 0.0)[0]
        return self.base.all_reduce_add(x_TH, partial_TH)

    def all_reduce_add_rms_norm(
        self,
        x_TH: Tensor,
        partial_TH: Tensor,
        weight_H: Tensor,
        eps: float,
        out_TH: Tensor | None = None,
        below_CH: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        is_known = x_TH.dtype == partial_TH.dtype and weight_H.dtype in (x_TH.dtype, torch.float32)
        if not (is_known and self._has_rows(partial_TH)):
            return self.base.all_reduce_add_rms_norm(x_TH, partial_TH, weight_H, eps, out_TH, below_CH)
        total_TH, normed_TH = self._rows(x_TH, partial_TH, weight_H, eps)
        total_TH = total_TH if out_TH is None else out_TH.copy_(total_TH)
        return total_TH, normed_TH if below_CH is None else torch.cat((normed_TH, below_CH))

    def all_reduce_min(self, value: float, device: torch.device) -> float:
        """Callers' threads ask for it, of which some record gradients and others don't; so it never goes through kernels."""
        return self.base.all_reduce_min(value, device)

    def use_one_order(self, on: bool) -> None:
        super().use_one_order(on)
        self.base.use_one_order(on)

    def problem(self) -> str:
        fault = int(self.inbox.fault)
        missing = f"rank {fault - 1} did not come to an exchange with rank {self.rank} within {self.patience:g} s"
        return missing if fault > 0 else ""

    def abort(self) -> None:
        if not int(self.inbox.fault):
            self.inbox.fault.numpy()[0] = ABORTED
        self.base.abort()

    @property
    def nanoseconds(self) -> int:
        """Of `patience`, as kernels take it."""
        return int(self.patience * 1e9)

    def _has_words(self, x: Tensor, most: int) -> bool:
        """Whether x is made of whole words, of 32 bits, at most so many."""
        num_bytes = x.numel() * x.element_size()
        return 0 < num_bytes <= most * 4 and num_bytes % 4 == 0 and self._is_here(x)

    def _has_rows(self, x: Tensor) -> bool:
        if x.dim() != 2 or not x.numel() or x.dtype not in KERNEL_DTYPES or not self._is_here(x):
            return False
        row_bytes = x.shape[1] * x.element_size()
        beyond = (self.size - 1) * (1 - 2 / self.size) * len(x) * row_bytes
        fits = row_bytes % 16 == 0 and row_bytes <= self.inbox.layout.row_bytes
        return fits and (self.one_order or beyond <= MAX_BEYOND_RING)

    def _is_here(self, x: Tensor) -> bool:
        return x.device == self.inbox.counts_C.device and not torch.is_grad_enabled()

    def _rows(self, x_TH: Tensor | None, partial_TH: Tensor, weight_H: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        from specdec.parallel.symmetric.rows_triton import launch_rows

        sent = (self.size - 1) * partial_TH.numel() * partial_TH.element_size()
        few = len(partial_TH) <= self.inbox.layout.channels and sent <= MAX_AS_MESSAGES
        return launch_rows(self.inbox, self.rank, self.nanoseconds, x_TH, partial_TH, weight_H, eps, few)


def connect(base: Group, device: torch.device) -> Group:
    """A group of the same ranks that exchanges through GPUs' memory; or `base`, with a warning, where GPUs can't reach it.

    All ranks call it together, and get the same.
    """
    try:
        inbox, give_back = open_inboxes(base, device)
    except Unreachable as error:
        if base.rank == 0:
            warnings.warn(f"ranks exchange over NCCL, which takes longer: {error}", stacklevel=2)
        return base
    group = SymmetricGroup(base, inbox)
    weakref.finalize(group, give_back).atexit = False  # a process that ends has given back everything
    return group
