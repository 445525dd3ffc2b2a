"""Rows of a batch: a move takes along all that the tensors hold for one, and it runs when its prompt is complete."""

from dataclasses import fields

import torch

from specdec.batch.sampling import RowSampling
from specdec.batch.state import BatchState
from specdec.steps import RowOptions


def distinct_state() -> BatchState:
    """Three rows whose tensors hold different numbers everywhere."""
    state = BatchState.empty(3, 5, page_size=1, device="cpu")
    for number, tensor in enumerate(state.tensors()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number)
    return state


def test_a_moved_row_is_the_row() -> None:
    """Keeps out: a tensor that a move forgets.  A request would use another one's draft, and only acceptance would fall."""
    before, state = distinct_state(), distinct_state()
    state.move_rows(torch.tensor([2]), torch.tensor([0]))
    for field in fields(BatchState):
        if field.kw_only:  # belongs to no row
            continue
        old, new = getattr(before, field.name), getattr(state, field.name)
        assert old.numel() and not torch.equal(old[0], old[2]), f"{field.name}: the test is blind"
        assert torch.equal(new[0], old[2]), f"{field.name} was not moved"
        assert torch.equal(new[1:], old[1:]), f"{field.name} of another row changed"


def test_a_row_runs_when_its_prompt_is_complete() -> None:
    """Keeps out: rounds that read, or write to, the pages of a prompt of which chunks are still to come."""
    state = BatchState.empty(3, 2, page_size=4, device="cpu")
    rows, own = torch.tensor([2, 0]), torch.tensor([[[5, 6]], [[7, 8]]])
    state.enter_rows(rows, own, RowSampling.of([RowOptions.of()] * 2, "cpu"), torch.ones(2))
    assert not state.page_table_BGW.any(), "entered rows are padding for rounds"
    state.start_rows(rows, torch.tensor([6, 3]).int(), torch.tensor([0, 1]).int(), torch.tensor([9, 9]))
    assert state.prompt_table_BGW[:, 0].tolist() == [[7, 8], [0, 0], [5, 6]]
    assert (state.lens_B.tolist(), state.active_B.tolist()) == ([3, 0, 0], [1, 0, 0])
    assert state.page_table_BGW[:, 0].tolist() == [[7, 8], [0, 0], [0, 0]]
