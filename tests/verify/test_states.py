"""Rows of recurrent states: numbers never meet, and moves, captures and trials lose nothing."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.states import StateRows
from specdec.batch.trees.states_triton import launch_commit_states, launch_state_numbers
from specdec.limits import RESERVED_STATES, TRASH, ZEROS

ROWS, PLACES = 5, 4  # and a row of padding


def state_of(active: list[int]) -> BatchState:
    state = BatchState.empty(ROWS + 1, 1, page_size=1, device="cpu")
    return replace(state, active_B=torch.tensor(active, dtype=torch.int32))


def test_numbers_stay_a_row_s_own_through_everything() -> None:
    """Keeps out: two rows that write one state, a row that writes what it reads, a state that a waiting or padded row touches,
    and a pending path that stays behind when its row moves or ends.
    """
    chance, rows = random.Random(0), StateRows.empty(ROWS + 1, PLACES, "cpu")
    holds: dict[int, list[int]] = {}  # row -> what its state holds: the tokens of its text
    written: dict[int, list[int]] = {ZEROS: []}  # number -> the text whose state lies there
    pending: dict[int, list[int]] = {}
    for turn in range(400):
        action, token = chance.choice(["enter", "chunk", "round", "move", "capture"]), [turn]
        running = sorted(holds)
        if action == "enter" and len(running) < ROWS:
            row = len(running)
            rows.enter_rows(torch.tensor([row]), torch.tensor([ZEROS]))
            holds[row], pending[row] = [], []
        elif action in ("round", "capture") and running:
            active = [int(row in holds and chance.random() < 0.8) for row in range(ROWS + 1)]
            before = [tensor.clone() for tensor in rows.tensors()]
            state = state_of(active)
            path_BE = torch.tensor([[0, *sorted(chance.sample(range(1, 9), PLACES - 1))] for _ in active])
            accepted_B = torch.tensor([chance.randrange(PLACES) for _ in active])
            steps = rows.tree_steps(state, DraftTree.chain(torch.zeros(ROWS + 1, 9, dtype=torch.int64)))
            for row, runs in enumerate(active):
                read, write = int(steps.read_B[row]), int(steps.write_B[row])
                if not runs:
                    assert (read, write, int(steps.count_B[row])) == (ZEROS, TRASH, 0)
                    continue
                assert write >= RESERVED_STATES and read != write
                assert written[read] + pending[row] == holds[row]
                assert steps.path_BE[row, : int(steps.count_B[row])].tolist() == pending[row]
                written[write] = holds[row]
            rows.commit(state, path_BE, accepted_B)
            if action == "capture":
                for tensor, value in zip(rows.tensors(), before, strict=True):
                    tensor.copy_(value)
                continue
            for row in (row for row, runs in enumerate(active) if runs):
                pending[row] = path_BE[row, : int(accepted_B[row]) + 1].tolist()
                holds[row] = holds[row] + pending[row]
        elif action == "chunk" and (fresh := [row for row in running if not pending[row]]):
            row = chance.choice(fresh)
            number_R3: Tensor = rows.numbers_B3[row]
            read, write = int(number_R3[0]), int(number_R3[1])
            assert written[read] == holds[row] and read != write
            written[write] = holds[row] = holds[row] + token
            rows.ran(cast(RaggedPrompts, SimpleNamespace(rows_B=torch.tensor([row, ROWS]))))
        elif action == "move" and len(running) > 1:
            gap, last = chance.choice(running[:-1]), running[-1]
            rows.move_rows(torch.tensor([last]), torch.tensor([gap]))
            holds[gap], pending[gap] = holds.pop(last), pending.pop(last)
        own = rows.numbers_B3[:-1, 1:]
        assert sorted(own.flatten().tolist()) == list(range(RESERVED_STATES, RESERVED_STATES + 2 * ROWS))


@pytest.mark.parametrize("seed", range(2))
def test_kernels_equal_their_definitions(seed: int) -> None:
    """Keeps out: a row that does not run and loses what is pending, and places of an earlier, longer path."""
    active = [1, 0, 1, 1, 0, 0]
    rows, state = StateRows.empty(ROWS + 1, 9, "cpu"), state_of(active)
    for places in random.Random(seed).sample([1, PLACES, 9], 3):
        path_BE = torch.randint(60, (ROWS + 1, places))
        accepted_B = torch.randint(places, (ROWS + 1,))
        on_device = StateRows(*(tensor.to(DEVICE) for tensor in rows.tensors()))
        active_B = state.active_B.to(DEVICE)
        steps = rows.tree_steps(state, DraftTree.chain(torch.zeros(ROWS + 1, 1, dtype=torch.int64)))
        found = launch_state_numbers(active_B, on_device.numbers_B3, on_device.count_B)
        for got, want in zip(found, (steps.read_B, steps.write_B, steps.count_B), strict=True):
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
        rows.commit(state, path_BE, accepted_B)
        launch_commit_states(active_B, path_BE.to(DEVICE), accepted_B.to(DEVICE), *on_device.tensors())
        for got, want in zip(on_device.tensors(), rows.tensors(), strict=True):
            assert torch.equal(got.cpu(), want)
