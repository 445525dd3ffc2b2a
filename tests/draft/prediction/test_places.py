"""Places of an answer in its prediction: against a search by hand, and the kernels against the definitions."""

import random
from typing import Any

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.draft.join.paths import Paths
from specdec.draft.join.survival import IN_STEP, ONCE
from specdec.draft.ngram.lookup import MAX_MATCH
from specdec.draft.prediction.places import LEAST, fill_paths, follow
from specdec.draft.prediction.source import PredictionRows

ROWS, DEPTH = 6, 5


def some_rows(seed: int) -> tuple[PredictionRows, list[list[int]], list[list[int]], list[int]]:
    """Rows of few tokens; their predictions, the answers' last tokens, and the places where the answers would be."""
    rng = random.Random(seed)
    alphabet = rng.choice([1, 2, 5])
    predictions = [[rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 2, 9, 30]))] for _ in range(ROWS)]
    answers = [[rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 3, 20]))] for _ in range(ROWS)]
    if predictions[0]:
        answers[0] = predictions[0][: rng.randrange(len(predictions[0]) + 1)]
    recent = [[*[-1] * MAX_MATCH, *answer][-MAX_MATCH:] for answer in answers]
    places = [rng.randrange(34) for _ in range(ROWS)]
    rows = PredictionRows.empty(ROWS, 30, torch.device("cpu"))
    for row, ids in enumerate(predictions):
        rows.ids_RX[row] = torch.tensor(ids + [7] * (30 - len(ids)))  # what an earlier request has left
    rows.sizes_R.copy_(torch.tensor([len(ids) for ids in predictions]))
    rows.recent_RM.copy_(torch.tensor(recent))
    rows.at_R.copy_(torch.tensor(places))
    return rows, predictions, recent, places


def match(prediction: list[int], recent: list[int], place: int) -> int:
    """How many of the answer's last tokens stand before a place, where the beginnings of both count as equal."""
    length = 0
    while length < MAX_MATCH and (prediction[place - 1 - length] if place > length else -1) == recent[-1 - length]:
        length += 1
    return length


def found(prediction: list[int], recent: list[int], at: int) -> tuple[list[tuple[int, int]], int]:
    """(place, match) of both paths, and where the answer is taken to be."""
    order = sorted(range(len(prediction)), key=lambda q: (-match(prediction, recent, q), abs(q - at), q < at))
    if not order:
        return [], at
    first = order[0]
    second = at if at != first and at < len(prediction) else order[1] if len(order) > 1 else None
    length = match(prediction, recent, first)
    paths = [(q, match(prediction, recent, q)) for q in (first, second) if q is not None]
    return paths, first if length >= LEAST else at


def check(seed: int, depth: int = DEPTH, on_device: bool = False) -> None:
    rows, predictions, recent, places = some_rows(seed)
    out = Paths.empty(ROWS, (0, 0, 1, 2), 7, torch.device("cpu"))
    out.tokens_BPD.fill_(5), out.lengths_BP.fill_(5), out.support_BP.fill_(5)  # what another round has left
    if on_device:
        from specdec.draft.prediction.places_triton import launch_paths

        there = PredictionRows(*(tensor.to(DEVICE, copy=True) for tensor in rows.tensors()))
        on = Paths(*(tensor.to(DEVICE) for tensor in out))
        launch_paths(there, depth, on.of_source(1, 2))
        rows.found_R.copy_(there.found_R)
        out = Paths(*(tensor.cpu() for tensor in on))
    else:
        fill_paths(rows, depth, out.of_source(1, 2))
    assert bool((out.tokens_BPD[:, (0, 3)] == 5).all()) and bool((out.lengths_BP[:, (0, 3)] == 5).all())
    for row in range(ROWS):
        paths, where = found(predictions[row], recent[row], places[row])
        assert int(rows.found_R[row]) == where
        for p in range(2):
            place, length = paths[p] if p < len(paths) else (0, 0)
            ids = predictions[row][place : place + depth] if p < len(paths) else []
            assert out.tokens_BPD[row, 1 + p].tolist() == ids + [-1] * (7 - len(ids)), (row, p)
            assert int(out.lengths_BP[row, 1 + p]) == length
            is_in_step = p < len(paths) and place == places[row]
            assert int(out.support_BP[row, 1 + p]) == (IN_STEP if is_in_step else ONCE)


@pytest.mark.parametrize("seed", range(30))
def test_places_are_those_by_hand(seed: int) -> None:
    """Keeps out: tokens of an earlier request, a place after the end, beginnings that don't match, the farther place."""
    check(seed, 2 + seed % 6)


@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_finds_the_same_places(seed: int) -> None:
    check(seed, 2 + seed % 6, on_device=True)


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    for seed in range(60):
        check(seed, 2 + seed % 6, on_device=True)
        check_follow(seed)


def check_follow(seed: int) -> None:
    """The kernel and the definition move an answer on alike, and as a list of tokens would."""
    from specdec.draft.prediction.places_triton import launch_follow

    rows, _, recent, places = some_rows(seed)
    rows.found_R.copy_(torch.randint(30, (ROWS,)))
    tokens, counts = torch.randint(9, (ROWS, 11)), torch.randint(12, (ROWS,))
    counts[0] = 0
    there: Any = PredictionRows(*(tensor.to(DEVICE, copy=True) for tensor in rows.tensors()))
    starts = rows.found_R.tolist()
    launch_follow(there, tokens.to(DEVICE), counts.to(DEVICE))
    follow(rows, tokens, counts)
    for row, count in enumerate(counts.tolist()):
        assert rows.recent_RM[row].tolist() == (recent[row] + tokens[row, :count].tolist())[-MAX_MATCH:]
        assert int(rows.at_R[row]) == (starts[row] + count if count else places[row])
    assert torch.equal(there.recent_RM.cpu(), rows.recent_RM) and torch.equal(there.at_R.cpu(), rows.at_R)


@pytest.mark.parametrize("seed", range(4))
def test_answers_go_on(seed: int) -> None:
    """Keeps out: a row of padding that moves, and tokens after the last one that was emitted."""
    check_follow(seed)
