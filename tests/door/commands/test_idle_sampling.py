"""Options of sampling that greedy decoding does not look at: Python warns, the command line refuses, HTTP takes them."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toolkit.serving.options import other_number

from specdec import SamplingParams, cli
from specdec.config import NOT_GREEDY
from specdec.serve.wire.fields import COMPLETIONS
from specdec.serve.wire.requests import read_plan

IDLE: dict[str, Any] = {name: other_number(name) for name in NOT_GREEDY}


@pytest.mark.parametrize("name", NOT_GREEDY)
def test_python_warns_where_the_command_line_refuses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: SamplingParams(top_p=0.9), which does nothing and said nothing."""
    with pytest.warns(UserWarning, match=rf"{name} would do nothing at temperature=0 \(greedy\)") as caught:
        SamplingParams(**{name: IDLE[name]})
    assert [Path(each.filename) for each in caught] == [Path(__file__)], "the caller's line is what the warning shows"
    flag = "--" + name.replace("_", "-")
    assert cli.main(["generate", flag, str(IDLE[name]), "hi"]) == 2
    assert f"{flag} would do nothing at --temperature 0 (greedy)" in capsys.readouterr().err


def test_equal_texts_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: three greedy texts that were meant to differ, which the command line refuses."""
    with pytest.warns(UserWarning, match="n=3 would give one text 3 times at temperature=0") as caught:
        SamplingParams(n=3)
    assert [Path(each.filename) for each in caught] == [Path(__file__)]
    assert cli.main(["generate", "--n", "3", "hi"]) == 2
    assert "would print one text 3 times at --temperature 0" in capsys.readouterr().err


def test_a_copy_warns_at_the_line_that_made_it() -> None:
    """Keeps out: a warning that shows a line of Python's dataclasses."""
    warm = SamplingParams(temperature=1.0, top_k=5, min_p=0.2)
    with pytest.warns(UserWarning, match="top_k and min_p would") as caught:
        replace(warm, temperature=0.0)
    assert [Path(each.filename) for each in caught] == [Path(__file__)]


def test_what_does_something_is_silent() -> None:
    """Keeps out: warnings at temperature 1, of defaults that a caller spells out, and of copies that specdec makes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingParams(temperature=0.7, **IDLE)
        SamplingParams(temperature=0, top_p=1, top_k=0, min_p=0, seed=None, repetition_penalty=1.2)
        copy.copy(SamplingParams(n=3, temperature=0.5)).of_choice(1)


def test_a_body_with_a_client_s_defaults_is_taken_silently() -> None:
    """Keeps out: a line in a server's log for every greedy request of a client that sends top_p."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = read_plan({"model": "m", "prompt": "hi", "temperature": 0, **IDLE}, COMPLETIONS, "m", None)
        assert plan.sampling_of(1, 5).of_choice(0).seed == IDLE["seed"] + 1
