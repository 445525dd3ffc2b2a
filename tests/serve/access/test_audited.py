"""A server that audits itself: what operators see of a wrong text, and how they have it draft again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from toolkit.driver import Driver
from toolkit.inside.round_faults import fault
from toolkit.serving.server import Served, error_of
from toolkit.traffic.audit import audited

from specdec import SpecConfig, SpecDecoder, shipped

PATH, DRAFTING = "/v1/completions", "/v1/drafting"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[SpecDecoder]:
    settings: dict[str, Any] = {"audit": 1.0, "audit_stop": True, "audit_folder": tmp_path / "replays", "smoke": False}
    pair = shipped.target_folder(), shipped.draft_folder()
    with SpecDecoder.from_pretrained(*pair, SpecConfig(3, 2, 6), device="cpu", **settings) as decoder:
        yield decoder


def numbers(served: Served) -> dict[str, float]:
    families = text_string_to_metric_families(served.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    found = {s.name.removeprefix("specdec_") + s.labels.get("why", ""): s.value for s in samples}
    return {name: value for name, value in found.items() if name.startswith(("audit", "drafting"))}


@pytest.mark.parametrize("log_prompts", [False, True])
def test_operators_see_a_wrong_text(watched: SpecDecoder, tmp_path: Path, log_prompts: bool) -> None:
    """Keeps out: a finding that only a counter knows, texts of callers in files, a switch that does not switch back, and a
    token counted as audited that nobody was given."""
    with Served(watched, log_prompts=log_prompts, api_key="k") as served:
        key = {"authorization": "Bearer k"}
        assert numbers(served) == {
            "audit_texts_total": 0, "audit_tokens_total": 0, "audit_mismatch_total": 0, "audit_interrupted_total": 0,
            "audit_skipped_totallong": 0, "audit_skipped_totalqueue": 0, "audit_skipped_totalfailed": 0, "drafting_stopped": 0,
            "audit_waiting": 0, "audit_oldest_seconds": 0,
        }  # fmt: skip
        assert served.get(DRAFTING, headers=key).json() == {"object": "drafting", "enabled": True}
        assert served.post(PATH, {**BODY, "max_tokens": 0, "echo": True}, headers=key).status_code == 200
        assert not any(numbers(served).values()), "nothing was written"
        with fault("both sides"):
            text = served.post(PATH, BODY, headers=key).json()["choices"][0]["text"]
            audited(Driver(watched))
        seen = numbers(served)
        assert seen["audit_tokens_total"] == 24 and seen["audit_mismatch_total"] > 0 and seen["drafting_stopped"] == 1
        (line,) = [line for line in served.lines if line["event"] == "server"]
        (path,) = (tmp_path / "replays").iterdir()
        assert line["level"] == "error" and str(path) in line["message"] and text.strip()[:9] not in line["message"]
        texts = json.loads(path.read_text())["texts"]
        assert texts is None if not log_prompts else "Once upon a time" in texts["prompt"]
        assert served.get(DRAFTING, headers=key).json()["enabled"] is False
        assert error_of(served.post(DRAFTING, {"enabled": True}), 401)["code"] == "invalid_api_key"
        assert error_of(served.post(DRAFTING, {"enabled": 1}, headers=key), 400)["param"] == "enabled"
        assert error_of(served.post(DRAFTING, {"on": True}, headers=key), 400)["code"] == "unknown_parameter"
        assert served.post(DRAFTING, {"enabled": True}, headers=key).json() == {"object": "drafting", "enabled": True}
        assert numbers(served)["drafting_stopped"] == 0
        usage = served.post(PATH, BODY, headers=key).json()["usage"]["completion_tokens_details"]
        assert usage["accepted_prediction_tokens"] > 0


def test_drafts_end_in_what_runs(pair: SpecDecoder) -> None:
    """Keeps out: a switch that waits for requests under way, or that changes their texts."""
    driver, body = Driver(pair), {**BODY, "max_tokens": 30, "ignore_eos": True}
    with Served(pair) as served:
        want = served.post(PATH, body).json()["choices"][0]["text"]
        with driver.rounds_by_hand() as let_run, served.client().completions.create(**{**bare(body), "stream": True}) as events:
            for _ in range(3):
                let_run.release()
            pieces = [next(events).choices[0].text]
            pair.set_drafting(False)
            assert not pair.is_drafting  # at once, though a round runs
            for _ in range(60):
                let_run.release()
            pieces += [event.choices[0].text for event in events]
            assert not pair.is_drafting and "".join(pieces) == want
            pair.set_drafting(True)
            driver.settle()


def bare(body: dict[str, Any]) -> dict[str, Any]:
    """As the `openai` package takes it."""
    return {**{name: value for name, value in body.items() if name != "ignore_eos"}, "extra_body": {"ignore_eos": True}}


def test_a_server_without_a_drafter_has_nothing_to_switch(tmp_path: Path) -> None:
    """Keeps out: a switch that says yes and does nothing."""
    with SpecDecoder.from_pretrained(shipped.target_folder(), device="cpu") as decoder, Served(decoder) as served:
        assert served.get(DRAFTING).json()["enabled"] is False
        assert "no drafter" in error_of(served.post(DRAFTING, {"enabled": True}), 400)["message"]
