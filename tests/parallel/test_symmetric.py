"""Exchanges through memory that ranks share: the protocol in every order, and the kernels in Triton's interpreter.

There each rank is a process, and what the kernels write into the other processes' memory is there at once, in order.
"""

import random
import time

import pytest
import torch
from toolkit.parallel.inboxes import inboxes, on_processes
from toolkit.parallel.interleavings import Protocol, fault
from toolkit.parallel.ranks import ThreadGroup, on_ranks

from specdec.attention.context_parallel import symmetric_triton
from specdec.attention.context_parallel.all_to_all import pack_states
from specdec.attention.context_parallel.all_to_all_triton import launch_merge
from specdec.attention.state import AttentionState
from specdec.ops.norm import rms_norm
from specdec.parallel.group import Group
from specdec.parallel.nccl import NcclGroup
from specdec.parallel.symmetric import group as groups
from specdec.parallel.symmetric import inbox
from specdec.parallel.symmetric.group import SymmetricGroup

EPS = 1e-5


@pytest.mark.parametrize(
    "protocol",
    [Protocol(), Protocol(marked=True), Protocol(ranks=3, words=1, calls=3), Protocol(words=1, calls=7)],
    ids=["messages", "marks", "three ranks", "many calls"],
)
def test_every_order_gives_the_right_words(protocol: Protocol) -> None:
    """Keeps out: a rank that overwrites what another has not read yet, a wait that never ends."""
    assert fault(protocol) is None


@pytest.mark.parametrize(
    "broken",
    [
        Protocol(half=lambda count: 0),
        Protocol(number=lambda count: 1),
        Protocol(number=lambda count: count & 1),
        Protocol(number=lambda count: count),  # new memory holds 0
        Protocol(marked=True, mark_waits=False),
        Protocol(ranks=3, words=1, calls=3, half=lambda count: 0),
    ],
    ids=["one half", "one number", "two numbers", "number 0", "mark before words", "one half, three ranks"],
)
def test_a_broken_protocol_is_seen(broken: Protocol) -> None:
    """Keeps out: a search that looks at too few orders."""
    assert fault(broken) is not None


def partial_sum(rank: int, turn: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * turn + rank))


