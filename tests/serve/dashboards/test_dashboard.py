"""What dashboards read: the names of metrics, other servers' names for them, and the dashboard of examples/serve/.

Prometheus' own promtool checks names and expressions where it is installed.  Where SPECDEC_PROMTOOL=1 says that it must be, as
CI does, a missing one fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from toolkit.paths import ROOT
from toolkit.serving.server import Served

from specdec import SpecDecoder

DASHBOARD = ROOT / "examples" / "serve" / "grafana.json"
WORDS = "by and on rate sum max histogram_quantile".split()  # of the query language, as far as the expressions have it
GRAFANAS = {"$__rate_interval": "5m", "$model": "tiny", "$instance": ".*"}  # what Grafana puts in before it asks
PROMETHEUS = {"instance", "job"}  # labels that Prometheus gives whatever it scrapes
ALL = "vllm,sglang"
Promtool = Callable[..., str]


@pytest.fixture(scope="module")
def exported(pair: SpecDecoder) -> dict[str, str]:
    """What /metrics answers after a request, without aliases ("") and with all of them."""
    pages = {}
    for aliases in ("", ALL):
        with Served(pair, metrics_aliases=aliases or None) as served:
            body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
            assert served.post("/v1/completions", body).status_code == 200
            pages[aliases] = served.get("/metrics").text
    return pages


@pytest.fixture
def promtool(tmp_path: Path) -> Promtool:
    """Runs promtool, and gives back what it says."""
    program = shutil.which("promtool")
    if program is None:
        said = "needs promtool, of Debian's package prometheus"
        pytest.fail(said) if os.environ.get("SPECDEC_PROMTOOL") == "1" else pytest.skip(said)

    def run(*arguments: str, text: str = "") -> str:
        done = subprocess.run([str(program), *arguments], input=text, text=True, capture_output=True, timeout=60, cwd=tmp_path)
        return done.stdout + done.stderr if done.returncode else ""

    return run


def expressions() -> list[str]:
    """Of every panel, with what Grafana puts in."""
    found = [target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]]
    for name, value in GRAFANAS.items():
        found = [each.replace(name, value) for each in found]
    return found


def labels_of(page: str) -> dict[str, set[str]]:
    """Every sample's name on a page of metrics, and its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def numbers(page: str) -> dict[tuple[str, str], float]:
    """(name of a sample, value of its label position or depth, or empty) -> number, summed over its other labels."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = sample.name, sample.labels.get("position", sample.labels.get("depth", ""))
            found[key] = found.get(key, 0) + sample.value
    return found


def test_every_expression_reads_what_there_is(exported: dict[str, str]) -> None:
    """Keeps out: a panel that stays empty because a metric or a label was renamed, and a metric that no panel shows."""
    known, read = labels_of(exported[""]), set()
    for expression in expressions():
        bare = re.sub(r'"[^"]*"|\[[^\]]*\]', "", expression)
        selectors = re.findall(r"\b([a-z_:]+)(?:\{([^}]*)\})?", re.sub(r"\b(?:by|on) \([^)]*\)", "", bare))
        names = {name: labels for name, labels in selectors if name not in WORDS}
        assert names, expression
        for name, labels in names.items():
            assert name in known, f"{expression}: there is no {name}"
            given = set(re.findall(r"\w+(?==|!)", labels)) - PROMETHEUS
            assert given <= known[name], f"{expression}: {name} has no label {given - known[name]}"
        for group in re.findall(r"\bby \(([^)]*)\)", bare):
            missing = {label for label in group.split(", ") if not any(label in known[name] for name in names)}
            assert not missing, f"{expression}: none of its metrics has the labels {missing}"
        read |= names.keys()
    families = {family.name for family in text_string_to_metric_families(exported[""]) if family.name.startswith("specdec_")}
    unread = {name for name in families if not any(each.startswith(name) for each in read)}
    assert not unread


def test_aliases_are_the_same_numbers(exported: dict[str, str]) -> None:
    """Keeps out: a dashboard of another server that shows nothing, or depths that are off by one; and series of an alias that
    nobody asked for."""
    found = numbers(exported[ALL])
    assert found["specdec_accepted_total", ""] > 0 and not [name for name in labels_of(exported[""]) if ":" in name]
    for theirs, ours in (("drafts", "speculated"), ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):
        assert found[f"vllm:spec_decode_num_{theirs}_total", ""] == found[f"specdec_{ours}_total", ""]
    positions = [label for name, label in found if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert positions == ["0", "1", "2", "3", "4"]
    for position in positions:
        depth = found["specdec_accepted_by_depth_total", str(int(position) + 1)]
        assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", position] == depth
    assert (
        sum(found["vllm:spec_decode_num_accepted_tokens_per_pos_total", each] for each in positions)
        == found["specdec_accepted_total", ""]
    )
    drafted, accepted, rounds = (found[f"specdec_{name}_total", ""] for name in ("drafted", "accepted", "speculated"))
    assert found["sglang:spec_accept_length", ""] == pytest.approx(1 + accepted / rounds)
    assert found["sglang:spec_accept_rate", ""] == pytest.approx(accepted / drafted)
    known = labels_of(exported[ALL])
    assert known["vllm:spec_decode_num_drafts_total"] == {"model_name", "engine"}
    assert known["sglang:spec_accept_rate"] == {"model_name"}


def test_promtool_takes_the_names(exported: dict[str, str], promtool: Promtool) -> None:
    """Keeps out: a gauge named *_total, a counter that is not, and a metric without a help text."""
    assert promtool("check", "metrics", text=exported[""]) == ""
    assert "specdec_rounds" in promtool(
        "check", "metrics", text=exported[""].replace("rounds_total counter", "rounds_total gauge")
    )


def test_promtool_takes_the_expressions(promtool: Promtool, tmp_path: Path) -> None:
    """Keeps out: a panel with an error of syntax, which Grafana alone would show."""

    def said(*expression: str) -> str:
        rules = [{"record": f"panel:{place}", "expr": each} for place, each in enumerate(expression)]
        (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
        return promtool("check", "rules", "rules.yml")

    assert len(expressions()) > 20 and said(*expressions()) == ""
    assert "panel:0" in said("rate(specdec_rounds_total)")
