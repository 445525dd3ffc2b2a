"""Moving a row of the batch moves everything that a drafter holds for it."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from specdec.draft.block.rounds.worker import BlockWorker
from specdec.draft.drafter import Drafter
from specdec.draft.eagle.rows import EagleRows
from specdec.draft.eagle.worker import DraftWorker


def distinct_rows() -> EagleRows:
    """Three rows whose tensors hold different numbers everywhere."""
    rows = EagleRows.empty(3, 4, 6, max_pause=2, features=7, device="cpu", dtype=torch.float32)
    for number, tensor in enumerate(rows.tensors()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number)
    return rows


def test_a_moved_row_is_the_row() -> None:
    """Keeps out: a tensor that a move forgets.  A request would use another one's draft, and only acceptance would fall."""
    before, drafter = distinct_rows(), DraftWorker.__new__(DraftWorker)
    drafter.rows = distinct_rows()
    Drafter.move_rows(drafter, torch.tensor([2]), torch.tensor([0]))
    for field in fields(EagleRows):
        old, new = getattr(before, field.name), getattr(drafter.rows, field.name)
        assert old.numel() and not torch.equal(old[0], old[2]), f"{field.name}: the test is blind"
        assert torch.equal(new[0], old[2]), f"{field.name} was not moved"
        assert torch.equal(new[1:], old[1:]), f"{field.name} of another row changed"


@pytest.mark.parametrize("kind", [DraftWorker, BlockWorker])
def test_a_cleared_row_has_nothing_to_catch_up(kind: type[DraftWorker | BlockWorker]) -> None:
    """Keeps out: a new request whose drafter learns the tokens of the request that left the row in a pause."""
    drafter: Any = kind.__new__(kind)
    drafter.rows = distinct_rows()
    drafter.clear_rows(torch.tensor([1]))
    assert drafter.rows.pending_B.tolist() == [0, 0, 2]


def test_rows_that_never_drafted_hold_distinct_siblings() -> None:
    """Keeps out: a first level of equal tokens, of which acceptance takes several; keys then move from unwritten places."""
    rows = EagleRows.empty(3, 4, 6, device="cpu", dtype=torch.float32)
    assert all(len(set(tokens)) == 4 for tokens in rows.level1_tokens_BK.tolist())