def added(partials: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, in float32, rounded once."""
    total = partials[0].float()
    for each in partials[1:]:
        total = total + each.float()
    return total.to(partials[0].dtype)


def many_calls(group: SymmetricGroup) -> list[str]:
    """What is wrong in a sequence of calls of all kinds and sizes, through which ranks go at different speeds."""
    alike, own, wrong = random.Random(group.size), random.Random(group.rank), []
    for turn in range(12):
        if own.random() < 0.3:
            time.sleep(own.random() * 0.02)
        T, H, dtype = alike.choice([1, 2, 5, 9]), alike.choice([40, 64]), alike.choice([torch.float32, torch.float16])
        groups.MAX_AS_MESSAGES = alike.choice([0, 1 << 20])
        partials = [partial_sum(rank, turn, T, H).to(dtype) for rank in range(group.size)]
        x, weight = partial_sum(9, turn, T, H + 4).to(dtype)[:, :H], partial_sum(8, turn, H)
        weight = weight.to(alike.choice([dtype, torch.float32]))
        kind = alike.choice(["norm", "add", "sum", "gather", "all_to_all"])
        if kind == "gather":
            ids = [(each * 1e9).long() << 20 for each in partials]
            good = torch.equal(group.all_gather(ids[group.rank]), torch.stack(ids))
        elif kind == "all_to_all":
            pieces = [torch.stack([each * rank for rank in range(1, group.size + 1)]) for each in partials]
            good = torch.equal(group.all_to_all(pieces[group.rank]), torch.stack([piece[group.rank] for piece in pieces]))
        elif kind == "sum":
            good = torch.equal(group.all_reduce(partials[group.rank]), added(partials))
        else:
            want = x + added(partials)
            if kind == "add":
                good = torch.equal(group.all_reduce_add(x, partials[group.rank]), want)
            else:
                total, normed = group.all_reduce_add_rms_norm(x, partials[group.rank], weight, EPS)
                tolerance = 1e-5 if dtype == torch.float32 else 2e-3
                close = torch.allclose(
                    normed.float(), rms_norm(want.float(), weight.float(), EPS), rtol=tolerance, atol=tolerance
                )
                good = torch.equal(total, want) and close
        wrong += [] if good else [f"rank {group.rank}, call {turn}: {kind} of {T} x {H} {dtype}"]
    return wrong


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_kernels_exchange_what_the_definition_says(ranks: int) -> None:
    """Keeps out: a sum in the order of arrival, a row in another's place, a column of padding, calls that meet each other."""
    assert on_processes(ranks, many_calls, row_bytes=1024, channels=2) == [[]] * ranks


def rows_of_one_order(group: SymmetricGroup) -> bool:
    """Whether a row's sum and norm, sent as messages, are those of the row among others, sent as they are."""
    group.use_one_order(True)
    groups.MAX_BEYOND_RING = 0  # otherwise, more than two ranks leave sums of rows to their other group
    partials = [partial_sum(rank, 0, 3, 16).half() for rank in range(group.size)]
    x, weight = partial_sum(8, 0, 3, 16).half(), partial_sum(9, 0, 16).half()
    found = []
    for rows, groups.MAX_AS_MESSAGES in ((1, 1 << 20), (3, 0)):
        found.append([each[:1] for each in group.all_reduce_add_rms_norm(x[:rows], partials[group.rank][:rows], weight, EPS)])
    right = torch.equal(found[0][0], (x + added(partials))[:1])
    return right and all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_row_s_sum_does_not_depend_on_the_rows_beside_it() -> None:
    """Keeps out: rows that are left to NCCL where there are many of them."""
    assert on_processes(3, rows_of_one_order, row_bytes=32, channels=2) == [True] * 3


def test_without_kernels_partial_sums_are_added_up_in_the_order_of_ranks() -> None:
    """Keeps out: NCCL's own sum, and torch's, whose orders depend on how many rows there are."""
    partials = [partial_sum(rank, 0, 50, 24).half() * 10.0**-rank for rank in range(4)]

    def sums(group: ThreadGroup) -> list[torch.Tensor]:
        nccl = NcclGroup.__new__(NcclGroup)  # without a GPU: nothing but its all_gather may be asked
        nccl.rank, nccl.size, nccl.all_gather = group.rank, group.size, group.all_gather  # type: ignore[method-assign]
        nccl.use_one_order(True)
        return [each.all_reduce(partials[group.rank][:rows]) for each in (group, nccl) for rows in (1, 50)]

    for found in on_ranks(4, sums):
        assert all(torch.equal(each, added(partials)[: len(each)]) for each in found)


def rows_beyond_the_inbox(group: SymmetricGroup) -> bool:
    groups.MAX_AS_MESSAGES = 0
    x = torch.zeros(11, 8)
    partials = [partial_sum(rank, 0, *x.shape) for rank in range(group.size)]
    return torch.equal(group.all_reduce_add(x, partials[group.rank]), added(partials))


def test_rows_beyond_the_inbox_go_in_several_exchanges() -> None:
    """Keeps out: a second piece that writes where the first one did, or whose rows are not stored."""
    assert on_processes(2, rows_beyond_the_inbox, row_bytes=32, channels=4) == [True, True]


@pytest.mark.parametrize("ranks", range(2, 9))
def test_an_inbox_has_room_for_all_senders(ranks: int) -> None:
    """Keeps out: rows that begin at no multiple of 16 bytes, or reach into another sender's, with a number of ranks that is no
    power of two; an inbox that takes a GPU's memory."""
    layout = inbox.Layout(ranks)
    assert layout.rows_at % 16 == layout.area % 16 == layout.marks_at % 4 == 0
    for row_bytes in (16, 5760, 8192, 16384, layout.row_bytes):
        assert 1 <= layout.slots(row_bytes) <= inbox.MARKS and layout.slots(row_bytes) * row_bytes <= layout.area
        assert row_bytes // 4 <= layout.capacity, "a row that travels as messages"
    areas = layout.channels * 2 * (ranks - 1)
    assert layout.num_bytes == areas * (8 * layout.capacity + layout.area + 4 * inbox.MARKS) < 192 << 20


def several_blocks(group: SymmetricGroup) -> list[bool]:
    """Of gathers and all-to-alls whose channels have one block, some of two, and all of two."""
    right = []
    for turn, count in enumerate((1023, 2 * 1024 + 3, 4 * 1024)):
        words = [torch.arange(count, dtype=torch.int32) * (10 + rank + turn) for rank in range(group.size)]
        right.append(torch.equal(group.all_gather(words[group.rank]), torch.stack(words)))
        pieces = [torch.stack([own + to for to in range(group.size)]) for own in words]
        right.append(torch.equal(group.all_to_all(pieces[group.rank]), torch.stack([each[group.rank] for each in pieces])))
    return right


def test_channels_that_send_several_blocks() -> None:
    """Keeps out: a block in the place of another one, a wait for a block that nobody sends."""
    assert on_processes(2, several_blocks, row_bytes=8192, channels=2) == [[True] * 6] * 2


def states_of_all(group: SymmetricGroup, T: int, H: int, E: int, dtype: torch.dtype) -> list[bool]:
    """Whether heads are gathered, and states exchanged by one kernel, as the other ways do it, bit for bit."""
    q = [partial_sum(rank, 1, T, H, E).to(dtype) for rank in range(group.size)]
    heads = torch.equal(group.all_gather_heads(q[group.rank]), torch.cat(q, dim=1))
    outs = [partial_sum(rank, 2, T, group.size * H, E).to(dtype) for rank in range(group.size)]
    lses = [partial_sum(rank, 3, T, group.size * H) * 9 for rank in range(group.size)]
    outs[1][0], lses[1][0], lses[0][1], lses[1][1] = torch.nan, -torch.inf, -torch.inf, -torch.inf
    states = [AttentionState(out, lse) for out, lse in zip(outs, lses)]
    want = launch_merge(torch.stack([pack_states(each, group.size)[group.rank] for each in states]), E)
    symmetric_triton.BLOCK, symmetric_triton.MAX_BLOCKS = (
        E * dtype.itemsize // 4,
        9,
    )  # two rows at once: a channel has several turns
    assert symmetric_triton.can_exchange(group.inbox, states[0])
    got = symmetric_triton.launch_all_to_all_states(group.inbox, group.rank, group.nanoseconds, states[group.rank])
    return [heads, torch.equal(got.out_THD, want.out_THD), torch.equal(got.lse_TH, want.lse_TH)]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("ranks", "T", "H", "E", "dtype"),
    [
        (2, 5, 3, 16, torch.float16), (3, 2, 3, 4, torch.float32), (5, 2, 2, 8, torch.float16), (8, 2, 1, 8, torch.float16),
    ],
)  # fmt: skip
def test_states_are_exchanged_and_merged_in_one_launch(ranks: int, T: int, H: int, E: int, dtype: torch.dtype) -> None:
    """Keeps out: a row in another's place, an lse of another row, NaN of a rank without a key, another order of ranks."""
    found = on_processes(ranks, lambda group: states_of_all(group, T, H, E, dtype), row_bytes=1024, channels=2)
    assert found == [[True] * 3] * ranks


