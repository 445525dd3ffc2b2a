"""Paths that end where texts halt: the definition against a walk by hand, the kernel against the definition.

Shapes: B sequences, E places on a path.
"""

from __future__ import annotations

import random

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.batch.emitted import EmittedRows
from specdec.batch.state import BatchState
from specdec.grammar.wait_table import WaitTable
from specdec.verify.accept import Accepted
from specdec.verify.halt import halt
from specdec.verify.halt_triton import launch_halt

VOCABULARY = 30


def random_table(draw: random.Random) -> WaitTable:
    states, classes = draw.randrange(1, 9), draw.randrange(1, 6)
    tokens = tuple(draw.sample(range(VOCABULARY), draw.randrange(VOCABULARY)))
    after = tuple(draw.randrange(states) for _ in range(states * classes))
    of_tokens = tuple(draw.randrange(classes) for _ in tokens)
    return WaitTable(tokens, of_tokens, classes, after, draw.randrange(states + 1), draw.randrange(states), draw.random() < 0.5)


def random_round(draw: random.Random, B: int, E: int) -> tuple[BatchState, list[WaitTable | None], Accepted, Tensor, Tensor]:
    """A state after the acceptance rule: some rows wait for nothing, some are inactive."""
    state = BatchState.empty(B, 4, page_size=1, device="cpu").with_waits(VOCABULARY)
    tables = [random_table(draw) if draw.random() < 0.8 else None for _ in range(B)]
    for row, table in enumerate(tables):
        if table is not None:
            state.waiting.enter(row, table)
    state.active_B.copy_(torch.tensor([int(draw.random() < 0.8) for _ in range(B)]))
    base_B, root_B = torch.randint(50, (B,)).int(), torch.randint(VOCABULARY, (B,))
    accepted_B = torch.randint(E, (B,))
    tokens_BE = torch.randint(VOCABULARY, (B, E))
    path_BE = torch.sort(torch.rand(B, 3 * E).argsort(1)[:, :E], dim=1).values
    path_BE = path_BE.where(torch.arange(E) <= accepted_B[:, None], torch.arange(E))
    state.lens_B.copy_(base_B + (accepted_B + 1) * state.active_B)
    state.bonus_B.copy_(tokens_BE.gather(1, accepted_B[:, None])[:, 0])
    emitted = EmittedRows.of(accepted_B, tokens_BE, torch.randint(E, (B, 2)))
    if draw.random() < 0.5:
        emitted = emitted.with_sources(torch.randint(9, (B, E)))
    return state, tables, Accepted(path_BE, accepted_B, tokens_BE, emitted), base_B, root_B


@pytest.mark.parametrize("halts", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_a_path_ends_where_its_text_halts(seed: int, halts: bool) -> None:
    """Keeps out: a token after the place; a row that has halted and emits something; lengths, bonus tokens and numbers for the
    host that disagree; a row without a table that is cut."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    B, E = 9, draw.randrange(1, 8)
    state, tables, before, base_B, root_B = random_round(draw, B, E)
    after = halt(state, before, base_B, root_B, halts)
    rows = after.emitted.read(after.emitted.numbers_BX)
    for row, (table, said) in enumerate(zip(tables, rows, strict=True)):
        count = int(before.accepted_B[row] + 1) * int(state.active_B[row])
        tokens = before.tokens_BE[row, :count].tolist()
        if table is not None and halts:
            kept = list[int]()
            for token in tokens:
                if table.led(kept).halts:
                    break
                kept.append(token)
            tokens = kept
        assert said.tokens == tokens and said.halted == (table is not None and table.led(tokens).halts)
        assert len(said.sources) == (max(0, len(tokens) - 1) if before.emitted.num_sources else 0)
        assert state.lens_B[row] == base_B[row] + len(tokens)
        assert state.bonus_B[row] == (tokens[-1] if tokens else root_B[row])
        last = max(0, len(tokens) - 1)
        assert after.accepted_B[row] == last
        assert after.path_BE[row].tolist() == [*before.path_BE[row, : last + 1].tolist(), *range(last + 1, E)]
        assert table is None or state.waiting.state_B[row] == table.led(tokens).state


@pytest.mark.parametrize("halts", [True, False])
@pytest.mark.parametrize("E", [1, 5, 17])
def test_the_kernel_equals_the_definition(E: int, halts: bool) -> None:
    """Keeps out: a kernel that takes one token more or less, or writes another row's numbers."""
    torch.manual_seed(E)
    state, _, before, base_B, root_B = random_round(random.Random(E), 6, E)
    waits = type(state.waiting)(*(tensor.to(DEVICE, copy=True) for tensor in state.waiting.tensors()))
    copy = BatchState(*(tensor.to(DEVICE, copy=True) for tensor in state.tensors()), page_size=1, waits=waits)
    ours = Accepted(*(tensor.to(DEVICE, copy=True) for tensor in before[:3]), before.emitted)  # type: ignore[arg-type]
    taken_B, halted_B = launch_halt(copy, ours, base_B.to(DEVICE), root_B.to(DEVICE), halts)
    want = halt(state, before, base_B, root_B, halts)
    assert torch.equal(taken_B.cpu() - 1, want.emitted.accepted_B)
    assert torch.equal(halted_B.cpu(), want.emitted.numbers_BX[:, -1])
    assert torch.equal(ours.path_BE.cpu(), want.path_BE) and torch.equal(ours.accepted_B.cpu(), want.accepted_B)
    assert torch.equal(waits.state_B.cpu(), state.waiting.state_B)
    for name in ("lens_B", "bonus_B"):
        assert torch.equal(getattr(copy, name).cpu(), getattr(state, name)), name
