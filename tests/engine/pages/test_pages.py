"""The page pool: a page has one owner and is given back once.  A ring overwrites only keys that nobody can read.

Keeps out: two sequences on one page, a running sequence that finds the pool empty, leaks that show after a thousand requests,
a windowed model that keeps every token, and a ring that is a token too short.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo
from toolkit.pages import ring_passes_take, shorten_rings

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.pages.groups import ALL, KVCacheGroup, group_of, page_groups, share_memory
from specdec.engine.pages.pool import PagePool, ring_pages
from specdec.limits import DUMMY_PAGE
from specdec.loading.memory import kv_page_bytes, pool_plan


def test_any_order_of_use_keeps_pages_apart() -> None:
    """Random admissions and releases: every page has one owner or is free, and an owner has room for all its tokens."""
    rng = random.Random(0)
    for page_size in (1, 4, 16):
        pool, owners = PagePool(40, page_size), {}
        for step in range(2000):
            tokens = rng.randrange(1, 12 * page_size)
            if rng.random() < 0.5 and pool.can_admit(tokens):
                owners[step] = pool.admit(step, tokens)
                assert len(owners[step]) * page_size >= tokens > (len(owners[step]) - 1) * page_size
            elif owners:
                owner = rng.choice(list(owners))
                pool.release(owner)
                del owners[owner]
            taken = [page for pages in owners.values() for page in pages]
            assert DUMMY_PAGE not in taken and sorted(taken + pool._free) == list(range(1, 40))


def test_pages_for_rounds_up() -> None:
    pool = PagePool(10, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
    assert pool.capacity == pool.num_free == 9
    around = PagePool(10, 16, ring=3)
    assert [around.pages_for(n) for n in (16, 48, 49, 1000)] == [1, 3, 3, 3]
    assert [around.table_pages(n) for n in (16, 48, 49, 1000)] == [1, 3, 4, 63]


def test_misuse_is_an_error() -> None:
    """Keeps out: a double release, which would give one page to two sequences."""
    pool = PagePool(4, 2)
    pool.admit("a", 5)
    for wrong in (
        lambda: pool.admit("a", 1),  # twice
        lambda: pool.admit("b", 1),  # nothing left
        lambda: PagePool(1, 16),
    ):
        with pytest.raises(AssertionError):
            wrong()
    pool.release("a")
    for wrong in (lambda: pool.release("a"), lambda: pool.release("never")):
        with pytest.raises(KeyError):
            wrong()
    assert pool.num_free == pool.capacity == 3 and sorted(pool._free) == [1, 2, 3]


# ---- rings ----


def wrong_reads(ring: int, page_size: int, span: int, ahead: int, seed: int) -> int:
    """How many reads find a wrong token, in rounds and chunks of up to `ahead` tokens at random lengths."""
    rng, wrong, L = random.Random(seed), 0, 0
    slots = ring * page_size
    holds: dict[int, int] = {}  # slot -> position
    while L < 12 * slots:
        written = rng.choice([1, ahead, rng.randint(1, ahead)])
        for position in range(L, L + written):  # all are stored before the first is read
            holds[position % slots] = position
        for query in range(L, L + written):
            wrong += sum(holds.get(key % slots) != key for key in range(max(0, query - span + 1), query + 1))
        L += rng.randint(1, written)  # rejected tokens are written again
    return wrong


@pytest.mark.slow_cases
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_ring_is_just_long_enough(page_size: int) -> None:
    """Keeps out: an off-by-one at a page's or window's edge.  With a page less, where slots count, reads go wrong."""
    rng = random.Random(page_size)
    for _ in range(40):
        span, ahead = rng.randint(1, 40), rng.randint(1, 40)
        ring = ring_pages(span, ahead, page_size)
        assert not wrong_reads(ring, page_size, span, ahead, seed=1), (span, ahead)
        if page_size == 1 and ring > 1 and ahead > 1:
            assert wrong_reads(ring - 1, page_size, span, ahead, seed=1), (span, ahead)


def test_who_gets_a_ring() -> None:
    """Keeps out: a full layer on a ring, a ring longer than the table it replaces, and one that overwrites cached pages."""
    ring = (4096 + 2048 - 1 + 15) // 16
    assert page_groups([None, None], 10, 16, 1000, False) == (ALL,)
    assert page_groups([8, 4096], 10, 16, 1000, False) == (KVCacheGroup(ring, 4096),)
    assert page_groups([8, 4096], 10, 16, 1000, True) == (ALL,)
    assert page_groups([8, None, 4096], 10, 16, 1000, False) == (ALL, KVCacheGroup(ring, 4096))
    assert page_groups([8, None, 4096], 10, 16, 1000, True) == (ALL, KVCacheGroup(ring + 1, 4096))
    assert page_groups([8, None, 4096], 3000, 16, 1000, False) == (ALL, KVCacheGroup((4096 + 3000 - 1 + 15) // 16, 4096))
    for spans in ([8, 4096], [8, None, 4096]):
        assert page_groups(spans, 10, 16, 384, False) == (ALL,)
    two = page_groups([8, None], 10, 16, 1000, False)
    assert [group_of(span, two) for span in (None, 8)] == [0, 1]
    assert [group_of(span, (ALL,)) for span in (None, 8)] == [0, 0]


def test_two_groups_share_what_memory_there_is() -> None:
    """Keeps out: more bytes than there are, a longest sequence that fits nowhere, and memory that nobody gets."""
    rng = random.Random(0)
    for _ in range(3000):
        sizes, rows = [rng.randint(1, 50), rng.randint(1, 50)], rng.randint(1, 8)
        needed = [rng.randint(2, 60) + 1, rng.randint(1, 20) + 1]
        wanted = [rows * (count - 1) + 1 for count in needed]
        memory = rng.randint(1, 2 * sum(p * s for p, s in zip(wanted, sizes, strict=True)))
        full, local = share_memory(memory, wanted, sizes, needed)
        least = sum(p * s for p, s in zip(needed, sizes, strict=True))
        if memory < needed[1] * sizes[1] + 2 * sizes[0]:
            assert full < 2 or full * sizes[0] + local * sizes[1] > memory, "the caller sees that nothing fits"
            continue
        assert full * sizes[0] + local * sizes[1] <= memory and full <= wanted[0] and needed[1] <= local <= wanted[1]
        assert full >= needed[0] or memory < least
        left = memory - full * sizes[0] - local * sizes[1]
        assert (full == wanted[0] or left < sizes[0]) and (local == wanted[1] or left < sizes[1] or full < wanted[0])


LENGTH = 90  # twice around the longest ring, with the shortest prompt


@pytest.fixture()
def short_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    ring_passes_take(8, monkeypatch)


def windowed(zoo: Zoo, spec: SpecConfig | None, page_size: int, **settings: object) -> SpecDecoder:
    """Mistral: every layer has a window of 11; the head one of 3."""
    kind = "eagle3-window" if spec else None
    return zoo.decoder("mistral", kind, spec, page_size=page_size, max_seq_len=240, **{"max_batch_size": 3, **settings})


@pytest.mark.slow_cases(keep=0)
@pytest.mark.slow
@pytest.mark.usefixtures("short_passes")
@pytest.mark.parametrize(
    ("shape", "page_size", "depth"),
    [((3, 4, 12), 4, 1), ((5, 1, 6), 1, 0), (None, 4, 1)],
    ids=str,
)
def test_text_far_beyond_the_window(zoo: Zoo, shape: tuple[int, int, int] | None, page_size: int, depth: int) -> None:
    """A pool of a few windows writes what transformers writes, drafts as far as with all pages, and is whole at the end."""
    decoder = windowed(zoo, SpecConfig(*shape) if shape else None, page_size)
    driver = Driver(decoder)
    driver.set_depth(depth)
    assert driver.ring is not None and driver.pages_total * page_size < 3 * 60
    driver.poison_free_slots(torch.nan)
    prompts = [[5, 9, 2], [*range(1, 38), *range(30)], [7] * 9, [4, 8] * 20]  # some longer than a ring
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=LENGTH))
    assert [out.token_ids for out in outputs] == [zoo.greedy("mistral", prompt, LENGTH) for prompt in prompts]
    driver.assert_nothing_leaked()
    whole = windowed(zoo, SpecConfig(*shape) if shape else None, page_size, prefix_caching=True)
    assert Driver(whole).ring is None, "cached pages are not written anew"
    for one, other in zip(outputs, whole.generate(prompts, SamplingParams(max_tokens=LENGTH)), strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.accepted_per_round == other.stats.accepted_per_round


@pytest.mark.gpu
@pytest.mark.usefixtures("short_passes")
@pytest.mark.parametrize("shape", [(3, 4, 12), (5, 1, 6)], ids=str)
def test_rings_in_graphs(zoo: Zoo, shape: tuple[int, int, int]) -> None:
    """A round ahead of the host, replayed: tables that were written once serve a sequence that goes around many times."""
    decoder = windowed(zoo, SpecConfig(*shape), 4, device="cuda", attention="triton")
    assert Driver(decoder).ring is not None and Driver(decoder).depth == 1
    prompts = [[5, 9, 2], [*range(1, 38), *range(30)], [7] * 9, [4, 8] * 20]
    for _ in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=LENGTH))
        assert [out.token_ids for out in outputs] == [zoo.greedy("mistral", prompt, LENGTH) for prompt in prompts]
    Driver(decoder).assert_nothing_leaked()


@pytest.mark.slow
@pytest.mark.usefixtures("short_passes")
def test_a_ring_too_short_shows(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a test above that would pass on any ring.  Look-ahead has some slack, so one page less may go unnoticed."""
    shorten_rings(2, monkeypatch)
    (out,) = windowed(zoo, SpecConfig(3, 4, 12), 4).generate([5, 9, 2], SamplingParams(max_tokens=LENGTH))
    assert out.token_ids != zoo.greedy("mistral", [5, 9, 2], LENGTH)