def waits_in_vain(group: SymmetricGroup) -> str:
    group.patience = -1.0  # the interpreter has no clock
    if group.rank == 1:
        group.all_reduce(torch.ones(2, 4))
    return group.problem()


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a program that waits for ever."""
    monkeypatch.setattr("specdec.parallel.symmetric.messages_triton.LOOK", 4)
    assert on_processes(2, waits_in_vain) == ["", "rank 0 did not come to an exchange with rank 1 within -1 s"]


class Witness(Group):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.rank, self.size, self.asked = 0, 2, []  # type: ignore[var-annotated]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(list(x.shape))
        return torch.stack([x, x])


def test_what_kernels_can_not_take_goes_to_the_other_group() -> None:
    """Keeps out: rows longer than the inbox's, numbers that are no whole words, gradients that the kernels would lose, and
    ranks that wait for each other in different ways since one's thread records gradients."""
    base = Witness()
    group = SymmetricGroup(base, inboxes(2, 256)[0])
    ones = torch.ones(2, 128)
    with torch.no_grad():
        group.all_reduce_add_rms_norm(ones, ones, torch.ones(128), EPS)
        group.all_reduce_add(torch.ones(2, 36, dtype=torch.float16), torch.ones(2, 36, dtype=torch.float16))
        group.all_gather(torch.ones(3, dtype=torch.float16))
        group.all_reduce(torch.ones(1, dtype=torch.float64))
        group.all_reduce_min(3.0, torch.device("cpu"))
    group.all_reduce(torch.ones(1, 4))
    group.all_reduce_min(3.0, torch.device("cpu"))
    assert base.asked == [[2, 128], [2, 36], [3], [1], [1], [1, 4], [1]]


def test_ranks_that_can_not_reach_each_other_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a group that goes on over NCCL, several times as slow, and nobody is told."""

    def fails(*arguments: object) -> None:
        raise inbox.Unreachable("ranks 0 and 1 are on two machines")

    monkeypatch.setattr(groups, "open_inboxes", fails)
    base = Witness()
    with pytest.warns(UserWarning, match="over NCCL.*two machines"):
        assert groups.connect(base, torch.device("cpu")) is base
