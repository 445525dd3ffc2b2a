"""What must hold of a prefix cache's pages at any time, and the admission's constants made small enough for tests."""

import pytest

from specdec.engine.pages import admission as admission_module
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.prefix_cache import Node, PrefixCache
from specdec.engine.request import Request


def nodes_of(cache: PrefixCache) -> list[Node]:
    found, open_nodes = [], list(cache.root.children.values())
    while open_nodes:
        node = open_nodes.pop()
        found.append(node)
        open_nodes += node.children.values()
    return found


def check_books(admission: Admission, requests: list[Request]) -> None:
    """Every page has one owner; uses are counted; what is in use, or in front of it, can't be evicted."""
    pool, cache = admission.pool, admission.cache
    assert cache is not None
    nodes = nodes_of(cache)
    kept = {node.page for node in nodes}
    assert kept == pool._owned.get(cache, set()) and len(kept) == len(nodes)
    owned = [page for pages in pool._owned.values() for page in pages]
    assert sorted(owned + pool._free) == list(range(1, pool.num_pages))
    held = [admission.places[request].node for request in requests]
    for node in nodes:
        behind = 0
        for at in held:
            while at is not None and at is not node:
                at = at.parent
            behind += at is node
        assert node.users == behind and (node in cache._idle) == (behind == 0)
        assert all(child.drafted <= node.drafted for child in node.children.values())
    order = list(cache._idle)
    assert all(node.parent not in order[: order.index(node)] for node in order), "a page in front goes after those behind"


def long_prompts_wait_from(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt waits for another one's prefill from so many tokens that they share."""
    monkeypatch.setattr(admission_module, "LEAST_SHARED_TO_WAIT", tokens)


def ring_passes_take(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sequences go around a ring of pages, one pass takes at most so many tokens of a prompt."""
    monkeypatch.setattr(admission_module, "RING_PREFILL", tokens)


def shorten_rings(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings are so many pages shorter than they must be."""
    whole = admission_module.ring_pages
    monkeypatch.setattr(admission_module, "ring_pages", lambda *args: whole(*args) - pages)
