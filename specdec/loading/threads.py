"""How many CPU threads torch should use for a model, and setting that number for one thread's work.

torch keeps a number for each thread that has computed, and one that new threads take.  A decoder's number is that of the
thread that runs it; whoever loads a decoder keeps their own, and so do all others.  This file knows sizes and processor counts,
no model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from specdec.checks import require_int
from specdec.options import usable_cpus

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# One more thread must save more than it costs.  Threads of a product wait for each other at its end, and where another
# program holds a core they wait for that program: the shipped pair (0.4 MiB a layer) fell from 375 to 22 tokens a second with a
# second thread on a machine with one busy core.  A thread that reads 4 MiB of every layer works long enough to be worth it.
MIN_BYTES_A_THREAD = 4 << 20


class _Seen(threading.local):
    """What this thread was allowed when specdec came, and what specdec has set since; 0: nothing."""

    allowed = 0
    set = 0


_seen = _Seen()
_LOCK = threading.Lock()


def threads_for(weight_bytes: int, num_layers: int, allowed: int) -> int:
    """Threads for decoding with a model of that size: 1 for a tiny one, at most `allowed`.

    A decoding step reads every weight once, layer by layer, and its threads meet after every product, so the bytes of one
    layer say how much there is to share.
    """
    a_layer = weight_bytes // max(1, num_layers)
    return max(1, min(allowed, a_layer // MIN_BYTES_A_THREAD))


def allowed_threads(cpus: int | None = None) -> int:
    """What torch would use in this thread by itself (the physical cores, or OMP_NUM_THREADS), or what it was told to use.

    cpus: that the process may use; None: asks the system.
    """
    import torch

    if torch.get_num_threads() != _seen.set:
        _seen.allowed, _seen.set = torch.get_num_threads(), 0
    return min(_seen.allowed, usable_cpus() if cpus is None else cpus)


def set_training_threads(device: torch.device, count: int | None, cpus: int | None = None) -> None:
    """Tells torch the threads of a training run in this thread; does nothing for one on a GPU.

    A training step works on thousands of tokens at once, so even a tiny model has work for every thread.
    count: None for all that are allowed.  cpus: see `allowed_threads`.
    """
    if device.type == "cpu":
        use_threads(allowed_threads(cpus) if count is None else require_int("threads", count, 1, cpus or usable_cpus()))


def use_threads(count: int | None) -> None:
    """Tells torch how many CPU threads the work of this thread takes.  None: as many as it takes now."""
    import torch

    if count is None or torch.get_num_threads() == count:
        return
    allowed_threads()  # remembers what the program itself chose, before that number is overwritten
    with _LOCK:  # torch sets a thread's number and the one of new threads together; the second is put back
        before = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        _in_new_thread(lambda: torch.set_num_threads(before))
    _seen.set = count


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Inside, the work of this thread takes so many; at the end as many as before, whatever was set inside."""
    import torch

    before = torch.get_num_threads()
    use_threads(count)
    try:
        yield
    finally:
        use_threads(before)


def _in_new_thread(work: Callable[[], T]) -> T:
    """What the work gives in a thread that has no number of its own yet."""
    given: list[T] = []
    thread = threading.Thread(target=lambda: given.append(work()))
    thread.start()
    thread.join()
    return given[0]
