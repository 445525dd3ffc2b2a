"""The page pool: pages belong to one owner, and nothing is given back twice.

Keeps out: two sequences on one page, a running sequence that finds the pool empty, leaks that show after a thousand requests.
"""

import random

import pytest

from specdec.pages import DUMMY_PAGE, PagePool


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
