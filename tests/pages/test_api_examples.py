"""The examples of docs/API.md run as they stand, on the shipped pair."""

from __future__ import annotations

import re

import pytest
from toolkit.paths import ROOT

PAGE = (ROOT / "docs" / "API.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M)
SHOWN = ("SpecDecoder", "AsyncSpecDecoder", "EngineOptions", "SpecConfig", "SamplingParams", "Structured output")


def test_the_main_classes_have_one() -> None:
    """Keeps out: six hundred lines of tables in which nobody sees what a call looks like."""
    for name in SHOWN:
        words = [name] if name.isidentifier() else ["json_schema="]
        assert any(all(f"{word}(" in example or word in example for word in words) for example in EXAMPLES), name
    assert len(EXAMPLES) >= 5 and max(len(example.splitlines()) for example in EXAMPLES) <= 14


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an example of a name that was changed, or that prints nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    exec(compile(example, "docs/API.md", "exec"), {"__name__": "__main__"})
    out, err = capsys.readouterr()
    assert len(out.strip()) > 3 and not err
