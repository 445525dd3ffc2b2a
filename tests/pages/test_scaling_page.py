"""docs/SCALING.md against the code of the replicas: its settings, and the numbers that it names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from specdec.checks import setting_of
from specdec.serve.options import KEY_VARIABLE
from specdec.serve.replicas import application as replicas
from specdec.serve.replicas.application import HEALTH_SECONDS
from specdec.serve.replicas.metrics import REPLICAS
from specdec.serve.replicas.options import ReplicaOptions
from specdec.serve.replicas.replica import SCRAPE_SECONDS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "SCALING.md").read_text()


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
