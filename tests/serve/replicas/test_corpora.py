"""A corpus that is posted to one replica, and a switch of its drafts, reach all of them.  Ray is a stand-in here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from specdec.serve.replicas.replica import Replica

T = TypeVar("T")


class Handle:
    """Calls a method of all replicas, as Ray's handle does; `dead` ones answer with an error."""

    def __init__(self, replicas: list[Replica], dead: Sequence[Replica], is_slow: bool) -> None:
        self.replicas, self.dead, self.is_slow = replicas, dead, is_slow

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results_async(timeout_s: float, return_exceptions: bool) -> list[Any]:
            assert return_exceptions and timeout_s > 0
            if self.is_slow:
                raise TimeoutError
            asked = [getattr(each, method)(*args) for each in self.replicas if each not in self.dead]
            return [*await asyncio.gather(*asked), *(ConnectionError("gone") for _ in self.dead)]

        return SimpleNamespace(results_async=results_async)


class Drafts(SimpleNamespace):
    """What a switch of drafts needs of a decoder."""

    is_drafting: bool

    def set_drafting(self, enabled: bool) -> None:
        self.is_drafting = enabled

    def close(self) -> None: ...


def some_replicas(dead: int = 0, is_slow: bool = False) -> tuple[list[Replica], list[dict[str, Sequence[str]]]]:
    replicas, held = [Replica.__new__(Replica) for _ in range(3)], [dict[str, Sequence[str]]() for _ in range(3)]
    for replica, corpora in zip(replicas, held, strict=True):

        def set_corpus(name: str, texts: Sequence[str], corpora: dict[str, Sequence[str]] = corpora) -> int:
            if "bad" in texts:
                raise ValueError("a bad text")
            corpora[name] = texts
            return len(texts)

        async def prepared(work: Callable[[Any], int], own: Any = set_corpus) -> int:
            return work(SimpleNamespace(set_corpus=own))

        drafts = Drafts(is_drafting=True, owner=SimpleNamespace(settle=lambda: None))
        replica.decoder = SimpleNamespace(prepared=prepared, decoder=drafts)  # type: ignore[assignment]
        replica._all_replicas = lambda: Handle(replicas, replicas[len(replicas) - dead :], is_slow)  # type: ignore[attr-defined]
    return replicas, held


def said(setting: Awaitable[T]) -> T:
    async def run() -> T:
        return await setting

    return asyncio.run(run())


def test_all_replicas_have_it() -> None:
    """Keeps out: a corpus in the replica alone to which a proxy has sent it; one that is wrong in some of them."""
    replicas, held = some_replicas()
    assert said(replicas[1].set_all_corpora("notes", ["a", "b"])) == 2
    assert held == [{"notes": ["a", "b"]}] * 3
    with pytest.raises(ValueError, match="a bad text"):
        said(replicas[0].set_all_corpora("notes", ["bad"]))
    assert held == [{"notes": ["a", "b"]}] * 3


def test_a_replica_that_does_not_answer_is_told() -> None:
    """Keeps out: an answer that says all is well while a replica lacks the corpus."""
    replicas, held = some_replicas(dead=1)
    with pytest.raises(RuntimeError, match="1 of 3 replicas have not set corpus 'notes'"):
        said(replicas[0].set_all_corpora("notes", ["a"]))
    assert held[0] == held[1] == {"notes": ["a"]}
    with pytest.raises(RuntimeError, match="not all replicas have set corpus 'notes' within"):
        said(some_replicas(is_slow=True)[0][0].set_all_corpora("notes", ["a"]))


def test_all_replicas_are_switched() -> None:
    """Keeps out: drafts of one replica that an audit has stopped, which go on in another or can't be switched on again; and an
    answer that all draft while one does not."""
    replicas, _ = some_replicas()
    assert said(replicas[2].switch_all_drafts(None)) is True
    replicas[0].decoder.decoder.is_drafting = False  # type: ignore[misc]  # by its own audit
    assert said(replicas[2].switch_all_drafts(None)) is False
    for enabled in (True, False, True):
        assert said(replicas[1].switch_all_drafts(enabled)) is enabled
        assert [each.decoder.decoder.is_drafting for each in replicas] == [enabled] * 3
    with pytest.raises(RuntimeError, match="1 of 3 replicas have not told whether they draft"):
        said(some_replicas(dead=1)[0][0].switch_all_drafts(False))
