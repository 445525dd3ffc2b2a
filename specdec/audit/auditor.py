"""Chooses finished answers, compares them with the reference while no request is there, and acts on what it finds.

All of it runs on the engine's thread.  The comparison is that of `specdec verify`: a dense pass in a wider dtype, and a bound
that is measured on the same text.  This module knows no HTTP and no metric's name.
"""

from __future__ import annotations

import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from specdec.audit.idle_pass import Wanted, read_while_idle
from specdec.batch.grammars.masks import fill_by_part, room_for_masks
from specdec.engine.loop import Engine
from specdec.engine.request import Request
from specdec.engine.totals import Totals
from specdec.grammar.library import Grammars
from specdec.loading.about.machine import versions
from specdec.loading.memory import AUDIT_PIECE
from specdec.loading.resolve import EngineSettings
from specdec.lossless.choice import GeneratedText
from specdec.lossless.reference import Judged, ReferenceCheck
from specdec.lossless.replay import FinishedText, ReplayFile
from specdec.prompts.tokenizer import Tokenizer

MAX_WAITING = 64  # texts that wait for an idle moment; further ones are skipped
MAX_FILES = 100  # of one decoder: a fault that shows in every text must not fill a disk
Tell = Callable[[str], object]


def warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class Waiting(NamedTuple):
    """A text that is to be compared.  since: when it had come to its end, by time.monotonic."""

    finished: FinishedText
    since: float


