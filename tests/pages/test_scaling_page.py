"""docs/SCALING.md against the code of the replicas: its settings, and the numbers that it names."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy

from toolkit.paths import ROOT

from specdec.checks import setting_of
from specdec.parallel.symmetric.inbox import Layout
from specdec.serve.options import KEY_VARIABLE
from specdec.serve.replicas import application as replicas
from specdec.serve.replicas.application import HEALTH_SECONDS
from specdec.serve.replicas.metrics import REPLICAS
from specdec.serve.replicas.options import ReplicaOptions
from specdec.serve.replicas.replica import SCRAPE_SECONDS

PAGE = (ROOT / "docs" / "SCALING.md").read_text()
FILL = runpy.run_path(str(ROOT / "scripts" / "fill_scaling"), run_name="fill_scaling")


def test_settings_are_the_codes() -> None:
    """Keeps out: a setting that nobody can look up, and a default or a meaning that has changed."""
    (table,) = re.findall(r"^## Settings\n(.*?)\n\n", PAGE, re.S | re.M)
    rows = [tuple(cell.strip(" `") for cell in line.strip("|").split("|")) for line in table.splitlines()[2:]]
    assert rows == [(f.name, str(f.default), setting_of(f).meaning) for f in dataclasses.fields(ReplicaOptions)]


def test_numbers_and_names_are_the_codes() -> None:
    """Keeps out: a page that promises another time than the code gives, or a metric that has another name."""
    assert f"which are {HEALTH_SECONDS} seconds apart" in PAGE
    assert f"at most {SCRAPE_SECONDS:g} seconds" in PAGE
    assert f"gauge `{REPLICAS[0]}`" in PAGE and f"`{KEY_VARIABLE}`" in PAGE
    assert "`application(target, draft, spec, *, ray_options, **settings)`" in PAGE
    assert list(replicas.__annotations__)[:4] == ["target", "draft", "spec", "ray_options"]


def test_the_table_is_of_the_results() -> None:
    """Keeps out: a number typed by hand, and one whose result has been replaced."""
    found = FILL["read"](FILL["results"]())
    assert FILL["filled"](PAGE, found) == PAGE and len(found) > 15
    assert "| Llama 3.1 8B, plain step, batch 1 | 3.83 | 2.32 | 1.94 | *" in PAGE
    days = sorted({json.loads(file.read_text())["date"] for file in FILL["results"]()})
    assert f"Upright numbers were measured, on {' and '.join(days)}." in PAGE


def test_paper_is_told_from_measurement() -> None:
    """Keeps out: a guess that looks measured, and one that goes on standing beside a measurement."""
    line, measured = FILL["Line"]("70B", "tensor", "plain", 1), FILL["Measured"]
    found = {(line, 2): measured(20.0, 16.0), (line, 8): measured(7.0, 4.0)}
    assert FILL["table"](found).splitlines()[2] == "| Llama 3.1 70B, plain step, batch 1 |  | 20.0 | *12.0* | 7.00 |  |"
    found[line, 4] = measured(12.5, 8.0)
    assert FILL["table"](found).splitlines()[2].endswith("| 20.0 | 12.5 | 7.00 | 1.60 (80%) |")


def test_the_memory_of_exchanges_is_the_codes() -> None:
    """Keeps out: an inbox that has grown, of which a page says the old size."""
    two, eight = (round(Layout(ranks).num_bytes / 2**20) for ranks in (2, 8))
    assert f"It takes {two} MiB of each GPU with two ranks, {eight} with eight." in PAGE