@pytest.mark.slow
@pytest.mark.usefixtures("short_passes")
def test_a_pause_longer_than_the_window(zoo: Zoo) -> None:
    """Keeps out: a draft that catches up on pages which went around during the pause."""
    decoder = windowed(zoo, SpecConfig("auto", 3, 12), 4)
    Driver(decoder).script_levels(*[2, *[0] * 30, 3, 3, 0] * 5, 3)
    outputs = decoder.generate([[5, 9, 2], [7] * 9], SamplingParams(max_tokens=LENGTH))
    assert [out.token_ids for out in outputs] == [zoo.greedy("mistral", p, LENGTH) for p in ([5, 9, 2], [7] * 9)]


def test_a_model_with_a_full_layer_keeps_its_pages(zoo: Zoo) -> None:
    """qwen2's first layers are full; a head without a window is a full layer too."""
    for target, kind in (("qwen2", "eagle1-window"), ("mistral", "eagle3")):
        assert Driver(zoo.decoder(target, kind, SpecConfig(3, 4, 12), max_seq_len=240)).ring is None


def test_what_memory_holds_is_kept(zoo: Zoo) -> None:
    """Keeps out: a prefix cache of one batch's pages, in which prompts that take turns push each other out."""
    settings: dict[str, Any] = dict(page_size=4, max_batch_size=1, max_seq_len=64)
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), prefix_caching=True, **settings)
    prompts = [[first, *range(40)] for first in range(8)]
    first, second = ([out.stats.cached_tokens for out in decoder.generate(prompts, SamplingParams(max_tokens=8))] for _ in "12")
    assert first == [0] * 8 and second == [40] * 8
    plain = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), **settings)
    assert Driver(plain).pages_allocated == plain.settings.pages_per_sequence + 1, "nothing changes without it"


def test_the_pool_of_a_prefix_cache_has_bounds(zoo: Zoo) -> None:
    """Keeps out: a pool that ignores what memory holds, slots beyond int32, a GPU whose memory is left idle."""
    decoder = zoo.decoder("llama", page_size=4, max_batch_size=2, max_seq_len=64, prefix_caching=True)
    model, settings = decoder.model, decoder.settings
    (a_page,), batch = kv_page_bytes([model.config], settings, (ALL,)), 2 * settings.pages_per_sequence

    def pages(device: str, free: int, page_size: int = 4, kept: int | None = None) -> int:
        changed = replace(settings.with_options(page_size=page_size), device=torch.device(device))
        return pool_plan([model.config], changed, free, kept_tokens=kept).num_pages[0]

    assert pages("cpu", 2**50) == 16 * batch + 1 and pages("cuda", 1000 * a_page) == 1000 and pages("cpu", 99 * a_page) == 99
    assert pages("cuda", 5 * a_page) == pages("cpu", 5 * a_page) == 5
    for size in (1, 4, 4096):
        assert pages("cuda", 2**50, size) * size == 2**24
    assert pages("cuda", 2**50, kept=0) == batch + 1, "a full batch always fits"
