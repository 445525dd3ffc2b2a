"""Moving a row of the batch moves everything that the batch's tensors hold for it."""

from dataclasses import fields

import torch

from specdec.batch.state import BatchState


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
