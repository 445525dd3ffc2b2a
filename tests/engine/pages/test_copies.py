"""Copies of ring pages that are kept for later prompts: which pages have one, which go first, in which order they are made."""

import random

from toolkit.driver import new_request

from specdec.engine.pages.admission import Admission
from specdec.engine.pages.copies import CopyOrders, RingCopies
from specdec.engine.pages.pool import PagePool


def test_copies_that_depend_on_each_other_are_made_in_order() -> None:
    """One step reads everything before it writes anything, so it may swap pages but not pass one on twice."""
    rng = random.Random(0)
    for _ in range(500):
        orders, pages = CopyOrders(1), {page: page for page in range(8)}
        made = dict(pages)
        for _ in range(rng.randrange(1, 7)):
            targets = rng.sample(range(8), rng.randrange(1, 4))
            sources = [rng.randrange(8) for _ in targets]
            orders.add(sources, targets)
            pages.update(dict(zip(targets, [pages[source] for source in sources], strict=True)))
        for step in orders.steps:
            assert step.group == 1 and len(set(step.targets)) == len(step.targets)
            made.update(dict(zip(step.targets, [made[source] for source in step.sources], strict=True)))
        assert made == pages


def with_copies(pages: int, spare: int, ring: int, span: int) -> Admission:
    """Pages of 4 tokens in both groups, with prefix caching."""
    return Admission(PagePool(pages, 4), 8, True, PagePool(ring + spare + 1, 4, ring), span)


def run(admission: Admission, tokens: list[int], reach: int, drafted: bool = True, prompt: int | None = None) -> int:
    """One request from its admission to its end.  Returns how many tokens were found.

    reach: up to where it wrote.  prompt: how many of the tokens are its prompt; None: all.
    """
    request = new_request(tokens[:prompt], 1 + len(tokens[slice(prompt, None)]))
    found = admission.find(request, drafted)
    assert found is not None and admission.admit(request, found)
    admission.grow(request, len(tokens))
    admission.keep(request, tokens, drafted, reach, leaves=True)
    admission.leave(request)
    return found.tokens


def copied(admission: Admission, tokens: list[int]) -> list[int]:
    """Which pages of the text have copies."""
    assert admission.cache is not None and admission.copies is not None
    return [i for i, node in enumerate(admission.cache.find(tokens, False)) if node in admission.copies._pages]


def test_the_deepest_page_that_can_be_begun_after_is_found() -> None:
    """A copy in the middle of the last span of keys that is gone makes a page useless; an earlier one serves."""
    admission, prompt = with_copies(200, 90, ring=20, span=9), list(range(41))
    copies, cache = admission.copies, admission.cache
    assert copies is not None and cache is not None and copies.window == 2
    assert run(admission, prompt, 40) == 0 and copied(admission, prompt) == list(range(10))
    path = cache.find(prompt, True)
    for gone, left in ((8, 8), (4, 8), (7, 7), (6, 4)):
        copies.drop(path[gone])
        assert copies.usable(path) == left, gone
    assert copies.usable(path[:1]) == 1, "fewer pages than a span of keys serve too, if all of them have copies"
    assert run(admission, prompt, 40) == 16


