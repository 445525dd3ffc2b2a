"""Prefix caching: keys and values that are found equal those that would be computed, in both models; no page is lost.

Keeps out: a page whose draft row was made for another next token, pages without draft rows under a draft, a cached page that
is written to or evicted while somebody reads it, garbage of a failed prefill that others find.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toolkit.driver import Driver, Model, Request, new_request
from toolkit.models import Zoo, ragged_prompts
from toolkit.pages import check_books
from toolkit.prompts import SYSTEM, assert_same, prompts_after

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.pool import PagePool
from specdec.engine.pages.prefix_cache import Node, PrefixCache, common_pages, page_keys
from specdec.generation import Stats

TREE, CHAIN = SpecConfig(3, 4, 12), SpecConfig(4, 1, 5)


@pytest.mark.slow_cases
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_any_order_of_use_keeps_the_books(page_size: int) -> None:
    """Random requests with few texts in a small pool: each page that is found holds the right text, and no page is lost.

    Some have a drafter and some have not, at the same time.
    """
    rng = random.Random(page_size)
    admission = Admission(PagePool(40, page_size), lookahead=5, prefix_caching=True)
    assert admission.cache is not None
    running: list[Request] = []
    content: dict[int, tuple[tuple[int | str | None, ...], bool]] = {}  # page -> (salt, text up to its successor; draft rows)
    found_tokens = 0
    for _ in range(1500):
        if rng.random() < 0.5:
            drafted = rng.random() < 0.6
            prompt = [rng.randrange(2) for _ in range(3)] + [0] * rng.randrange(1, 6 * page_size) + [rng.randrange(2)]
            request = new_request(prompt, rng.randrange(1, 3 * page_size), speculate=drafted)
            salt = request.cache_salt = rng.choice([None] * 8 + ["a", "b"])
            found = admission.find(request, drafted)
            if found is None or not admission.admit(request, found):
                continue
            table, start = admission.allocations[request].table, found.tokens // page_size
            assert len(table) * page_size >= admission.tokens_to_enter(request) and len(set(table)) == len(table)
            assert found.tokens < len(prompt)
            for i, page in enumerate(table[:start]):
                assert content[page][0] == (salt, *prompt[: (i + 1) * page_size + 1]) and content[page][1] >= drafted
            running.append(request)
            others = {page for other in running[:-1] for page in admission.allocations[other].table}
            assert not others & set(table[start:]), "two requests write to one page"
            for i, page in enumerate(table[start:], start):  # the prefill writes these
                content[page] = ((salt, *prompt[: (i + 1) * page_size + 1]), drafted)
            admission.keep(request, prompt, drafted, len(prompt))
            fixed = admission.fixed_pages(request, True)
            assert fixed == table[: len(fixed)] and all(content[page][1] for page in fixed)
            found_tokens += found.tokens
        elif running:
            request = running.pop(rng.randrange(len(running)))
            drafted, salt = request.speculate, request.cache_salt
            output = [rng.randrange(2) for _ in range(rng.randrange(request.sampling.max_tokens) + 1)]
            text = request.prompt_ids + output
            if admission.pages_lacking(request, len(text)) > admission.free_pages:
                text = request.prompt_ids  # it leaves early
            admission.grow(request, len(text))
            for i in range((len(request.prompt_ids) - 1) // page_size, (len(text) - 1) // page_size):
                content[admission.allocations[request].table[i]] = ((salt, *text[: (i + 1) * page_size + 1]), drafted)
            admission.keep(request, text, drafted, len(text), leaves=True)
            admission.leave(request)
        check_books(admission, running)
    assert admission.hit_tokens == found_tokens > 500 and admission.lookup_tokens > found_tokens
    for request in running:
        admission.leave(request)
    assert admission.free_pages == admission.pool.capacity


def test_least_recently_used_goes_first() -> None:
    """Keeps out: eviction by age of entry, and of a page in front of one that stays."""
    admission = Admission(PagePool(10, 2), lookahead=0, prefix_caching=True)

    def run(prompt: list[int]) -> list[int]:
        request = new_request(prompt, 1)
        found = admission.find(request, False)
        assert found is not None and admission.admit(request, found)
        table = admission.allocations[request].table
        admission.keep(request, prompt, False, len(prompt))
        admission.leave(request)
        return table

    old, other = run([1, 2, 3, 4, 5]), run([6, 7, 8])
    again = run([1, 2, 3, 9])  # the first page of old is used once more
    assert again[0] == old[0]
    cache = admission.cache
    assert cache is not None
    assert [node.page for node in cache._idle] == [old[1], other[0], old[0]]
    run([11] * 11)  # needs six pages, has six free
    assert len(cache.find([1, 2, 3, 4, 5], False)) == 2
    run([12] * 11)  # needs more: the page used longest ago goes first, and a page goes before the one that it follows
    assert not cache.find([6, 7, 8], False)


def test_whoever_keeps_something_for_a_page_is_told() -> None:
    """Keeps out: a copy of keys that belongs to a page which is replaced or gone; a state dropped where only the former is."""
    pool, told, evicted = PagePool(10, 2), list[Node](), list[Node]()
    cache = PrefixCache(pool, told.append, evicted.append)
    for owner, drafted in (("a", False), ("b", True)):
        pages = pool.admit(owner, 4)
        node = cache.insert(owner, cache.root, [1, 2, 3, 4, 5], pages, drafted)
        path = cache.path(node)
        assert told == (path if drafted else []) and not evicted and [each.page for each in path] == pages
        cache.leave(node)
        pool.release(owner)
    told.clear()
    cache.evict(2)
    assert told == evicted == path[::-1] and pool.num_free == pool.capacity


def test_keys_hold_the_successor() -> None:
    assert list(page_keys([1, 2, 3, 4, 5], 2)) == [(1, 2, 3), (3, 4, 5)]
    assert list(page_keys([1, 2, 3, 4], 2)) == [(1, 2, 3)] and not list(page_keys([1, 2], 2)) + list(page_keys([], 2))


def test_a_text_that_waits_is_looked_up_again_only_where_pages_have_changed() -> None:
    """Keeps out: a long text that waits and costs milliseconds before each launch, and one that enters with pages of before."""
    admission = Admission(PagePool(41, 4), 8, True)
    for request in (first := new_request([7] * 50, 4), other := new_request([5] * 9, 4)):
        found = admission.find(request, False)
        assert found is not None and not found.path and admission.admit(request, found)
    admission.keep(first, first.prompt_ids, False, 50)
    waits = new_request([7] * 50, 4)
    once, twice = (admission.find(waits, False) for _ in range(2))
    admission.keep(other, other.prompt_ids, False, 9)
    again = admission.find(waits, False)
    assert once and twice and again and once.path is twice.path is not again.path == once.path != admission.find(waits, True)


def test_a_text_is_looked_at_as_far_as_it_is_kept() -> None:
    """Keeps out: milliseconds before each launch while a text of 100,000 tokens waits, of which nothing is kept."""

    class Read(list[int]):
        slices = 0

        def __getitem__(self, key: Any) -> Any:
            self.slices += isinstance(key, slice)
            return super().__getitem__(key)

    pool = PagePool(9, 2)
    cache = PrefixCache(pool)
    cache.leave(cache.insert("owner", cache.root, [1, 2, 3, 4, 5], pool.lend("owner", 2), drafted=True))
    text = Read([1, 2, 3, 4, 5] + [6] * 10_000)
    assert len(cache.find(text, drafted=True)) == 2 and text.slices <= 3
    assert common_pages([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], 2) == 1
    assert common_pages([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], 2) == 2


# ---- in the engine ----


@pytest.fixture(params=[0, 1], ids=lambda depth: f"depth{depth}")
def decoder(zoo: Zoo, request: pytest.FixtureRequest) -> Iterator[SpecDecoder]:
    """Small enough a pool that pages are evicted; its books must balance when the test is over."""
    decoder = zoo.decoder(
        "llama", "eagle3", TREE, page_size=4, max_batch_size=3, max_seq_len=96, prefix_caching=True
    )  # fmt: skip
    driver = Driver(decoder)
    driver.set_depth(request.param)
    driver.set_least_shared_to_wait(8)
    with driver.small_pool(3 * decoder.settings.pages_per_sequence):
        yield decoder
        driver.assert_nothing_leaked()


SHAPES = [("eagle3", TREE, 4), ("eagle3", CHAIN, 16), ("eagle1", TREE, 1), ("eagle1-two-layers", CHAIN, 4), (None, None, 4)]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("kind", "spec", "page_size"), SHAPES, ids=str)
def test_hits_equal_cold_runs(zoo: Zoo, kind: str | None, spec: SpecConfig | None, page_size: int) -> None:
    """First, second and third time, alone and together: the text, and each round's acceptance, of a decoder that keeps none."""
    settings = dict(page_size=page_size, max_batch_size=3, max_seq_len=96)
    cold = zoo.decoder("llama", kind, spec, **settings)
    warm = zoo.decoder("llama", kind, spec, **settings, prefix_caching=True)
    prompts, sampling = prompts_after(SYSTEM), SamplingParams(max_tokens=16)
    want = cold.generate(prompts, sampling)
    for time in range(3):
        got = warm.generate(prompts, sampling)
        assert_same(got, want)
        full = (len(SYSTEM) - 1) // page_size * page_size  # the next page holds tokens that differ, or one follows it
        for out in got if time else got[3:]:  # three enter at once the first time
            assert out.stats.cached_tokens >= full
        Driver(warm).assert_nothing_leaked()
    assert_same([warm.generate(prompt, sampling)[0] for prompt in prompts], want)
    looked_up, found = Driver(warm).looked_up_and_found
    assert looked_up == 4 * sum(map(len, prompts)) > found > 0.8 * 3 * 5 * len(SYSTEM)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kept", ["int8", "fp8", "int8_keys"])
