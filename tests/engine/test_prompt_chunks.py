"""Prompts in chunks between rounds, on real (random) models: whatever the chunks, every text and every draft is the same.

Keeps out: a chunk that reads a page before its prompt's earlier chunks wrote it, a round that writes to the pages of a prompt
that is still entering, a row that starts with what an unfinished prompt left in it.
"""

import pytest
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.pages import ring_passes_take

from specdec import Generation, SamplingParams, SpecConfig

LONG = [(5 * i * i + i) % 40 for i in range(71)]


def beside_running_rows(driver: Driver, size: int, sampled: bool) -> list[Generation]:
    """Three requests run, and then a long prompt and two short ones enter, in chunks of at most that cost."""
    driver.set_chunk(size)
    options = {"temperature": 0.8, "top_p": 0.9} if sampled else {}
    requests = []
    for index, prompt in enumerate(ragged_prompts(40, 3, seed=5)):
        params = SamplingParams(max_tokens=24 - 5 * index, seed=index if sampled else None, **options)
        requests.append(driver.submit(prompt, params))
    for _ in range(5):
        driver.step()
    for index, prompt in enumerate([LONG, [7, 3], [9] * 6]):
        params = SamplingParams(max_tokens=9, seed=10 + index if sampled else None, **options)
        requests.append(driver.submit(prompt, params))
    driver.run_until_idle()
    driver.assert_nothing_leaked()
    return [request.result() for request in requests]


TREE, CHAIN, AUTO = SpecConfig(3, 4, 12), SpecConfig(3, 1, 4), SpecConfig("auto", 4, 12)
PLAIN, KEPT, SMALL = {}, {"prefix_caching": True}, {"kv_cache_dtype": "int8"}


@pytest.mark.slow_cases(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize(  # every value meets both kinds of heads, or two shapes
    ("kind", "spec", "settings"),
    [
        ("eagle3", TREE, PLAIN), ("eagle1", TREE, KEPT), ("eagle1", CHAIN, PLAIN), ("eagle3", CHAIN, SMALL),
        ("eagle3", AUTO, KEPT),
    ],
    ids=str,
)  # fmt: skip
def test_chunks_change_nothing(zoo: Zoo, kind: str, spec: SpecConfig, settings: dict) -> None:
    """For chunks of 1, 7, 64 and all tokens the ids are equal, and so is each round's acceptance where num_steps is fixed.

    Each size runs greedily or sampled: 7, which ends inside pages, runs both ways.
    """
    decoder = zoo.decoder("llama", kind, spec, page_size=4, max_batch_size=4, max_seq_len=96, **settings)
    driver = Driver(decoder)
    for sampled, sizes in ((False, (1, 7)), (True, (7, 64))):
        want = beside_running_rows(driver, 10_000, sampled)
        if not sampled and "kv_cache_dtype" not in settings:
            assert want[3].token_ids == zoo.greedy("llama", LONG, 24)[:9]
        for size in sizes:
            got = beside_running_rows(driver, size, sampled)
            assert [out.token_ids for out in got] == [out.token_ids for out in want], size
            if not spec.is_auto and "kv_cache_dtype" not in settings:
                assert [out.stats.accepted_per_round for out in got] == [out.stats.accepted_per_round for out in want], size


@pytest.mark.slow_cases
@pytest.mark.parametrize("spec", [SpecConfig(3, 4, 12), SpecConfig(3, 1, 4)], ids=str)
def test_chunks_change_nothing_where_pages_go_in_a_ring(zoo: Zoo, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer has a window, so a long prompt's pages are written anew while it enters beside rows that run."""
    ring_passes_take(24, monkeypatch)
    driver = Driver(zoo.decoder("mistral", "eagle3-window", spec, page_size=4, max_batch_size=4, max_seq_len=96))
    assert driver.ring is not None
    want = beside_running_rows(driver, 10_000, sampled=False)
    assert want[3].token_ids == zoo.greedy("mistral", LONG, 24)[:9]
    for size in (1, 7, 64):
        got = beside_running_rows(driver, size, sampled=False)
        assert [out.token_ids for out in got] == [out.token_ids for out in want], size
        assert [out.stats.accepted_per_round for out in got] == [out.stats.accepted_per_round for out in want], size


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_go_on_while_a_long_prompt_enters(zoo: Zoo, depth: int) -> None:
    """Keeps out: a long prompt that stalls every stream: a running row gets tokens after every other launch at least."""
    driver = Driver(zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), page_size=4, max_batch_size=4, max_seq_len=160))
    driver.set_depth(depth)
    driver.set_chunk(8)
    row = driver.submit([3, 4], SamplingParams(max_tokens=80))
    for _ in range(4):
        driver.step()
    long = driver.submit(LONG, SamplingParams(max_tokens=2))
    stalled, tokens = 0, len(row.output.token_ids)
    while not long.output.token_ids and not row.is_done:
        driver.step()
        stalled = 0 if len(row.output.token_ids) > tokens else stalled + 1
        tokens = len(row.output.token_ids)
        assert stalled <= 1
    assert long.output.token_ids and not row.is_done
    driver.cancel_all()


def test_a_cancelled_prompt_leaves_its_row(zoo: Zoo) -> None:
    """Keeps out: a request that is cancelled between two chunks, and whose row or pages the next one finds taken."""
    driver = Driver(zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), page_size=4, max_batch_size=2, max_seq_len=96))
    driver.set_chunk(8)
    row = driver.submit([3, 4], SamplingParams(max_tokens=20))
    for _ in range(3):
        driver.step()
    for _ in range(3):
        long = driver.submit(LONG, SamplingParams(max_tokens=2))
        for _ in range(5):
            driver.step()
        driver.cancel(long)
    after = driver.submit([5, 6], SamplingParams(max_tokens=9))
    driver.run_until_idle()
    driver.assert_nothing_leaked()
    assert row.result().token_ids == zoo.greedy("llama", [3, 4], 24)[:20]
    assert after.result().token_ids == zoo.greedy("llama", [5, 6], 24)[:9]


def test_rounds_add_nothing_to_what_an_entering_text_holds(zoo: Zoo) -> None:
    """Keeps out: penalties for tokens that rounds of other rows put down in a row whose prompt is not complete."""
    driver = Driver(zoo.decoder("llama", "eagle3", CHAIN, page_size=4, max_batch_size=3, max_seq_len=96))
    texts = []
    for size in (10_000, 12):
        driver.set_chunk(size)
        first, entering, last = ([7, 3, 1], 9), (LONG, 4), ([9, 4], 9)  # the last row runs while the one before it enters
        requests = [
            driver.submit(prompt, SamplingParams(max_tokens=most, frequency_penalty=-2.0))
            for prompt, most in (first, entering, last)
        ]
        driver.run_until_idle()
        texts.append([request.result().token_ids for request in requests])
    assert texts[0] == texts[1]
