"""Why each call of the soak ended as it did, which of these ends must not be, and whether equal calls got equal answers.

This file knows calls and outcomes; it knows no server.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from toolkit.soak.calls import Call
from toolkit.soak.clients import Outcome

ALLOWED = {  # ends of calls that can be answered, and why
    "answered": "done", "busy": "asked to wait: the queue was full", "left": "the client left",
}  # fmt: skip
LEAVING = ("before", "midway")  # fates


def reason_of(call: Call, outcome: Outcome, faults: Collection[str]) -> str | None:
    """Why the call ended so; None: for no reason that there should be.

    faults: names of those that have happened, of which a call that failed must name one.
    """
    if outcome.end == "left" and call.fate not in LEAVING:
        return None
    if call.invalid:
        asked = {end: ALLOWED[end] for end in ("left", "busy")}  # the queue is looked at before a prompt's ids are
        return {"refused": "refused, as it had to be", **asked}.get(outcome.end)
    if outcome.end == "failed":
        return next((name for name in faults if name in outcome.said), None)
    return ALLOWED.get(outcome.end)


def sorted_ends(calls: Sequence[Call], outcomes: Sequence[Outcome], faults: Collection[str]) -> tuple[Counter[str], list[str]]:
    """(how many calls ended for each reason, what must not be: ends without one, and calls without an end)."""
    by_number = {outcome.number: outcome for outcome in outcomes}
    found = [] if len(by_number) == len(outcomes) == len(calls) else [f"{len(outcomes)} ends of {len(calls)} calls"]
    reasons = Counter[str]()
    for call in calls:
        outcome = by_number.get(call.number)
        reason = None if outcome is None else reason_of(call, outcome, faults)
        reasons[reason or "none"] += 1
        if reason is None and outcome is not None:
            found.append(f"call {call.number} was {outcome.end} ({outcome.said}): {call}"[:600])
    return reasons, found


def compared(calls: Sequence[Call], outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """(different calls that were answered more than once, how many of them got more than one answer)."""
    several = [found for found in digests(calls, outcomes).values() if len(found) > 1]
    return len(several), sum(len(set(found)) > 1 for found in several)


def digests(calls: Sequence[Call], outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """Of the answers to calls that have one right answer, by `Call.same_text`."""
    keys = {call.number: call.same_text for call in calls}
    found: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.end == "answered" and (key := keys[outcome.number]):
            found[key].append(outcome.digest)
    return found


def plain_calls(calls: Sequence[Call], outcomes: Sequence[Outcome]) -> list[Call]:
    """One call for each different one that was answered, to be decoded plainly and read at once."""
    answered = digests(calls, outcomes)
    by_key = {key: call for call in calls if (key := call.same_text) in answered}
    return [replace(call, body=_plain(json.loads(json.dumps(call.body))), fate="read", after=0.0) for call in by_key.values()]


def _plain(body: dict[str, object]) -> dict[str, object]:
    for name in ("stream", "stream_options"):
        body.pop(name, None)
    return {**body, "speculate": False}
