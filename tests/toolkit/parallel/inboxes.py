"""Ranks in processes of a CPU that write into each other's memory, where the kernels for GPUs run in Triton's interpreter."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.parallel.group import Group
from specdec.parallel.symmetric.group import SymmetricGroup
from specdec.parallel.symmetric.inbox import Inbox, Layout

PATIENCE = 60.0


class NoGroup(Group):
    """A group that must not be asked: the kernels should have done it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError(f"the kernels did not take {x.dtype} {list(x.shape)}")


def inboxes(size: int, row_bytes: int, channels: int = 8) -> list[Inbox]:
    """One inbox for each rank, in memory that forked processes share.  A channel has room for one row of that length."""
    layout = Layout(size, channels, row_bytes, room=0)
    memory = [torch.zeros(layout.num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    found = []
    for _ in range(size):
        fault = torch.zeros(1, dtype=torch.int32).share_memory_()
        table_X = torch.tensor([each.data_ptr() for each in [*memory, fault]])
        found.append(Inbox(layout, table_X, torch.zeros(channels, dtype=torch.int32), fault))
        keep.extend([*memory, fault])
    return found


keep: list[Tensor] = []  # the memory behind the addresses


def on_processes(size: int, work: Callable[[SymmetricGroup], Any], row_bytes: int = 256, channels: int = 8) -> list[Any]:
    """What `work` gives on each of `size` ranks, all of them forked."""
    context = multiprocessing.get_context("fork")
    boxes, pipes, processes = inboxes(size, row_bytes, channels), [], []

    def run(rank: int, pipe: Any) -> None:
        with torch.inference_mode():
            pipe.send(work(SymmetricGroup(NoGroup(rank, size), boxes[rank])))

    for rank in range(size):
        mine, theirs = context.Pipe()
        processes.append(context.Process(target=run, args=(rank, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        answers = [pipe.recv() if pipe.poll(PATIENCE) else None for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
        keep.clear()
    return answers
