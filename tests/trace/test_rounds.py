"""Trees that requests keep, against a walk down each, and against the texts without them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit.driver import Driver

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.engine.request import Request
from specdec.generation import Round

PROMPTS = ["Once upon a time", "The little dog", "Tom said no. Lily said no. Tom said no. Lily said"]
WORLDS: dict[str, tuple[str, SpecConfig | None]] = {
    "tree": ("head", SpecConfig(5, 4, 16)),
    "chain": ("head", SpecConfig(3, 1, 4)),
    "auto": ("head", SpecConfig("auto", 3, 9)),
    "ngram": ("ngram", SpecConfig(4, 2, 9)),
    "plain": ("", None),
}


@pytest.fixture(scope="module", params=WORLDS)
def decoder(request: pytest.FixtureRequest) -> Iterator[SpecDecoder]:
    draft, spec = WORLDS[request.param]
    head = shipped.draft_folder() if draft == "head" else draft or None
    options: dict[str, Any] = {"device": "cpu", "max_batch_size": 4, "max_seq_len": 128, "smoke": False}
    with SpecDecoder.from_pretrained(shipped.target_folder(), head, spec, **options) as made:
        yield made


def hold(each: Generation) -> None:
    """The text is what the rounds' paths emit, and origins and counters say the same."""
    assert each.rounds is not None and len(each.rounds) == each.stats.rounds
    assert [made.accepted for made in each.rounds] == each.stats.accepted_per_round
    begin = 1
    for made in each.rounds:
        tree, path = made.tree, made.path
        assert made.first == begin and len(path) == made.accepted + 1
        assert all(tree.parents[n] < n for n in range(1, len(tree.tokens))) and tree.tokens[0] == each.token_ids[begin - 1]
        emitted = [tree.tokens[n] for n in path[1:]] + [tree.chosen[path[-1]]]
        kept = each.token_ids[begin : begin + len(emitted)]
        assert (
            kept == emitted[: len(kept)] and each.origins[begin : begin + len(kept)] == [*range(1, len(path)), 0][: len(kept)]
        )
        siblings = [(parent, token) for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True)]
        assert len({*siblings}) == len(siblings)
        begin += len(kept)
    assert begin == len(each.token_ids)


@pytest.mark.slow_cases(keep=2)
def test_paths_are_the_text(decoder: SpecDecoder) -> None:
    """Keeps out: the tree of another row or round, a path that is not the target's, tokens counted twice, texts that change."""
    chance = random.Random(5)
    for settings in ({}, {"temperature": 0.9, "seed": 3}, {"stop": ["e d", "."]}, {"regex": "[A-Za-z ,.]{5,40}"}):
        params = [SamplingParams(max_tokens=chance.randrange(1, 30), **settings) for _ in PROMPTS]  # type: ignore[arg-type]
        with_trees, without = (decoder.generate(PROMPTS, params, trees=trees) for trees in (True, False))
        for one, other in zip(with_trees, without, strict=True):
            hold(one)
            assert one.token_ids == other.token_ids and other.rounds is None


@pytest.mark.slow_cases(keep=2)
def test_rows_beside_each_other_keep_their_own(decoder: SpecDecoder) -> None:
    """Keeps out: trees of rows that did not ask, of rows that moved, of drafts in a row that does not speculate."""
    chance, driver, requests = random.Random(7), Driver(decoder), list[Request]()
    for _ in range(12):
        ids, params = decoder.encode(chance.choice(PROMPTS)), SamplingParams(max_tokens=chance.randrange(1, 24))
        how = {"speculate": chance.random() < 0.7, "trees": chance.random() < 0.6}
        requests.append(driver.add(decoder.new_request(ids, params, **how)))
        for _ in range(chance.randrange(4)):
            driver.step()
    driver.run_until_idle()
    for request in requests:
        if request.rounds is None:
            continue
        hold(request.result())
        assert request.speculate or all(len(made.tree.tokens) == 1 for made in request.rounds)


@pytest.mark.slow_cases(keep=2)
def test_a_stream_has_the_same_rounds(decoder: SpecDecoder) -> None:
    """Keeps out: rounds that are lost or repeated where chunks are joined, and chunks of streams that did not ask."""
    stream, found = decoder.stream(PROMPTS[0], SamplingParams(max_tokens=20), trees=True), list[Round]()
    while True:
        try:
            chunk = next(stream)
        except StopIteration as end:
            assert end.value.rounds == found
            break
        assert chunk.rounds is not None
        found += chunk.rounds
    assert all(chunk.rounds is None for chunk in decoder.stream(PROMPTS[0], SamplingParams(max_tokens=5)))
