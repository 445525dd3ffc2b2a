"""Ranks that a launcher has started, without the seconds in which eight Pythons import torch: they are forks of this process.

What torchrun would set in their environment is set here.  This module knows no model.
"""

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from specdec.loading.ranks import serve_first_rank
from specdec.options import EngineOptions

HOST = "127.0.0.1"


@contextmanager
def launched_ranks(size: int) -> Iterator[None]:
    """Within the block this process is the first of `size` ranks, and its next decoder, or `Ranks`, is over all of them.

    They end with what the block makes of them.  After the block no process is left.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    place = {
        "WORLD_SIZE": str(size), "MASTER_ADDR": HOST, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    context, before = multiprocessing.get_context("fork"), dict(os.environ)
    processes = [
        context.Process(target=_serve, args=(place, rank), name=f"rank {rank}", daemon=True) for rank in range(1, size)
    ]
    for process in processes:
        process.start()
    os.environ.update(place, RANK="0")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for process in processes:
            process.kill()
            process.join()


def _serve(place: dict[str, str], rank: int) -> None:
    gc.freeze()  # what it has of its parent may wait, where it is given back, for threads that were not forked
    os.environ.update(place, RANK=str(rank))
    serve_first_rank(EngineOptions(device="cpu", tensor_parallel_size=int(place["WORLD_SIZE"])))
