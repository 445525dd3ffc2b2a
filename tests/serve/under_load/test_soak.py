"""Thousands of calls of every kind through the HTTP server, with faults, after which the process holds what it held before.

Keeps out: a call that never ends, a row, a page, a thread or a connection that a disconnect or a fault leaves occupied, a list
that grows with every request, and a text that depends on what ran beside it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from toolkit.driver import Driver
from toolkit.soak.calls import Call, Mix
from toolkit.soak.clients import Outcome
from toolkit.soak.ends import compared, plain_calls, sorted_ends
from toolkit.soak.leaks import held, more_of
from toolkit.soak.run import Plan, pair_with_chat, soak

from specdec.engine.pages.forecast import KEPT
from specdec.generation import Stats


@pytest.mark.slow_cases(keep=0)
def test_hundreds_of_calls(tmp_path: Path) -> None:
    more = {"audit": 0.1, "audit_folder": str(tmp_path / "audit")}
    decoder = pair_with_chat(tmp_path, device="cpu", dtype="float32", max_batch_size=8, **more)
    plan = Plan(calls=160, warm_up=60, workers=14, processes=1, pause=20, max_tokens=10, exact=True)
    Driver(decoder).end_outputs([10] * KEPT)  # the list is full from the beginning: with so few calls it would grow
    report = soak(decoder, plan)
    assert report.problems == []
    assert sum(report.ends.values()) == plan.calls and report.ends["answered"] > plan.calls / 3, report.ends
    assert all(report.ends.get(end) for end in ("refused", "failed", "left")), report.ends
    assert report.structured and report.audited
    assert report.repeated > 10 and len(report.faults) >= 6, (report.repeated, report.faults)
    assert report.different >= report.plain > report.different // 2 and not report.unequal, "some had to wait, and did not"


def test_what_is_kept_is_found() -> None:
    """Keeps out: a soak that calls a process clean which keeps something of every request."""
    kept: list[Stats] = []
    before = held()
    assert more_of(before, held(), 200) == []
    kept += [Stats() for _ in range(200)]
    found = more_of(before, held(), 200)
    assert [line for line in found if "200 more objects of specdec.generation.Stats" in line]
    assert [line for line in found if "list from 0 to 200: {'Stats': 50}" in line]
    with open(__file__):
        assert [line for line in more_of(before, held(), 200) if line.startswith("open files")]


def test_wrong_ends_are_found() -> None:
    """Keeps out: a soak that passes over calls without an end or with an error that nobody planted, and over equal calls with
    different texts."""
    body = {"prompt": "a", "temperature": 0, "max_tokens": 3}
    calls = [Call(number, "completion", dict(body), False, "read", 0.0) for number in range(3)]
    fine = [Outcome(number, "answered", "x") for number in range(3)]
    assert sorted_ends(calls, fine, ()) == ({"done": 3}, []) and compared(calls, fine) == (1, 0)
    assert compared(calls, [*fine[:2], Outcome(2, "answered", "y")]) == (1, 1)
    for end in ("hung", "broken", "left", "refused"):
        reasons, found = sorted_ends(calls, [*fine[:2], Outcome(2, end)], ())  # type: ignore[arg-type]
        assert reasons["none"] == len(found) == 1
    assert len(sorted_ends(calls, fine[:2], ())[1]) == 1
    failed = [*fine[:2], Outcome(2, "failed", said="500: the request failed: fault 1: verify.")]
    assert sorted_ends(calls, failed, ["fault 1: verify."]) == ({"done": 2, "fault 1: verify.": 1}, [])
    for others in ((), ["fault 11: verify."]):
        assert len(sorted_ends(calls, failed, others)[1]) == 1, "nobody planted it"
    refused = Call(2, "completion", {**body, "n": 0}, True, "read", 0.0)
    assert len(sorted_ends([*calls[:2], refused], fine, ())[1]) == 1 and compared([*calls[:2], refused], fine) == (1, 0)
    (plain,) = plain_calls([replace(each, body={**each.body, "stream": True}) for each in calls], fine)
    assert plain.body == {**body, "speculate": False} and plain.same_text == calls[0].same_text


def test_calls_are_of_every_kind() -> None:
    """Keeps out: a mix from which a kind of call has disappeared, and calls that differ from run to run."""
    mix = Mix("m", ["Once upon a time there was a fox."], 100, 10, 200, True, {"<tool_call>": 7})
    calls = mix.calls(5, 2000, seed=3)
    assert calls[10:20] == mix.calls(15, 10, seed=3)
    assert {call.fate for call in calls} == {"read", "before", "midway", "slow"}
    assert {call.kind for call in calls} == {"completion", "chat", "response"}
    assert {call.invalid for call in calls} == {True, False}
    for kind in ("chat", "response"):
        with_tools = {
            (str(call.body["tool_choice"]), bool(call.body.get("stream")))
            for call in calls
            if call.kind == kind and "tools" in call.body
        }
        assert len(with_tools) == 8, "auto, required, a named one and none, streamed and not"
    fields = {name for call in calls for name in call.body}
    assert fields > {"top_p", "top_k", "seed", "stop", "n", "stream", "stream_options", "speculate", "max_completion_tokens"}
    assert fields > {"tools", "tool_choice", "parallel_tool_calls", "logit_bias", "chat_template_kwargs", "structured_outputs"}
    assert sum(call.same_text is not None for call in calls) > 1500
