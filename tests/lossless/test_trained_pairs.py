"""Trained pairs: the text is the target's own, and heads are accepted as often as an independent reference measured.

Keeps out: bugs in the draft path, which never show in the text, only in the accept length.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from toolkit.models import is_greedy
from toolkit.oracles import expected
from toolkit.paths import PAIR
from transformers import AutoModelForCausalLM

from specdec import SamplingParams, SpecConfig, SpecDecoder

HEADS = ["stories260K-eagle3", "stories260K-eagle2"]
SHAPES = [(3, 1, 4), (5, 1, 6), (3, 4, 8), (5, 4, 16), (5, 8, 32)]
MEASURED = 8  # prompts


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected_rows(folder: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    rows = json.loads((folder / "expected.json").read_text())["rows"]
    return {(row["num_steps"], row["topk"], row["num_draft_tokens"]): row for row in rows}


@pytest.mark.parametrize("head", HEADS)
def test_every_measured_setting_is_tested(shared: Path, head: str) -> None:
    """Keeps out: a row of expected.json that nobody compares."""
    assert set(expected_rows(shared / "models" / head)) == set(SHAPES)


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_stories_equal_the_reference_round_by_round(shared: Path, head: str, shape: tuple[int, int, int]) -> None:
    """Keeps out: wrong features, aux layers, positions, scores, tie order, tree or extend rows of a head.

    Of the reference's prompts the first ones, whose hundreds of rounds are compared one by one.
    """
    folder = shared / "models" / head
    row = expected_rows(folder)[shape]
    prompts = read_lines(folder / "prompts.jsonl")[:MEASURED]
    decoder = SpecDecoder.from_pretrained(
        shared / "models" / "stories260K", folder, SpecConfig(*shape), device="cpu", dtype="float32", max_batch_size=16
    )
    sampling = SamplingParams(max_tokens=128, stop_token_ids=[1, 2])
    outputs = decoder.generate([p["token_ids"] for p in prompts], sampling)
    assert [out.token_ids for out in outputs] == [p["greedy_ids"] for p in prompts]
    rounds = [(out.stats.accepted_per_round, want) for out, want in zip(outputs, row["accepted_per_round"])]
    assert len(rounds) == MEASURED and sum(len(want) for _, want in rounds) > 200
    equal = sum(a == b for got, want in rounds for a, b in zip(got, want))
    assert equal >= 0.99 * max(sum(len(want) for _, want in rounds), sum(len(got) for got, _ in rounds))


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 4, 16), (4, 1, 5)], ids=str)
def test_the_shipped_pair_equals_transformers(shape: tuple[int, int, int]) -> None:
    """Keeps out: a pair in the box that does not load, does not speculate, or whose text is not its target's."""
    prompts = [line["prompt"] for line in read_lines(PAIR / "prompts.jsonl")[:4]]
    decoder = SpecDecoder.from_pretrained(
        PAIR / "target", PAIR / "draft", SpecConfig(*shape), device="cpu", dtype="float32", max_batch_size=4
    )
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype="float32").eval()
    assert all(len(out.token_ids) == 32 and is_greedy(model, out.prompt_token_ids, out.token_ids) for out in outputs)


def test_every_row_of_the_shipped_pair_is_tested() -> None:
    """Keeps out: a row of expected.json that nobody compares."""
    assert list(expected.expected()) == expected.SHAPES


@pytest.mark.slow_cases
@pytest.mark.parametrize("shape", expected.SHAPES, ids=str)
def test_the_shipped_head_is_accepted_as_expected(shape: tuple[int, int, int]) -> None:
    """Keeps out: what never shows in the text: wrong features, positions, scores, tie order, trees or extend rows."""
    assert expected.measure(shape) == expected.expected()[shape]


@pytest.mark.slow_cases
@pytest.mark.parametrize("shape", [(5, 4, 16), (5, 1, 6)], ids=str)
def test_a_long_extend_drafts_as_a_short_one_does(shape: tuple[int, int, int]) -> None:
    """Keeps out: a last row that is computed apart from the others and reads other keys than it would among them."""
    # Batches of these tests have fewer rows than the constant allows.
    assert expected.measure(shape, few_rows=0) == expected.expected()[shape]
