"""The reference's passes over one finished text, by all ranks, which end early when requests come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specdec.loading.memory import AUDIT_PIECE
from specdec.loading.resolve import EngineSettings
from specdec.lossless.choice import GeneratedText
from specdec.lossless.reference import ReferenceCheck, read_text, share_of_passes
from specdec.parallel.group import Group
from specdec.runner.workers import Workers


class MadeWay(Exception):
    """Raised between two layers, on all ranks at the same ones."""


class Wanted:
    """Whether somebody waits for the engine.  Only the first rank knows; the copies that other ranks get never say so."""

    def __init__(self, asks: Callable[[], bool]) -> None:
        self.asks = asks

    def __reduce__(self) -> tuple[Any, ...]:
        return Wanted, (nobody,)

    def check(self, group: Group, device: torch.device) -> None:
        """Raises MadeWay if so.  All ranks ask alike; each waits for its device, so that little is under way then."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        if group.all_reduce_min(0.0 if self.asks() else 1.0, device) == 0:
            raise MadeWay


def nobody() -> bool:
    return False


def read_while_idle(workers: Workers, settings: EngineSettings, text: GeneratedText, wanted: Wanted) -> ReferenceCheck | None:
    """One text against the reference, on one rank of those that all call this; None: somebody came who waits."""
    model, device = workers.verifier.model, workers.state.lens_B.device
    passes = share_of_passes(workers, settings, lambda: wanted.check(model.group, device))
    try:
        return read_text(passes, text, piece=AUDIT_PIECE)
    except MadeWay:
        return None