def test_a_text_can_begin_after_the_pages_that_are_still_read() -> None:
    """Keeps out: a page too few where the last span of keys begins in the middle of one, which a text then reads as garbage;
    a page too many, for want of which cached pages are not found."""
    for page_size in range(1, 6):
        for span in range(1, 15):
            copies = RingCopies(PagePool(40, page_size, 20), span, group=1)
            for pages in range(8):
                begins = pages * page_size  # the first query's position, the last keys of whose span come before it
                read = {position // page_size for position in range(max(0, begins - span + 1), begins)}
                assert copies.first_needed(pages) == pages - len(read), (span, page_size)


def test_only_pages_that_are_still_there_are_copied() -> None:
    """Keeps out: a copy of a page that a later one has overwritten, and of one that the ring was never filled with."""
    prompt = list(range(101))
    for reach, ring in ((100, 5), (101, 5), (104, 5), (105, 5), (100, 24), (120, 26)):
        admission = with_copies(200, 90, ring, span=9)
        assert admission.local is not None
        run(admission, prompt, reach)
        slots: dict[int, int] = {}
        for position in range(reach):
            slots[position // 4 % ring] = position // 4
        assert copied(admission, prompt) == [page for page in range(25) if slots[page % ring] == page], (reach, ring)
    admission = with_copies(200, 90, ring=20, span=9)
    copies, cache = admission.copies, admission.cache
    assert copies is not None and cache is not None
    run(admission, prompt[:61], 60)
    for node in cache.find(prompt, True)[6:12]:
        copies.drop(node)
    assert run(admission, prompt, 100) == 60, "pages 13 and 14 were copied into its ring"
    assert copied(admission, prompt) == [*range(6), *range(12, 25)]


def test_a_copy_has_what_its_page_has() -> None:
    """Keeps out: a copy without the drafter's keys for a page that has them, found by a text that speculates."""
    admission, prompt = with_copies(200, 90, ring=20, span=9), list(range(21))
    copies, cache = admission.copies, admission.cache
    assert copies is not None and cache is not None
    run(admission, prompt, 20, drafted=False)
    assert copied(admission, prompt) == list(range(5)) and run(admission, prompt, 20, drafted=True) == 0
    assert copied(admission, prompt) == list(range(5))
    for node in cache.find(prompt, True):
        copies.drop(node)
    run(admission, prompt, 20, drafted=False)
    assert copied(admission, prompt) == [] and run(admission, prompt, 20, drafted=True) == 0
    assert copied(admission, prompt) == list(range(5)) and run(admission, prompt, 20, drafted=True) == 20


def test_what_a_ring_still_holds_is_copied_again() -> None:
    """Keeps out: copies that somebody found, and that were dropped while his text ran, lost though his ring has the pages."""
    admission, prompt = with_copies(200, 90, ring=20, span=9), list(range(101))
    copies, cache = admission.copies, admission.cache
    assert copies is not None and cache is not None
    run(admission, prompt[:61], 60)
    request = new_request(prompt, 1)
    found = admission.find(request, True)
    assert found is not None and found.tokens == 60 and admission.admit(request, found)
    copies.drop_all()
    admission.keep(request, prompt, True, 100)
    assert copied(admission, prompt) == [*range(13, 25)]


def test_the_copies_that_were_used_least_recently_go_first() -> None:
    """Keeps out: the windows of a prompt that comes again and again dropped for those of prompts that came once."""
    for again, often_left, once_left in (("found", [1, 2], [2]), ("kept", [0, 1, 2], [])):
        admission = with_copies(200, spare=6, ring=5, span=9)
        copies, cache = admission.copies, admission.cache
        assert copies is not None and cache is not None
        often, once, new = ([first, *range(12)] for first in (20, 21, 22))
        run(admission, often, 12), run(admission, once, 12)
        assert (copied(admission, often), copied(admission, once)) == ([0, 1, 2], [0, 1, 2])
        if again == "found":
            copies.of(cache.find(often, True))  # of its last two pages
        else:
            copies.keep(cache.find(often, True), [], 0, 12, True)  # by a text that began before there were any
        run(admission, new, 12)
        assert (copied(admission, often), copied(admission, once)) == (often_left, once_left), again


def test_copies_make_room_for_rings() -> None:
    """Keeps out: a request that waits for ever because copies fill the pool, and copies that outlive their pages."""
    admission = with_copies(60, 3, ring=5, span=9)
    for first in range(30):
        run(admission, [first, *range(40)], 41)
        copies, local = admission.copies, admission.local
        assert copies is not None and local is not None and 0 < len(copies) <= local.capacity
        assert copies.num_free == local.capacity == 8
    assert run(admission, [29, *range(40)], 41) == 40 and run(admission, [5, *range(40)], 41) == 0
