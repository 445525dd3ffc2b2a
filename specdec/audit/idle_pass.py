"""The reference's passes over one finished text, by all ranks: they make way for requests, and go on where they stopped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from specdec.config import SamplingParams
from specdec.loading.memory import AUDIT_PIECE
from specdec.loading.resolve import EngineSettings
from specdec.lossless.choice import GeneratedText
from specdec.lossless.passage import MadeWay
from specdec.lossless.passes import DensePasses, Poll
from specdec.lossless.reference import ReferenceCheck, TextCheck, share_of_passes
from specdec.models.checkpoints.config_values import one_line
from specdec.options import EngineOptions
from specdec.parallel.group import Group
from specdec.runner.workers import Workers

WARM_TOKENS = 256  # of the made-up text
SHORT_TOKENS = 8  # of the text that shows whether passes go on
MAX_CHANGE = 0.01  # of its hidden states: rounding at most


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


def why_anew(workers: Workers, settings: EngineSettings) -> str:
    """Notes whether the target's passes can go on where they stopped, which a short text shows, and says why not; empty: they
    can.

    The layers of a model from transformers may leave something for each other that nobody hands them.
    """
    model, device = workers.verifier.model, workers.state.lens_B.device
    ids = [place % model.config.vocab_size for place in range(SHORT_TOKENS)]
    whole = DensePasses(model, replace(settings, device=device), None)
    halting = DensePasses(model, replace(settings, device=device), None, poll=every_other())
    model.goes_on = True  # so that the pass does
    why = "one that does ends in other hidden states"
    with torch.inference_mode():
        want_TH, got_TH = whole.hidden(ids).float(), None
        try:
            while got_TH is None:
                with suppress(MadeWay):
                    got_TH = halting.hidden(ids).float()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind: the code is the model's own
            why = f"one that does ends in {type(error).__name__}: {one_line(error)}"
    alike = got_TH is not None and bool((got_TH - want_TH).norm() <= MAX_CHANGE * want_TH.norm())
    model.goes_on = model.group.all_reduce_min(float(alike), device) > 0
    return "" if model.goes_on else "one of another rank does not" if alike else why


def check_share(options: EngineOptions, why: str) -> None:
    """ValueError where comparisons may have a layer at a time, of a target whose passes can't go on: none would ever end."""
    if options.audit_busy:
        raise ValueError(
            f"audit_busy must be 0 for this target, whose passes can't go on where they have stopped ({why}), got "
            f"{options.audit_busy}; nearest setting that works: audit_busy=0; comparisons then run while no request is there"
        )


def every_other() -> Poll:
    """A poll that stops a pass before each of its layers, once."""
    polls = count()

    def poll() -> None:
        if next(polls) % 2 == 0:
            raise MadeWay

    return poll


def read_while_idle(
    workers: Workers, settings: EngineSettings, text: GeneratedText | None, wanted: Wanted
) -> ReferenceCheck | None:
    """A text against the reference, on one rank of those that all call this; None: the call has made way.

    text: None: the one of the last call, which has made way, goes on.  What the first poll is asked before always runs, so that
    each call brings a text further by a layer or by a piece of its logits.
    """
    model, device, polls = workers.verifier.model, workers.state.lens_B.device, count()

    def poll() -> None:
        if next(polls):
            wanted.check(model.group, device)

    if text is not None:
        workers.begun = TextCheck(share_of_passes(workers, settings), text, piece=AUDIT_PIECE)
    check, workers.begun = workers.begun, None
    check.passes.poll = poll
    try:
        return check.run()
    except MadeWay:
        workers.begun = check
        return None
