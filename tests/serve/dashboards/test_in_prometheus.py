"""The dashboard of examples/serve/ through a real Prometheus, which scrapes a server under load and answers every expression.

It runs where SPECDEC_PROMTOOL=1 says that Prometheus must be there, as CI does.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from toolkit.paths import ROOT
from toolkit.serving.server import Served, wait_until

from specdec import SpecConfig, SpecDecoder, shipped

PANELS = json.loads((ROOT / "examples" / "serve" / "grafana.json").read_text())
GRAFANAS = {"$__rate_interval": "30s", "$model": ".+", "$instance": ".+"}  # what Grafana puts in before it asks
# Nothing to show where a model has no such layers, and where nothing was cut off, lost or skipped.
EMPTY = ("specdec_local_pages", "specdec_states", "_connections_cut_total", "_lines_dropped_total", "_audit_skipped_total")


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """The URL of one that scrapes the target every second."""
    program = shutil.which("prometheus")
    assert program is not None, "needs prometheus, of Debian's package prometheus"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    scrape = {"job_name": "specdec", "static_configs": [{"targets": [target]}]}
    written = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(json.dumps(written))  # JSON is YAML
    flags = [
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen([program, *flags], stdout=log, stderr=log, cwd=folder) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", verify=False).status_code == 200
    except httpx.TransportError:  # it does not listen yet
        return False


def answer(url: str, expression: str) -> list[dict[str, Any]]:
    """Its series now, each with its labels and its value."""
    for name, value in GRAFANAS.items():
        expression = expression.replace(name, value)
    said = httpx.get(f"{url}/api/v1/query", params={"query": expression}, verify=False).json()
    assert said["status"] == "success", (expression, said)
    found: list[dict[str, Any]] = said["data"]["result"]
    return found


def shows(url: str, target: dict[str, str]) -> bool:
    """Whether some series has a number, and every series all labels that the legend names."""
    series = answer(url, target["expr"])
    for each in series:
        for label in target["legendFormat"].split("{{")[1:]:
            assert label.split("}}")[0] in each["metric"], (target, each)
    return any(math.isfinite(float(each["value"][1])) for each in series)


@pytest.mark.skipif(os.environ.get("SPECDEC_PROMTOOL") != "1", reason="needs SPECDEC_PROMTOOL=1 and Debian's prometheus")
def test_every_panel_shows_something(tmp_path: Path) -> None:
    """Keeps out: an expression that is right in itself and finds no series together (labels that do not meet), a legend with a
    label that its series lack, and a variable without values."""
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    settings: dict[str, Any] = {"device": "cpu", "smoke": False, "audit": 1.0, "audit_folder": tmp_path / "audit"}
    pair = shipped.target_folder(), shipped.draft_folder()
    with (
        SpecDecoder.from_pretrained(*pair, SpecConfig(3, 2, 6), **settings) as decoder,
        Served(decoder) as served,
        prometheus(tmp_path, f"127.0.0.1:{served.port}") as url,
    ):
        wait_until(lambda: is_ready(url) and answer(url, "specdec_running"), "a first scrape")
        for number in range(4):  # a counter has a rate only if it rises between two scrapes
            for prompt in ("Once upon a time", f"{number} bears"):
                assert served.post("/v1/completions", {**body, "prompt": prompt}).status_code == 200
            assert served.post("/v1/completions", {**body, "prompt": []}).status_code == 400
            time.sleep(0.5)
        targets = [target for panel in PANELS["panels"] for target in panel["targets"]]
        silent = list(targets)

        def all_show() -> bool:
            silent[:] = [each for each in silent if not shows(url, each) and not any(name in each["expr"] for name in EMPTY)]
            return not silent

        try:
            wait_until(all_show, "every panel shows something")
        finally:
            print([each["expr"] for each in silent])
        for variable in PANELS["templating"]["list"][1:]:
            query = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
            selector, label = query.rsplit(", ", 1)
            assert all(label in each["metric"] for each in answer(url, selector)) and answer(url, selector), query