def test_pages_of_8_bits(zoo: Zoo, kept: str) -> None:
    """A page means the same to whoever reads it: scales are a token's own, or stand once the first tokens came."""
    settings = dict(page_size=4, max_batch_size=3, max_seq_len=96, kv_cache_dtype=kept)
    warm = zoo.decoder("llama", "eagle3", TREE, **settings, prefix_caching=True)
    cold = zoo.decoder("llama", "eagle3", TREE, **settings)
    sampling = SamplingParams(max_tokens=16)
    want = cold.generate(prompts_after(SYSTEM)[:3], sampling)
    for _ in range(2):
        got = warm.generate(prompts_after(SYSTEM)[:3], sampling)
        assert [out.token_ids for out in got] == [out.token_ids for out in want]
    assert all(out.stats.cached_tokens >= 36 for out in got)


def test_hit_rate_is_that_of_plain_decoding(zoo: Zoo) -> None:
    """Keeps out: a last page that is computed again because the draft needs its neighbour."""
    prompts, rates = prompts_after(SYSTEM) + ragged_prompts(40, 6, seed=3), []
    for speculate in (True, False):
        decoder = zoo.decoder("llama", "eagle3", TREE, page_size=4, max_batch_size=8, prefix_caching=True)
        for _ in range(2):
            out = decoder.generate(prompts, SamplingParams(max_tokens=12), speculate=speculate)
        rates.append([one.stats.cached_tokens for one in out])
        assert rates[-1] == [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
    assert rates[0] == rates[1]


@pytest.mark.slow_cases
def test_generated_tokens_are_found_too(zoo: Zoo, decoder: SpecDecoder) -> None:
    """A conversation: each turn's prompt is all that was said before.  Its KV came from rounds, of the draft's too."""
    cold = zoo.decoder("llama", "eagle3", TREE, page_size=4, max_batch_size=3, max_seq_len=96)
    text, sampling = [3, 1, 4], SamplingParams(max_tokens=17)
    for turn in range(4):
        (out,), (want,) = decoder.generate(text, sampling), cold.generate(text, sampling)
        assert_same([out], [want])
        assert out.stats.cached_tokens == ((len(text) - 2 - 1) // 4 * 4 if turn else 0)  # less the new and the last token
        text = text + out.token_ids + [turn]


@pytest.mark.slow_cases
def test_two_texts_that_go_on_differently_share_no_page_at_the_fork(zoo: Zoo, decoder: SpecDecoder) -> None:
    """The draft's row of a page's last token holds the next token: the same page, followed by another, is another page."""
    stem, sampling = SYSTEM[:8], SamplingParams(max_tokens=16)
    decoder.generate([*stem, 5, 6], sampling)
    (other,) = decoder.generate([*stem, 9, 6], sampling)
    (again,) = decoder.generate([*stem, 5, 7], sampling)
    assert other.stats.cached_tokens == 4 and again.stats.cached_tokens == 8
    (want,) = zoo.decoder("llama", "eagle3", TREE, page_size=4, max_seq_len=96).generate([*stem, 9, 6], sampling)
    assert_same([other], [want])


@pytest.mark.slow_cases
@pytest.mark.parametrize("which", ["target", "draft"])
def test_what_is_found_is_what_is_read(zoo: Zoo, decoder: SpecDecoder, which: Model) -> None:
    """Poison in a cached page shows: in the text if it is the target's, in the acceptance if it is the draft's."""
    sampling = SamplingParams(max_tokens=24)
    (clean,) = decoder.generate(SYSTEM, sampling)
    driver = Driver(decoder)
    for page in driver.kept_pages(SYSTEM)[:6]:
        driver.page_kv(which, page).normal_(generator=torch.Generator().manual_seed(page), std=4.0)
    (dirty,) = decoder.generate(SYSTEM, sampling)
    assert dirty.stats.cached_tokens == 36
    if which == "target":
        assert dirty.token_ids != clean.token_ids
    else:
        assert dirty.token_ids == clean.token_ids
        assert dirty.stats.accepted_per_round != clean.stats.accepted_per_round


@pytest.mark.slow_cases
def test_pages_without_draft_rows_are_for_plain_decoding_only(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: speculation after a plain run that reads drafter rows which nobody wrote.

    A plain run after speculation finds all pages.
    """
    Driver(decoder).poison_free_slots(1e4, "draft")
    sampling = SamplingParams(max_tokens=16)
    want = zoo.decoder("llama", "eagle3", TREE, page_size=4, max_seq_len=96).generate(SYSTEM, sampling)
    seen = []
    for speculate in (False, False, True, True, False):
        got = decoder.generate(SYSTEM, sampling, speculate=speculate)
        assert got[0].token_ids == want[0].token_ids
        if speculate:
            assert_same(got, want)
        seen.append(got[0].stats.cached_tokens)
    assert seen == [0, 36, 0, 36, 36]
    longer = [*SYSTEM, *want[0].token_ids, 3]
    assert decoder.generate(longer, sampling)[0].stats.cached_tokens == 52


def test_a_pause_leaves_no_hole(zoo: Zoo) -> None:
    """Keeps out: a text that ends in a pause, whose last draft rows were never written, and that another one goes on from."""
    spec, sampling = SpecConfig("auto", 3, 12), SamplingParams(max_tokens=30)
    decoder = zoo.decoder("llama", "eagle3", spec, page_size=4, max_seq_len=160, prefix_caching=True)
    fresh = zoo.decoder("llama", "eagle3", spec, page_size=4, max_seq_len=160)
    Driver(decoder).poison_free_slots(1e4, "draft")
    Driver(decoder).script_levels(3, 3, *[0] * 40)
    (first,) = decoder.generate(SYSTEM, sampling)
    paused = len(first.stats.accepted_per_round) - 2
    assert paused > 10
    follow = [*SYSTEM, *first.token_ids, 3]
    for one in (decoder, fresh):
        Driver(one).script_levels(3)
    got, want = decoder.generate(follow, sampling), fresh.generate(follow, sampling)
    assert_same(got, want)
    assert (len(follow) - 2 - paused) // 4 * 4 - 4 <= got[0].stats.cached_tokens <= len(follow) - 2 - paused
    assert decoder.generate(follow, sampling)[0].stats.cached_tokens == (len(follow) - 1) // 4 * 4


@pytest.mark.slow_cases(keep=0)
@pytest.mark.slow
def test_200_requests_some_cancelled_some_failing(zoo: Zoo, decoder: SpecDecoder) -> None:
    """In a pool that is always full: every request that is left alone writes what it writes alone."""
    rng, driver = random.Random(5), Driver(decoder)
    bases = [SYSTEM[:20], SYSTEM[:20], [9] * 9, []]
    tails, requests = ragged_prompts(40, 8, seed=1), []
    for _ in range(200):
        fails = rng.random() < 0.1
        calls = iter(range(rng.randrange(4), 10_000))
        decode = (lambda ids, c=calls: 1 // (next(c) < 3) and "") if fails else (lambda ids: "")
        prompt = (rng.choice(bases) + rng.choice(tails))[:40]
        sampling = SamplingParams(max_tokens=rng.choice([1, 2, 5, 9, 14]))
        requests.append(new_request(prompt, sampling, decode=decode, streaming=True))
    arrivals = iter(requests)
    while not all(request.is_done for request in requests):
        for _, request in zip(range(rng.randrange(4)), arrivals, strict=False):
            driver.add(request)
        if rng.random() < 0.1 and not driver.is_idle:
            driver.cancel(rng.choice([*driver.running, *driver.waiting]))
        driver.step()
        driver.assert_books_balance()
    left_alone = [request for request in requests if not request.cancelled and request.error is None]
    for request in left_alone:
        assert request.output.token_ids == zoo.greedy("llama", request.prompt_ids, 24)[: request.sampling.max_tokens]
    assert len(left_alone) > 120 and Stats.total([r.stats for r in left_alone]).cached_tokens > 1000


@pytest.mark.slow_cases
@pytest.mark.parametrize("phase", ["prefill", "draft prefill", "verify"])
def test_a_failure_leaves_no_garbage(zoo: Zoo, decoder: SpecDecoder, phase: str) -> None:
    """Keeps out: pages of a prefill that never ran, which the next request finds."""
    sampling = SamplingParams(max_tokens=12)
    with Driver(decoder).fail_in(phase, ValueError("boom")):
        with pytest.raises((RuntimeError, ValueError), match="boom"):
            decoder.generate(prompts_after(SYSTEM), sampling)
    Driver(decoder).assert_nothing_leaked()
    outputs = decoder.generate(prompts_after(SYSTEM), sampling)
    assert (outputs[0].stats.cached_tokens > 0) == (phase == "verify")
    want = zoo.decoder("llama", "eagle3", TREE, page_size=4, max_seq_len=96).generate(prompts_after(SYSTEM), sampling)
    assert_same(outputs, want)


@pytest.mark.slow_cases
def test_streams_find_what_others_left(zoo: Zoo, decoder: SpecDecoder) -> None:
    """A stream that is closed in the middle leaves what it wrote; two open ones share pages and do not disturb each other."""
    want = zoo.greedy("llama", [*SYSTEM, 6], 24)
    stream = decoder.stream([*SYSTEM, 6], SamplingParams(max_tokens=24))
    ids = list(next(stream).token_ids) + list(next(stream).token_ids)
    second = decoder.stream([*SYSTEM, 6], SamplingParams(max_tokens=24))
    other = list(next(second).token_ids)
    assert Driver(decoder).running[1].stats.cached_tokens == 36
    stream.close()
    (third,) = decoder.generate([*SYSTEM, 6, *ids], SamplingParams(max_tokens=6))
    assert third.stats.cached_tokens >= 36 and third.token_ids == want[len(ids) : len(ids) + 6]
    other += [token for chunk in second for token in chunk.token_ids]
    assert other == want and ids == want[: len(ids)]


def test_the_second_call_computes_the_tails_alone(decoder: SpecDecoder) -> None:
    """The second call is faster because prefill computes fewer tokens.

    In the first call, the second and third prompt wait for the first one's prefill.
    """
    sizes = Driver(decoder).watch_prefills()
    prompts = [[*SYSTEM[:33], *tail] for tail in ([1, 2], [3], [4, 5, 6])]
    for expected in ([35, 2 + 4], [3 + 2 + 4]):  # the last page holds one token of the system prompt
        sizes.clear()
        decoder.generate(prompts, SamplingParams(max_tokens=3))
        assert sizes == expected


@pytest.mark.slow_cases
@pytest.mark.parametrize("size", [3, 8])
def test_a_hit_in_chunks(zoo: Zoo, decoder: SpecDecoder, size: int) -> None:
    """What is left of a prompt after a hit can take several chunks."""
    prompts, sampling = [[*SYSTEM, *range(30)], [*SYSTEM, *range(9)]], SamplingParams(max_tokens=12)
    want = zoo.decoder("llama", "eagle3", TREE, page_size=4, max_seq_len=96).generate(prompts, sampling)
    decoder.generate(SYSTEM, sampling)
    Driver(decoder).set_chunk(size)
    got = decoder.generate(prompts, sampling)
    assert_same(got, want)
    assert all(out.stats.cached_tokens >= 36 for out in got)


def test_the_setting_is_a_bool(zoo: Zoo) -> None:
    with pytest.raises(
        TypeError, match="prefix_caching must be a bool, got 'on'; nearest setting that works: prefix_caching=False"
    ):
        zoo.decoder("llama", None, prefix_caching="on")
