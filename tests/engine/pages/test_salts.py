"""Prefix caching by salt: what one caller's text leaves is found by requests of the same salt alone."""

import asyncio

from toolkit.driver import Driver
from toolkit.models import Zoo
from toolkit.prompts import SYSTEM

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig


def test_requests_of_another_salt_find_nothing(zoo: Zoo) -> None:
    """Keeps out: pages of one caller's text that another one finds by asking with it, and a wait for pages that are none."""
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), max_batch_size=2, page_size=4, prefix_caching=True)
    prompt, sampling = SYSTEM + [5, 6], SamplingParams(max_tokens=8)
    want = decoder.generate([prompt], sampling, cache_salt="a")[0]
    for salt, is_kept in (("a", True), ("b", False), ("b", True), (None, False), (None, True)):
        out = decoder.generate([prompt], sampling, cache_salt=salt)[0]
        assert out.token_ids == want.token_ids and bool(out.stats.cached_tokens) == is_kept, salt
    together = [decoder.new_request(decoder.encode(prompt), sampling, cache_salt=salt) for salt in ("c", "d")]
    assert [out.stats.cached_tokens for out in decoder.run(together)] == [0, 0]
    list(decoder.stream(prompt, sampling, cache_salt="e"))
    shared = AsyncSpecDecoder(decoder)
    for salt, is_kept in (("e", True), ("f", False)):
        out = asyncio.run(shared.generate(prompt, sampling, cache_salt=salt))
        assert bool(out.stats.cached_tokens) == is_kept, salt
    Driver(decoder).assert_nothing_leaked()
