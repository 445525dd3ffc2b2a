"""The tuned table of this machine's GPUs, read once in a process."""

from __future__ import annotations

import warnings
from functools import cache

import torch

from specdec.ops.products.tuned.table import Origin, TunedTable, path_for, read


@cache
def tuned_table(device: torch.device) -> TunedTable | None:
    """The table for that device; None: nobody has run `specdec tune` on it.  Warns of a table that is of no use any more."""
    if device.type != "cuda":
        return None
    table, why = look(device)
    if why:
        warnings.warn(f"{why}; nearest thing that works: run specdec tune again, or delete the file", stacklevel=2)
    return table


def look(device: torch.device) -> tuple[TunedTable | None, str]:
    """The table for that GPU, and in words why a table that is there is not taken."""
    return look_for(torch.cuda.get_device_name(device))


def look_for(gpu: str) -> tuple[TunedTable | None, str]:
    """`look` for GPUs of that name."""
    path = path_for(gpu)
    table, why = read(path, Origin.here(gpu))
    return table, f"the tiles in {path} are not taken: {why}" if why else ""