class Auditor:
    """The audit of one decoder, whose thread does its work (see `IdleWork`).

    totals: the engine's, where the audit counts.  names: what the decoder was loaded from, for replay files; see `named`.
    keeps_texts: whether replay files hold the prompt and the output as texts too.  tell: gets a line for each finding.
    max_waiting: texts that wait; further ones are skipped.  compare: what all ranks run.  clock: in seconds.
    """

    def __init__(
        self,
        settings: EngineSettings,
        totals: Totals,
        grammars: Grammars,
        vocab_size: int,
        tokenizer: Tokenizer,
    ) -> None:
        self._settings, self._totals, self._grammars = settings, totals, grammars
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self.names: dict[str, Any] = {"target": "", "draft": None}
        self._chance = random.Random()
        self._waiting: deque[Waiting] = deque()
        self._is_late = False
        self._has_begun = False  # the comparison of the first text that waits, which has made way
        self._making: Iterator[GeneratedText | None] | None = None  # of that text, until it is made
        self.files: list[Path] = []
        self.keeps_texts, self.max_waiting = False, MAX_WAITING
        self.compare, self.clock = read_while_idle, time.monotonic
        self._not_before = 0.0  # by the clock: when the next part may run between two steps
        self.tell: Tell = warn

    # ---- on the engine's thread ----

    def take(self, request: Request) -> None:
        """A request has come to its end: its answer is compared if chance says so."""
        options, output = self._settings.options, request.output
        if not output.token_ids or self._chance.random() >= options.audit:
            return
        if request.num_tokens > options.audit_max_tokens:
            self._totals.audit_skipped["long"] += 1
        elif len(self._waiting) >= self.max_waiting:
            self._totals.audit_skipped["queue"] += 1
            self._tell_that_it_is_late()
        else:
            self._waiting.append(Waiting(FinishedText.of(request), time.monotonic()))
            self._count_waiting()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def is_due(self) -> bool:
        """Whether a part may run between two steps, so that requests pay no larger share of the time than `audit_busy`."""
        return bool(self._waiting) and self._settings.options.audit_busy > 0 and self.clock() >= self._not_before

    def work(self, engine: Engine[Any], is_wanted: Callable[[], bool]) -> None:
        """Compares one text.  If somebody comes meanwhile, it stops between two layers, or between two parts of its grammar's
        masks, and goes on there at the next call.
        """
        self._compare(engine, is_wanted)
        self._totals.audit_interrupted += self._has_begun

    def work_between(self, engine: Engine[Any]) -> None:
        """Brings a comparison further by a layer or a part of masks, and then has requests run undisturbed for so long that the
        share holds.
        """
        share, began = self._settings.options.audit_busy, self.clock()
        self._compare(engine, lambda: True)
        ended = self.clock()
        self._not_before = ended + (ended - began) * (1 - share) / share

    def _compare(self, engine: Engine[Any], is_wanted: Callable[[], bool]) -> None:
        """Compares the first text that waits, until somebody comes."""
        finished = self._waiting[0].finished
        try:
            check = self._brought_further(engine, finished, is_wanted)
        except Exception as error:  # of any kind, most often too little memory
            self._done()
            self._totals.audit_skipped["failed"] += 1
            self._say(f"the audit could not compare a text of {len(finished.token_ids)} tokens: {type(error).__name__}")
            if self._settings.options.tensor_parallel_size > 1:  # other ranks may not have got as far: nothing can run any more
                raise
            return
        if check is None:
            self._has_begun = True
            return
        self._done()
        self._totals.audit_texts += 1
        self._totals.audit_tokens += len(finished.token_ids)
        if wrong := [each for each in check.off if not each.is_explained]:
            self._found(engine, finished, check, wrong)

    def _brought_further(
        self, engine: Engine[Any], finished: FinishedText, is_wanted: Callable[[], bool]
    ) -> ReferenceCheck | None:
        """Makes the text, and has all ranks compare it; None: the call has made way.  Each call does a part of either."""
        text = None
        if not self._has_begun:
            self._making = self._generated(finished)
        if self._making is not None:
            while (text := next(self._making)) is None:
                if is_wanted():
                    return None
            self._making = None
        return engine.runner.on_all_ranks(self.compare, self._settings, text, Wanted(is_wanted))

    def _done(self) -> None:
        self._waiting.popleft()
        self._has_begun, self._making = False, None
        self._is_late = self._is_late and len(self._waiting) > self.max_waiting // 2
        self._count_waiting()

    def _count_waiting(self) -> None:
        self._totals.audit_waiting = len(self._waiting)
        self._totals.audit_waits_since = self._waiting[0].since if self._waiting else None

    def _tell_that_it_is_late(self) -> None:
        """Tells once that answers are skipped, and again after half of those that wait have been compared."""
        if not self._is_late:
            self._is_late, waited = True, time.monotonic() - self._waiting[0].since
            self._say(
                f"the audit is late: {len(self._waiting)} answers wait, the oldest for {waited:.0f} s, and further ones are "
                "skipped, because it compares while no request is there; nearest settings that help: a smaller audit, or a "
                "larger audit_busy"
            )

    def _generated(self, finished: FinishedText) -> Iterator[GeneratedText | None]:
        """The text as the reference takes it, after a None for each part of its masks, which may take long.

        The draws of its row are those of `choice`.
        """
        choice, ids, masks = finished.choice, finished.token_ids, None
        if choice.grammar is not None:
            masks = room_for_masks(len(ids), self._vocab_size)
            yield from fill_by_part(masks, self._grammars.matcher(choice.grammar), ids, AUDIT_PIECE)
        yield GeneratedText(finished.prompt_ids, ids, finished.sampling, choice, masks)

    def _found(self, engine: Engine[Any], finished: FinishedText, check: ReferenceCheck, wrong: list[Judged]) -> None:
        """A text holds tokens that the target would not write."""
        self._totals.audit_mismatch += len(wrong)
        said = f"the audit found {len(wrong)} of {len(finished.token_ids)} tokens that the target would not write, first at "
        said += f"output token {wrong[0].index}"
        if len(self.files) < MAX_FILES:
            texts = None
            if self.keeps_texts and self._tokenizer.is_present:
                decode = self._tokenizer.decode
                texts = {"prompt": decode(finished.prompt_ids), "output": decode(finished.token_ids)}
            names = {**self.names, "versions": versions()}
            try:
                file = ReplayFile.of(finished, replace(check, off=wrong), self._settings, names, texts)
                self.files.append(file.write(Path(self._settings.options.audit_folder)))
                said += f"; replay file: {self.files[-1]}"
            except Exception as error:  # of any kind, most often a full disk: requests go on
                said += f"; its replay file could not be written: {getattr(error, 'strerror', None) or type(error).__name__}"
        if self._settings.options.audit_stop and not engine.scheduler.speculation.is_stopped:
            engine.scheduler.speculation.is_stopped = True
            said += "; nothing is drafted any more (audit_stop) until somebody says otherwise"
        self._say(said)

    def _say(self, said: str) -> None:
        with suppress(Exception):  # of any kind: whoever is told must not end the engine
            self.tell(said)
