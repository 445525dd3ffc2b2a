"""What operators see: /metrics says what ran, and the log has a line a request without a word of any prompt or text."""

from __future__ import annotations

import io
import json
import logging
import time
from contextlib import redirect_stderr
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from toolkit.driver import Driver
from toolkit.serving.server import Served, error_of, wait_until

from specdec import Generation, SamplingParams, SpecDecoder
from specdec.serve import log
from specdec.serve.metrics import COUNTERS, DEPTHS, GAUGES, HISTOGRAMS
from specdec.serve.wire.errors import request_failed

TEXTS = ["Once upon a time", "The little dog"]
SECRET = "xylophone"
PATH = "/v1/completions"


def scraped(served: Served) -> dict[tuple[str, str], float]:
    """Every sample of /metrics: (name, values of its labels but the model's, or empty) -> number."""
    answer = served.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.documentation and family.name.startswith(("specdec_", "process_")) for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert all(s.name.startswith("process_") or s.labels.pop("model") == served.options.name for s in samples)
    return {(s.name, " ".join(s.labels.values())): s.value for s in samples}


def test_metrics_are_what_ran(pair: SpecDecoder) -> None:
    """Keeps out: counters that nobody adds to, depths that are off by one, and histograms that are not cumulative."""
    with Served(pair) as served:
        before, began = scraped(served), time.monotonic()
        body = {"model": "tiny", "prompt": TEXTS, "max_tokens": 20, "temperature": 0}
        assert served.post(PATH, body).status_code == served.post(PATH, {**body, "stream": True}).status_code == 200
        assert served.post(PATH, {**body, "top_p": 9}).status_code == 400
        served.requests_logged(3)  # a stream is counted a moment after its last event was sent
        after, seconds = scraped(served), time.monotonic() - began
        ran: list[Generation] = [item for item in pair.generate(TEXTS, SamplingParams(max_tokens=20)) for _ in range(2)]

        def added(name: str, label: str = "") -> float:
            return after[name, label] - before.get((name, label), 0)

        assert added("specdec_output_tokens_total") == sum(len(item.token_ids) for item in ran) == 80
        assert added("specdec_prompt_tokens_total") == sum(len(item.prompt_token_ids) for item in ran)
        assert added("specdec_accepted_total") == sum(item.stats.accepted for item in ran) > 0
        assert added("specdec_drafted_total") == sum(item.stats.drafted for item in ran)
        for depth in range(5):
            for name in ("reached_by_depth", "accepted_by_depth"):
                expected = sum(getattr(item.stats, name)[depth] for item in ran)
                assert added(f"specdec_{name}_total", str(depth + 1)) == expected, (name, depth)
        assert max(item.stats.rounds for item in ran) <= added("specdec_rounds_total") <= sum(i.stats.rounds for i in ran)
        assert added("specdec_speculated_total") == sum(item.stats.reached_by_depth[0] for item in ran)
        assert added("specdec_requests_total", "length") == 4
        ends = {end: added("specdec_http_requests_total", f"{end} {PATH}") for end in ("done", "refused", "failed", "gone")}
        assert ends == {"done": 2, "refused": 1, "failed": 0, "gone": 0}
        assert added("specdec_http_requests_total", "done /metrics") == 1
        assert before.keys() == after.keys(), "a series began with its first event"
        assert (added("specdec_http_responses_total", "200"), added("specdec_http_responses_total", "400")) == (3, 1)
        assert added("specdec_first_token_seconds_count") == 4 and added("specdec_between_tokens_seconds_count") == 76
        times = [added(f"specdec_{name}_seconds_sum") for name in ("queue", "first_token", "request")]
        assert 0 < times[0] < times[1] < times[2] < 4 * seconds
        assert added("specdec_queue_seconds_count") == added("specdec_request_seconds_count") == 4
        buckets = [value for (name, _), value in after.items() if name == "specdec_between_tokens_seconds_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == after["specdec_between_tokens_seconds_count", ""]
        assert after["specdec_running", ""] == after["specdec_waiting", ""] == after["specdec_pages_used", ""] == 0
        assert after["specdec_pages", ""] == Driver(pair).pages_total
        assert after["process_resident_memory_bytes", ""] > 1e6


def test_every_metric_is_there_from_the_start(served: Served) -> None:
    """Keeps out: a dashboard without lines until the first request, and a metric that lost its meaning."""
    families = {family.name: family for family in text_string_to_metric_families(served.get("/metrics").text)}
    names = {*GAUGES, *COUNTERS, *DEPTHS, "requests", "http_responses", *(f"{name}_seconds" for name in HISTOGRAMS)}
    names |= {
        "http_requests",
        "http_connections",
        "http_connections_cut",
        "log_lines_dropped",
        "audit_skipped",
        "audit_oldest_seconds",
    }
    assert {name for name in families if not name.startswith("process_")} == {f"specdec_{name}" for name in names}
    assert all(family.samples for family in families.values())


def test_gauges_show_what_runs(pair: SpecDecoder) -> None:
    """Keeps out: gauges that are read when nothing runs any more."""
    driver = Driver(pair)
    with Served(pair) as served:
        seen: dict[tuple[str, str], float] = {}

        def four_run() -> bool:
            let_run.release()  # choices come in between two rounds
            seen.update(scraped(served))
            return (seen["specdec_running", ""], seen["specdec_waiting", ""]) == (4, 2)

        with (
            driver.rounds_by_hand() as let_run,
            served.client().completions.create(
                model="tiny", prompt="Once", n=6, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            ),
        ):
            wait_until(four_run, "four choices run and two wait")
        assert 0 < seen["specdec_pages_used", ""] <= driver.pages_total


def test_a_request_ends_in_one_of_four_ways(served: Served) -> None:
    """Keeps out: a stream that failed after its status and counts as done, and a series for each path that callers make."""
    ends = {("GET", 200): "done", ("GET", 404): "refused", ("GET", 499): "gone", ("GET", 503): "failed", ("GET", 0): "failed"}
    assert {(method, status): log.LogEntry("", method, PATH, status=status).end for method, status in ends} == ends
    failed = log.LogEntry("", "POST", PATH, status=200)
    failed.failed(request_failed("no number"))
    assert failed.end == "failed"
    before = scraped(served)
    for path in ("/made/up", "/made/up/too"):
        assert served.get(path).status_code == 404
    after = scraped(served)
    assert after.keys() == before.keys()
    assert after["specdec_http_requests_total", "refused other"] - before["specdec_http_requests_total", "refused other"] == 2


# ---- the log ----


def test_a_line_a_request_without_its_text(pair: SpecDecoder) -> None:
    """Keeps out: prompts and texts of users in log files, also by way of errors that quote them, and probes in the log."""
    with Served(pair) as served:
        good: dict[str, Any] = {"model": "tiny", "prompt": f"The {SECRET} was", "max_tokens": 12, "temperature": 0}
        text = served.post(PATH, good).json()["choices"][0]["text"]
        served.post(PATH, {**good, "stream": True, "n": 2})
        served.requests_logged(2)  # its line comes a moment after its last event
        for wrong in ({"prompt": [SECRET, 3]}, {"stop": [SECRET, 1]}, {SECRET: 1}, {"model": SECRET}, {"seed": [SECRET]}):
            assert served.post(PATH, {**good, **wrong}).status_code in (400, 404)
        with Driver(pair).fail_in("verify", RuntimeError(f"can't read {SECRET}")):
            error_of(served.post(PATH, good), 500)
        for path in ("/health", "/ready", "/metrics"):
            served.get(path)
        lines = served.requests_logged(8)
        written = json.dumps(served.lines)
    assert SECRET not in written and text.strip() not in written
    assert [line["status"] for line in lines] == [200, 200, 400, 400, 400, 404, 400, 500]
    whole, stream, *_, failed = lines
    assert (whole["method"], whole["path"], whole["choices"], whole["stream"]) == ("POST", PATH, 1, False)
    assert (whole["completion_tokens"], whole["finish_reasons"]) == (12, ["length"]) and whole["prompt_tokens"] > 0
    assert stream["completion_tokens"] == 24 and 0 < stream["first_text_seconds"] <= stream["seconds"]
    assert lines[3]["error"] == {"code": None, "param": "stop"}
    assert (failed["error"]["code"], failed["error"]["type"]) == ("request_failed", "RuntimeError")
    assert "raising" in failed["error"]["traceback"] and "message" not in failed["error"]
    assert len({line["request_id"] for line in lines}) == 8


def test_texts_are_logged_where_that_is_asked_for(pair: SpecDecoder) -> None:
    """Keeps out: a flag that does nothing."""
    with Served(pair, log_prompts=True) as served:
        answer = served.post(PATH, {"model": "tiny", "prompt": [SECRET, "Once"], "max_tokens": 5})
        (line,) = served.requests_logged(1)
    assert line["prompt_texts"] == [SECRET, "Once"]
    assert line["output_texts"] == [choice["text"] for choice in answer.json()["choices"]]
    assert answer.headers["x-request-id"] == line["request_id"]


def test_a_bug_is_a_500_with_its_place_in_the_log(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a bug of ours that shows its insides to a caller, or quotes a prompt in the log."""

    def broken(*_: Any) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr("specdec.serve.endpoints.read_plan", broken)
    error = error_of(served.post(PATH, {"model": "tiny", "prompt": "Once"}), 500)
    assert error["code"] == "internal_error" and SECRET not in error["message"]
    wait_until(lambda: served.lines and "crash" in served.lines[-1], "the log has the place")
    crash = served.lines[-1]["crash"]
    assert crash["type"] == "KeyError" and any("endpoints.py" in place for place in crash["traceback"])
    assert SECRET not in json.dumps(served.lines)


def test_the_web_servers_own_lines_have_the_same_form(served: Served) -> None:
    """Keeps out: lines of another form in between, which end a log reader."""
    with served.connect() as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert served.lines[-1]["event"] == "server" and served.lines[-1]["level"] == "warning"
    assert logging.getLogger("uvicorn").handlers, "uvicorn would write its own form"


def test_a_log_that_nobody_reads_ends_no_request() -> None:
    """Keeps out: a server that fails because its log's reader went away."""
    closed = io.StringIO()
    closed.close()
    with redirect_stderr(closed):
        log.write_line("request", {"status": 200})
