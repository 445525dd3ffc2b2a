"""What a program takes for a message: memory in every state in which a sender may have left it, read by the kernels' own words.

Under Triton's interpreter where there is no GPU.
"""

import pytest
import torch
import triton
import triton.language as tl
from toolkit.kernels import DEVICE, HAS_GPU

from specdec.parallel.symmetric import messages_triton
from specdec.parallel.symmetric.messages_triton import receive

COUNT, CALL = 8, 5
SENDER = 2


@triton.jit
def receive_kernel(
    at, out, fault, number, patience, SENDER: tl.constexpr, COUNT: tl.constexpr, LAST: tl.constexpr, SYS: tl.constexpr
):
    index = tl.arange(0, COUNT)
    place = at + (index * 0 if LAST else index * 2)
    tl.store(out + index, receive(place, number, index, fault, patience, SENDER, LAST, SYS))


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try takes the interpreter a millisecond."""
    if not HAS_GPU:
        monkeypatch.setattr(messages_triton, "LOOK", tl.constexpr(2))


def received(memory: torch.Tensor, last: bool = False) -> tuple[list[int], int]:
    """(what the program goes on with, the fault that it leaves) if nothing else comes."""
    out, fault = torch.zeros(COUNT, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    patience = 10**6 if HAS_GPU else -1  # the interpreter has no clock: a program gives up at its first look at it
    receive_kernel[(1,)](memory.to(DEVICE), out, fault, CALL, patience, SENDER, COUNT, last, HAS_GPU, num_warps=1)
    return out.tolist(), int(fault)


def pairs(marks: list[tuple[int, int]]) -> torch.Tensor:
    """Pairs of messages with these numbers.  Their words are 2 i + 1 and 2 i + 2."""
    return torch.tensor([mark << 32 | word for i, both in enumerate(marks) for word, mark in enumerate(both, 2 * i + 1)])


def test_messages_of_the_call_are_taken() -> None:
    assert received(pairs([(CALL, CALL)] * COUNT)) == ([(2 * i + 2) << 32 | (2 * i + 1) for i in range(COUNT)], 0)
    assert received(torch.tensor([CALL], dtype=torch.int32), last=True) == ([0] * COUNT, 0)


@pytest.mark.parametrize(
    "odd",
    [(0, 0), (CALL - 2, CALL - 2), (CALL + 2, CALL + 2), (CALL, CALL - 2), (CALL - 2, CALL)],
    ids=["new memory", "an earlier call", "before numbers began anew", "its first half", "its second half"],
)
def test_a_message_that_has_not_come_is_no_number(odd: tuple[int, int]) -> None:
    """Keeps out: words of another call, or of half a message, taken for this call's because the other pairs are there; and
    numbers, instead of NaN, of a rank that never sent them."""
    for place in (0, COUNT - 1):
        marks = [(CALL, CALL)] * COUNT
        marks[place] = odd
        assert received(pairs(marks)) == ([-1] * COUNT, SENDER + 1)


@pytest.mark.parametrize("mark", [0, CALL - 2, CALL + 2])
def test_rows_are_read_after_their_mark_alone(mark: int) -> None:
    """Keeps out: rows that are read although the mark stored after them is that of another call."""
    assert received(torch.tensor([mark], dtype=torch.int32), last=True) == ([-1] * COUNT, SENDER + 1)
