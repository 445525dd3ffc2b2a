"""The load benchmark of the server, with the shipped pair and few requests, and the numbers it makes of what clients saw."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from toolkit.paths import ROOT

from specdec.prompts.tokenizer import Tokenizer

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture()
def part(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/serving."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"serving.{name}")

    return load


def test_the_tokenizer_has_every_id_and_its_text_can_be_counted(part, tmp_path: Path) -> None:
    """Keeps out: a tokenizer with fewer ids than the model, and times between tokens that come from a wrong count."""
    work = part("work")
    work.save_tokenizer(tmp_path, 128_256)
    tokenizer = Tokenizer(tmp_path)
    ids = work.Work("m", 128_256, 5000, 1).prompt(3)
    text = tokenizer.decode(ids)
    assert work.count_tokens(text) == len(ids) and 3.5 < len(text) / len(ids) < 3.8
    assert tokenizer.decode([128_255]) and tokenizer.decode([ord("A") - 33]) == "A"
    assert tokenizer.encode(tokenizer.decode([1000, 127_000])) == [1000, 127_000]


def test_numbers_of_hand_made_records(part) -> None:
    """Keeps out: percentiles of the wrong end, a failure that counts as tokens, and a wait that counts as time to a token."""
    numbers, Record = part("numbers"), part("clients").Record
    fine = Record(0, arrived=1.0, sent=2.0, ended=6.0, chunks=[(3.0, 1), (5.0, 4)], tokens=5, accepted=3)
    quick = Record(1, arrived=2.0, sent=2.0, ended=4.0, chunks=[(2.5, 1), (3.0, 1)], tokens=2)
    broken = Record(2, arrived=2.0, sent=2.0, ended=3.0, error="RuntimeError: gone")
    rates = numbers.rates(1.0, [fine, quick, broken])
    assert rates["seconds"] == 5.0 and rates["tok_s"] == 7 / 5 and rates["requests_s"] == 2 / 5
    assert rates["failures"] == 1 and rates["errors"] == ["RuntimeError: gone"]
    found = numbers.latencies([fine, quick, broken])
    assert found["streams"] == 2 and found["counted_share"] == 1.0 and found["longest_pause_ms"] == 2000
    assert found["first_token_ms"] == {"p50": 500, "p99": 1000} and found["wait_ms"] == {"p50": 0, "p99": 1000}
    assert found["between_tokens_ms"]["all"] == {"p50": 500, "p99": 500}  # four tokens in two seconds, one in half a second
    assert [numbers.percentile(list(range(1, 101)), percent) for percent in (0, 50, 99, 100)] == [1, 50, 99, 100]


@pytest.mark.slow_cases(keep=0)
def test_the_script_runs(tmp_path: Path) -> None:
    """Keeps out: a script that has stopped working since it was last run on a GPU, and unequal work on the two sides."""
    out = tmp_path / "load.json"
    command = [sys.executable, str(BENCHMARKS), "serving.serve_load", "--tiny", "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for row, clients in zip(json.loads(out.read_text())["rows"], (1, 4), strict=True):
        waves = row["waves"]
        assert row["clients"] == clients and f"{clients:>2} clients: generate" in done.stdout
        assert all(waves["door"][name] == waves["generate"][name] > 0 for name in ("tokens", "accepted"))
        for part_of_row in (row["closed"], row["poisson"]):
            assert part_of_row["failures"] == 0 and part_of_row["streams"] == part_of_row["requests"]
            assert part_of_row["first_token_ms"]["p50"] > 0
            assert 0.5 < part_of_row["counted_share"] <= 1.0  # of these 2,048 ids many are single letters and single bytes


@pytest.mark.slow_cases(keep=0)
def test_streams_with_tools_run(tmp_path: Path) -> None:
    """Keeps out: a script that has stopped working since it was last run on a GPU, a kind of chats without calls of tools, and
    pieces of calls that nobody counts."""
    out = tmp_path / "streams.json"
    command = [sys.executable, str(BENCHMARKS), "serving.tool_streams", "--tiny", "--seconds", "0.5", "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["none", "required", "auto"]
    for kind, row in rows.items():
        assert row["failures"] == row["miscounted"] == 0 and row["streams"] == row["requests"] >= 6, kind
        assert row["counted_share"] > 0.9 and row["first_token_ms"]["p50"] > 0, kind


def test_what_a_chat_asks_for(part) -> None:
    """Keeps out: prompts that differ from run to run or between kinds of chats, and streams whose tokens can't be counted."""
    work = part("work").Work("m", 2048, 5, 7, chat={"tools": [1]})
    fields = work.fields(3)
    assert fields == work.fields(3) != work.fields(4) and len(fields["messages"][0]["content"].split()) == 5
    assert fields["stream_options"]["continuous_usage_stats"] and fields["tools"] == [1] and fields["max_tokens"] == 7
    plain = part("work").Work("m", 2048, 5, 7).fields(3)
    assert len(plain["prompt"]) == 5 and "messages" not in plain
    streams, Record = part("tool_streams"), part("clients").Record
    assert not streams.is_miscounted(Record(0, 1.0, chunks=[(2.0, 3), (2.5, 4)], tokens=8))
    for chunks in ([], [(2.0, 9)]):
        assert streams.is_miscounted(Record(0, 1.0, chunks=chunks, tokens=8))
