"""What is on its way from the device, and is dropped."""

from typing import Any

import torch

from specdec.runner.pending import EmittedPending


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
