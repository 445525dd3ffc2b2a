"""What tests do with a decoder's audit: wait for it, or do its work by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from specdec.audit.auditor import Auditor
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
