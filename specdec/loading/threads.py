"""How many CPU threads torch should use for a model, and setting that number.

torch has one number of threads for the whole process: every decoder and everything else in the process shares it, and the
decoder that was built last has set it.  This file knows sizes and processor counts, no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.checks import require_int
from specdec.options import usable_cpus

if TYPE_CHECKING:
    import torch

# One more thread must save more than it costs.  Threads of a product wait for each other at its end, and where another
# program holds a core they wait for that program: the shipped pair (0.4 MiB a layer) fell from 375 to 22 tokens a second with a
# second thread on a machine with one busy core.  A thread that reads 4 MiB of every layer works long enough to be worth it.
LEAST_BYTES_A_THREAD = 4 << 20

_seen: dict[str, int] = {}  # "allowed": threads torch may use, as specdec found it; "set": what specdec set last


def threads_for(weight_bytes: int, num_layers: int, allowed: int) -> int:
    """Threads for decoding with a model of that size: 1 for a tiny one, at most `allowed`.

    A decoding step reads every weight once, layer by layer, and its threads meet after every product, so the bytes of one
    layer say how much there is to share.
    """
    a_layer = weight_bytes // max(1, num_layers)
    return max(1, min(allowed, a_layer // LEAST_BYTES_A_THREAD))


def allowed_threads() -> int:
    """What torch would use by itself (the physical cores, or OMP_NUM_THREADS), or what the program last told torch to use."""
    import torch

    if torch.get_num_threads() != _seen.get("set"):
        _seen["allowed"] = torch.get_num_threads()
    return min(_seen["allowed"], usable_cpus())


def set_training_threads(device: torch.device, count: int | None) -> None:
    """Tells torch the threads of a training run; does nothing for one on a GPU.  count: None for all that are allowed.

    A training step works on thousands of tokens at once, so even a tiny model has work for every thread.
    """
    if device.type == "cpu":
        use_threads(allowed_threads() if count is None else require_int("threads", count, 1, usable_cpus()))


def use_threads(count: int) -> None:
    """Tells torch, for the whole process."""
    import torch

    allowed_threads()  # remembers what the program itself chose, before that number is overwritten
    torch.set_num_threads(count)
    _seen["set"] = count
