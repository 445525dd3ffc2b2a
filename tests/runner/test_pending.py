"""What is on its way from the device, and is read or dropped."""

from typing import Any

import torch

from specdec.runner.pending import EmittedPending
from specdec.runner.readback import HostCopy, Readback


class Tickets:
    """A `Readback` that counts the copies that nobody has given back."""

    def __init__(self) -> None:
        self.open: set[int] = set()

    def start(self, source: torch.Tensor, begun: Any = None) -> "CountedTicket":
        self.open.add(id(source))
        return CountedTicket(self, id(source))


class CountedTicket:
    done = 0.0

    def __init__(self, counter: Tickets, name: int) -> None:
        self.counter, self.name = counter, name

    def drop(self) -> None:
        self.counter.open.remove(self.name)


def test_all_copies_are_given_back() -> None:
    """Keeps out: pinned memory of log-probabilities or trees that is lost whenever a step that emits them is dropped."""
    tickets, numbers, logprobs, trees = Tickets(), torch.zeros(4), torch.zeros(2, 3), torch.zeros(2, 4, 5)
    for besides in ((None, None), (logprobs, None), (None, trees), (logprobs, trees)):
        pending = EmittedPending(tickets, numbers, lambda _: [], besides[0], trees=besides[1])  # type: ignore[arg-type]
        assert len(tickets.open) == 3 - besides.count(None)
        pending.drop()
        assert not tickets.open


class Copying:
    """A copy's event on the device."""

    def __init__(self, has_come: bool) -> None:
        self.has_come = has_come

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        assert not self.has_come, "nobody needs to wait for what is there"
        self.has_come = True


def test_what_is_there_is_read_without_a_wait() -> None:
    """Keeps out: reads of copies that had come counted as waits, so that a host which never waits looks as if it did."""
    readback, host = Readback(torch.device("cpu")), torch.arange(3)
    for has_come, waits in ((True, 0), (False, 1), (True, 1)):
        assert HostCopy(readback, host, None, Copying(has_come), host).read(torch.Tensor.tolist) == [0, 1, 2]
        assert readback.waits == waits and (readback.wait_seconds > 0) == (waits > 0)
