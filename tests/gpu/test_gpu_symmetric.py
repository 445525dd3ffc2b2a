"""Exchanges through GPUs' memory: right numbers, the same bits on all ranks, no hang."""

from collections.abc import Iterator

import pytest
import torch
from toolkit.parallel.gpus import aborted, every_exchange, in_turn, lost_rank, on_gpus, soak, sums_and_norms

from specdec.parallel.symmetric.measure import measure

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2)]

FEW = [(T, H) for H in (4096, 8192, 2880) for T in (1, 2, 3, 6, 8, 17, 32, 48, 64)]
MANY = [(T, H) for H in (4096, 8192, 2880) for T in (65, 192, 256, 300, 1024)] + [(5000, 4096), (8192, 8192)]


@pytest.fixture(autouse=True)
def _in_turn() -> Iterator[None]:
    with in_turn():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_and_norms_are_right_and_alike(dtype: torch.dtype) -> None:
    """Keeps out: rows that land in another row's place, a sum in the order of arrival, bits that depend on the row count."""
    cases = FEW + MANY if dtype == torch.bfloat16 else [(T, 4096) for T in (1, 6, 64, 65, 300)]
    assert on_gpus(2, sums_and_norms, cases, dtype) == [[], []]


def test_every_kernel_exchanges_a_few_numbers() -> None:
    """Keeps out: an access out of bounds, which `scripts/sanitize --ranks` sees in this test."""
    assert on_gpus(2, every_exchange, seconds=200.0) == [[], []]


def test_replays_and_eager_calls_follow_each_other() -> None:
    """Keeps out: a graph that remembers which half of the inbox was next, a rank that overtakes a late one."""
    shapes = [(1, 4096), (8, 4096), (1, 8192), (48, 4096), (200, 4096), (300, 2880)]
    for answer in on_gpus(2, soak, 10_000, shapes, 7):
        assert isinstance(answer, tuple), answer
        assert answer[0] == 0
        print(answer)


@pytest.mark.ranks(4)
def test_four_ranks() -> None:
    """Keeps out: places in the inbox that are right for two ranks only."""
    assert on_gpus(4, sums_and_norms, [(1, 4096), (5, 2880), (70, 4096), (300, 8192)], torch.bfloat16) == [[]] * 4
    # Sums of more rows than 170 go to the host group, which can't exchange while a graph is captured.
    for answer in on_gpus(4, soak, 1000, [(1, 4096), (8, 2880), (150, 4096)], 8):
        assert isinstance(answer, tuple) and answer[0] == 0, answer


def test_a_lost_rank_is_named() -> None:
    """Keeps out: a GPU that waits for ever for a rank that has gone; 20 calls that each wait for the whole time."""
    first, second = on_gpus(2, lost_rank, 1.0)
    assert "rank 1 did not come" in first[0] and 0.9 < first[1] < 2.0 and second[0] == "", (first, second)


def test_abort_ends_the_waiting() -> None:
    """Keeps out: a decoder that can't be closed while its GPU waits."""
    first, _ = on_gpus(2, aborted)
    assert 0.2 < first < 2.0, first


def test_doctor_s_measurement() -> None:
    """Keeps out: ranks that silently stay on NCCL; a measurement that hangs at its end."""
    found = measure(2)
    assert not found.problem and set(found.us) == {"memory", "NCCL"} and min(found.us["memory"]) > 0, found
    print(found)
