"""Every order in which ranks and their messages can advance, for a model of the exchanges of messages_triton.py.

A rank sends its words, which arrive at any time and in any order, waits until it has found every other rank's, and begins the
next call.  Memory keeps what arrived last.  The model has one channel; programs of different channels share nothing.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

Word = tuple[int, tuple[int, int]]  # the number it is marked with; (sender, call) that it really belongs to
Key = tuple[int, int, int, int]  # receiver, sender, half, place


class Protocol(NamedTuple):
    """The choices of the kernels.  words: a sender's, in a call.  marked: the last word is sent after the others have arrived,
    and alone says that they are there."""

    ranks: int = 2
    words: int = 2
    calls: int = 4
    half: Callable[[int], int] = lambda count: count & 1
    number: Callable[[int], int] = lambda count: count + 1
    marked: bool = False
    mark_waits: bool = True


class State(NamedTuple):
    counts: tuple[int, ...]  # of calls that each rank has ended
    sent: tuple[bool, ...]
    read: tuple[frozenset[tuple[int, int]], ...]  # (sender, place) that a rank has read in this call
    memory: frozenset[tuple[Key, Word]]
    flying: frozenset[tuple[Key, Word]]


def fault(protocol: Protocol) -> str | None:
    """What goes wrong in some order, if anything does: a wrong word, or a wait that never ends."""
    nothing: frozenset[tuple[int, int]] = frozenset()
    first = State((0,) * protocol.ranks, (False,) * protocol.ranks, (nothing,) * protocol.ranks, frozenset(), frozenset())
    seen, waiting = {first}, [first]
    while waiting:
        state = waiting.pop()
        followers = []
        for wrong, follower in _steps(protocol, state):
            if wrong:
                return wrong
            followers.append(follower)
        if not followers and any(count < protocol.calls for count in state.counts):
            return f"all ranks wait after {state.counts} calls"
        for follower in followers:
            if follower not in seen:
                seen.add(follower)
                waiting.append(follower)
    return None


def _steps(protocol: Protocol, state: State) -> Iterator[tuple[str | None, State]]:
    yield from ((None, _arrive(protocol, state, item)) for item in state.flying if _may_arrive(protocol, state, item[0]))
    memory = dict(state.memory)
    for rank, count in enumerate(state.counts):
        if count == protocol.calls:
            continue
        half, number = protocol.half(count), protocol.number(count)
        others = [other for other in range(protocol.ranks) if other != rank]
        if not state.sent[rank]:
            messages = {
                ((other, rank, half, place), (number, (rank, count))) for other in others for place in range(protocol.words)
            }
            yield None, state._replace(sent=_put(state.sent, rank, True), flying=state.flying | messages)
            continue
        wanted = {(other, place) for other in others for place in range(protocol.words)} - state.read[rank]
        for sender, place in wanted:
            at = protocol.words - 1 if protocol.marked else place
            if memory.get((rank, sender, half, at), (0, None))[0] != number:
                continue
            found = memory.get((rank, sender, half, place), (0, None))[1]
            wrong = None if found == (sender, count) else f"rank {rank} read {found} in call {count} of rank {sender}"
            yield wrong, state._replace(read=_put(state.read, rank, state.read[rank] | {(sender, place)}))
        if not wanted:
            yield (
                None,
                state._replace(
                    counts=_put(state.counts, rank, count + 1),
                    sent=_put(state.sent, rank, False),
                    read=_put(state.read, rank, frozenset()),
                ),
            )


def _may_arrive(protocol: Protocol, state: State, key: Key) -> bool:
    is_mark = protocol.marked and key[3] == protocol.words - 1
    return not (is_mark and protocol.mark_waits) or not any(
        other[:3] == key[:3] and other[3] < key[3] for other, _ in state.flying
    )


def _arrive(protocol: Protocol, state: State, item: tuple[Key, Word]) -> State:
    kept = frozenset(each for each in state.memory if each[0] != item[0])
    return state._replace(memory=kept | {item}, flying=state.flying - {item})


def _put(values: tuple, at: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:at], value, *values[at + 1 :])
