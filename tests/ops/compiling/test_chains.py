"""The table of chained launches says what the kernels' source does."""

from collections.abc import Iterator

import pytest
from toolkit.ahead.chained import Found, kernels

from specdec.ops.compiling.chains import CHAINS


@pytest.fixture(scope="module")
def source() -> Iterator[dict[str, Found]]:
    yield kernels()


def test_every_kernel_stands_in_the_table(source: dict[str, Found]) -> None:
    """Keeps out: a kernel whose neighbours nobody has thought of."""
    assert set(source) == set(CHAINS) and len(CHAINS) > 70


def test_kernels_trigger_when_the_table_says(source: dict[str, Found]) -> None:
    """Keeps out: a trigger that moves across a wait, and with it what the kernel behind may read: a race."""
    for name, found in source.items():
        when = "unchained" if not found.waits else "early" if found.early else "late" if found.triggers else "never"
        assert when == CHAINS[name].trigger, name


def test_kernels_read_before_their_wait_what_the_table_says(source: dict[str, Found]) -> None:
    """Keeps out: one more load before a wait, of what the kernel in front may still be writing."""
    for name, found in source.items():
        assert not found.waits or found.reads == CHAINS[name].reads, name


def test_nothing_is_written_before_a_wait(source: dict[str, Found]) -> None:
    """Keeps out: a store into memory that the kernel in front may still be reading."""
    assert {name for name, found in source.items() if found.waits and found.stores} == set()
