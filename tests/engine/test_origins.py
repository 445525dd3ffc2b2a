"""Where a text's tokens came from, against a walk by hand down every tree that the target has read.

Keeps out: depths of another round, of another row or of tokens that were cut off, and results and streams that disagree.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit.driver import Driver, new_request
from toolkit.inside.hooks import wait_for

from specdec import Chunk, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.generation import Emitted

REPEATS = "Tom said no. Lily said no. Tom said no. Lily said no. Tom said"  # n-grams find something in it
PROMPTS = ["Once upon a time", "The little dog", "Lily and Tom", "One day, a big bear", REPEATS]
# name: drafter, shape, other settings
WORLDS: dict[str, tuple[str, SpecConfig | None, dict[str, Any]]] = {
    "tree": ("head", SpecConfig(5, 4, 16), {}),
    "chain": ("head", SpecConfig(3, 1, 4), {"prefix_caching": True}),
    "wide": ("head", SpecConfig(2, 6, 24), {"max_batch_size": 2, "page_size": 5}),
    "auto": ("head", SpecConfig("auto", 3, 9), {"prefix_caching": True}),
    "ngram": ("ngram", SpecConfig(4, 2, 9), {}),
    "plain": ("", None, {}),
}


@pytest.fixture(scope="module", params=WORLDS)
def decoder(request: pytest.FixtureRequest) -> Iterator[SpecDecoder]:
    draft, spec, settings = WORLDS[request.param]
    head = shipped.draft_folder() if draft == "head" else draft or None
    options: dict[str, Any] = {"device": "cpu", "max_batch_size": 4, "max_seq_len": 128, "smoke": False, **settings}
    with SpecDecoder.from_pretrained(shipped.target_folder(), head, spec, **options) as made:
        yield made


def options(chance: random.Random) -> SamplingParams:
    """How a request is sampled and where it ends, at random."""
    drawn: dict[str, Any] = chance.choice([{}, {}, {"temperature": 0.8, "seed": chance.randrange(9), "top_p": 0.9}])
    drawn |= chance.choice([{}, {}, {"stop": ["e d", "."]}, {"stop_token_ids": [*range(300, 420)]}, {"regex": "[a-z ]{3,30}"}])
    return SamplingParams(max_tokens=chance.choice([1, 2, 7, 24]), logprobs=chance.choice([None, None, 0]), **drawn)


@pytest.mark.slow_cases(keep=2)
def test_origins_are_those_of_the_trees(decoder: SpecDecoder) -> None:
    """Requests come and go beside each other, with and without speculation, so that rows move and rounds are cut off."""
    chance, driver = random.Random(str(decoder.settings.spec)), Driver(decoder)
    requests = [driver.submit(REPEATS, SamplingParams(max_tokens=32))]
    with driver.watch_origins() as counted:
        for _ in range(10):
            asked = [chance.choice(PROMPTS), options(chance), chance.random() < 0.8, chance.random() < 0.5]
            requests.append(driver.submit(*asked))
            for _ in range(chance.randrange(4)):
                driver.step()
        driver.run_until_idle()
    for request in requests:
        out = request.result()
        whole = counted.get(request, [0])
        assert out.origins == whole[: len(out.token_ids)] and len(whole) - len(out.origins) == out.stats.truncated
        cut = sum(origin > 0 for origin in whole[len(out.origins) :])
        assert sum(origin > 0 for origin in out.origins) == out.stats.accepted - cut
        assert whole.count(0) == out.stats.rounds + 1
    has_drafts = any(origin > 1 for request in requests for origin in request.origins)
    assert has_drafts == (decoder.head is not None), "nothing was accepted, so nothing was looked at"


@pytest.mark.slow_cases(keep=2)
def test_a_stream_has_those_of_the_result(decoder: SpecDecoder) -> None:
    """Keeps out: a slow reader's chunk with the origins of one round, and chunks that begin the depths anew."""
    sampling, chunks = SamplingParams(max_tokens=20, stop=["zz"]), list[Chunk]()
    stream = decoder.stream(PROMPTS[0], sampling)
    try:
        chunks.append(next(stream))
        assert wait_for(lambda: Driver(decoder).is_idle)  # so that all later rounds come as one chunk,
        Driver(decoder).settle()  # the last one too
        while True:
            chunks.append(next(stream))
    except StopIteration as end:
        whole = end.value
    assert len(chunks) <= 2 < whole.stats.rounds
    assert [len(chunk.origins) for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
    assert [origin for chunk in chunks for origin in chunk.origins] == whole.origins
    (plain,) = decoder.generate(PROMPTS[0], sampling, speculate=False)
    assert (plain.text, plain.token_ids) == (whole.text, whole.token_ids) and set(plain.origins) == {0}


def test_a_tokenizer_that_fails_leaves_no_token_without_its_origin() -> None:
    """Keeps out: the last chunk of a request that fails in the middle of a round, with tokens of which nothing is known."""

    def decode(ids: Any) -> str:
        if 8 in ids:
            raise OSError("the tokenizer broke")
        return "a" * len(ids)

    request = new_request([1, 2], 20, decode=decode, streaming=True)
    request.take_first(Emitted([5]))
    with pytest.raises(OSError, match="the tokenizer broke"):
        request.take_round(Emitted([6, 7, 8, 9, 10, 11]), 8, 5)
    chunk = request.next_chunk()
    assert chunk.token_ids == [5, 6, 7, 8] and chunk.origins == [0, 1, 2, 3, 4, 5, 0][: len(chunk.token_ids)]
