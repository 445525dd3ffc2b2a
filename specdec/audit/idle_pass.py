"""The reference's passes over one finished text, by all ranks, which end early when requests come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specdec.config import SamplingParams
from specdec.loading.memory import AUDIT_PIECE
from specdec.loading.resolve import EngineSettings
from specdec.lossless.choice import GeneratedText
from specdec.lossless.passes import DensePasses
from specdec.lossless.reference import ReferenceCheck, read_text, share_of_passes
from specdec.parallel.group import Group
from specdec.runner.workers import Workers

WARM_TOKENS = 256  # of the made-up text


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


def run_once(workers: Workers, settings: EngineSettings) -> None:
    """What the passes over a text run, once, so that a GPU's kernels are compiled before somebody waits for the engine.

    Without what a cache rounds: a float8 cache takes its scales from the first keys and values that it sees.
    """
    model, device = workers.verifier.model, workers.state.lens_B.device
    passes = DensePasses(model, replace(settings, device=device), None)
    tokens = min(WARM_TOKENS, settings.options.audit_max_tokens, settings.max_seq_len)
    ids = [place % model.config.vocab_size for place in range(tokens)]
    text = GeneratedText(ids[:1], ids[1:], SamplingParams(temperature=1.0, top_p=0.9, seed=0))
    with torch.inference_mode():
        places = range(max(0, tokens - 1 - AUDIT_PIECE), tokens - 1)
        with passes.wide():
            text.scores(passes.logits(passes.hidden(ids)[places.start : places.stop]), places)
        passes.logits(passes.hidden(ids)[places.start : places.stop])


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
