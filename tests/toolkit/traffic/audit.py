"""What tests do with a decoder's audit: wait for it, or do its work by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from specdec.audit.auditor import Auditor
from specdec.audit.idle_pass import every_other, why_anew
from specdec.engine.totals import Totals
from toolkit.driver import Driver

PATIENCE = 60.0  # seconds


def auditor_of(driver: Driver) -> Auditor:
    assert driver.decoder.auditor is not None, "the decoder has no audit"
    return driver.decoder.auditor


def audited(driver: Driver) -> Totals:
    """The engine's counters, once its thread has compared all answers that were chosen."""
    auditor, deadline = auditor_of(driver), time.monotonic() + PATIENCE
    while auditor.has_work:
        assert time.monotonic() < deadline, "the audit does not come to its end"
        time.sleep(0.005)
    driver.settle()
    return totals_of(driver)


def totals_of(driver: Driver) -> Totals:
    found: Totals = driver._engine.totals()
    return found


def work_by_hand(driver: Driver, is_wanted: Callable[[], bool] = lambda: False) -> None:
    """One part of the audit's work, while nothing runs and nobody else steps the engine."""
    auditor_of(driver).work(driver._engine, is_wanted)


def wanted_at(poll: int) -> Callable[[], bool]:
    """Somebody comes before that layer of the passes."""
    polls = count()
    return lambda: next(polls) >= poll


def weights(driver: Driver) -> dict[str, tuple[Any, ...]]:
    """Where each weight lies, and of which kind it is."""
    return {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in driver.decoder.model.named_parameters()}


def switch_drafting(driver: Driver, enabled: bool) -> None:
    """As `SpecDecoder.set_drafting`, for a test that steps the engine itself."""
    driver._scheduler.speculation.is_stopped = not enabled


def every_step() -> Callable[[], None]:
    """A poll that stops a check before each of its steps, once."""
    return every_other()


def begun_by(driver: Driver) -> Any:
    """The comparison that has made way on the first rank; None: none has."""
    return driver._workers.begun


def why_not_going_on(driver: Driver) -> str:
    """What the decoder notes of its target when it begins; empty: passes go on."""
    found: str = driver._runner.on_all_ranks(why_anew, driver.decoder.settings)
    return found


def at_ends(driver: Driver) -> list[int]:
    """How many answers the audit had compared as each request came to its end; grows while requests run."""
    seen = list[int]()
    driver._scheduler.on_answer.append(lambda request: seen.append(driver._scheduler.totals.audit_texts))
    return seen


def work_between_by_hand(driver: Driver) -> None:
    """As `work_by_hand`, as if requests ran."""
    auditor_of(driver).work_between(driver._engine)
