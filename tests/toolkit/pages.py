"""What must hold of a prefix cache's pages at any time, and the admission's constants made small enough for tests."""

import pytest
from torch import Tensor

from specdec.engine.pages import admission as admission_module
from specdec.engine.pages import groups as groups_module
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


def fill_numbers(buffers: dict[str, Tensor], value: float) -> None:
    """Fills what makes all that is read of a cache this value: scales, or else keys and values."""
    kinds = {name: name.split()[0] for name in buffers}  # where heads are unlike, a number follows
    kind = next(kind for kind in ("scales", "kv", "latent") if kind in kinds.values())
    for name, buffer in buffers.items():
        if kinds[name] == kind:
            buffer.fill_(value)


def check_books(admission: Admission, requests: list[Request]) -> None:
    """Every page has one owner, uses are counted, and a page can't be evicted while it or a page after it is in use."""
    pool, cache = admission.pool, admission.cache
    assert cache is not None
    nodes = nodes_of(cache)
    kept = {node.page for node in nodes}
    assert kept == pool._owned.get(cache, set()) and len(kept) == len(nodes)
    owned = [page for pages in pool._owned.values() for page in pages]
    assert sorted(owned + pool._free) == list(range(1, pool.num_pages))
    held = [admission.allocations[request].node for request in requests]
    for node in nodes:
        users = 0
        for at in held:
            while at is not None and at is not node:
                at = at.parent
            users += at is node
        assert node.users == users and (node in cache._idle) == (users == 0)
        assert all(child.drafted <= node.drafted for child in node.children.values())
    order = list(cache._idle)
    assert all(node.parent not in order[: order.index(node)] for node in order), "a page goes after the pages that follow it"


def ring_passes_take(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits a chunk to `tokens` tokens of a prompt, where sequences reuse a ring of pages."""
    for module in (admission_module, groups_module):
        monkeypatch.setattr(module, "RING_PREFILL", tokens)


def shorten_rings(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rings `pages` pages shorter than they must be."""
    whole = groups_module.ring_pages
    monkeypatch.setattr(groups_module, "ring_pages", lambda *args: whole(*args) - pages)
