"""What is learnt of paths, against a count by hand; and the kernels against the definitions."""

import random
from collections import Counter

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.batch.emitted import NewTokens
from specdec.draft.join.paths import Paths
from specdec.draft.join.survival import (
    ALL,
    CHAIN,
    FEW,
    FIRST_DEPTHS,
    LENGTHS,
    MAX_TRIALS,
    MOST,
    ONCE,
    SUPPORTS,
    PathClass,
    Survival,
    halved,
    support_of,
)  # fmt: skip

CLASSES = 0, 2, 1, 2  # of the paths
RISING = PathClass(tuple(0.1 * (1 + length) for length in range(LENGTHS)))
P, D, E, ROWS = len(CLASSES), 7, 5, 6


def some() -> Survival:
    return Survival([RISING, RISING, CHAIN], torch.device("cpu"))


def a_round(seed: int) -> tuple[Paths, NewTokens, torch.Tensor]:
    """Paths of a few tokens of two with their lengths, what a round emitted, and which rows count."""
    rng = random.Random(seed)
    tokens = torch.tensor([[[rng.randrange(2) for _ in range(D)] for _ in range(P)] for _ in range(ROWS)])
    tokens[:, -1, rng.randrange(D) :] = -1
    lengths = torch.tensor([[rng.randrange(LENGTHS + 3) for _ in range(P)] for _ in range(ROWS)])
    last = torch.tensor([rng.randrange(E) for _ in range(ROWS)])
    new = NewTokens(torch.zeros(ROWS, dtype=torch.int32), torch.randint(2, (ROWS, E)), last, None)
    parts = torch.tensor([[rng.randrange(-1, D) for _ in range(P)] for _ in range(ROWS)])
    support = torch.tensor([[rng.randrange(SUPPORTS) for _ in range(P)] for _ in range(ROWS)])
    return (
        Paths(tokens, lengths, support, torch.tensor(CLASSES), parts),
        new,
        torch.tensor([rng.randrange(2) for _ in range(ROWS)]),
    )


def counted(rounds: list[int]) -> Counter[tuple[int, int, int, int, int]]:
    """(class, length, support, group, 0 for a trial and 1 for an accepted one): how often."""
    found = Counter[tuple[int, int, int, int, int]]()
    for seed in rounds:
        (tokens, lengths, support, _, parts), new, active = a_round(seed)
        for b in range(ROWS):
            for p, kind in enumerate(CLASSES):
                for d in range(min(D, E)):
                    token = int(tokens[b, p, d])
                    if not active[b] or d > int(new.last_B[b]) or token < 0:
                        break
                    group = max(i for i, first in enumerate(FIRST_DEPTHS) if d >= first)
                    group += len(FIRST_DEPTHS) * (d == int(parts[b, p]))
                    cell = kind, min(int(lengths[b, p]), LENGTHS - 1), int(support[b, p]), group
                    found[*cell, 0] += 1
                    if token != int(new.tokens_BE[b, d]):
                        break
                    found[*cell, 1] += 1
    return found


def test_counts_are_those_by_hand() -> None:
    """Keeps out: trials after a wrong token, in rows of padding, after the bonus token or after a path's end."""
    survival = some()
    for seed in range(20):
        torch.manual_seed(seed)
        survival.learn(*a_round(seed))
    want = torch.zeros_like(survival.counts_CLKG2)
    for seed in range(20):
        torch.manual_seed(seed)
        for cell, times in counted([seed]).items():
            want[cell] += times
    assert torch.equal(survival.counts_CLKG2, want) and int(want.sum()) > 300


def test_rates_follow_what_was_accepted() -> None:
    """Keeps out: rates of another class, length or support, and a logarithm of 0."""
    survival = some()
    paths = Paths.empty(1, range(3), 6, torch.device("cpu"))
    paths.lengths_BP.copy_(torch.tensor([[8, 0, 0]]))
    paths.parts_BP.copy_(torch.tensor([[-1, 0, -1]]))
    before = survival.log_rates(paths, 6)
    assert bool((before < 0).all()) and bool(before.isfinite().all())
    survival.counts_CLKG2[0, 8, ONCE, :] = torch.tensor([100, 100], dtype=torch.int32)
    survival.counts_CLKG2[1, 0, ONCE, :] = torch.tensor([100, 0], dtype=torch.int32)
    after = survival.log_rates(paths, 6).exp()
    assert bool((after[0, 0] > 0.98).all()) and bool((after[0, 1] < 0.04).all()) and bool((after[0, 1] > 0).all())
    assert torch.equal(after[0, 2], before[0, 2].exp())


def test_what_supports_a_match() -> None:
    """Keeps out: a single match that counts as one that all agree with, and half of the matches as most of them."""
    agree, total = torch.tensor([1, 3, 3, 2, 1, 1]), torch.tensor([1, 3, 4, 4, 2, 3])
    assert support_of(agree, total).tolist() == [ONCE, ALL, MOST, FEW, FEW, FEW]
    prior = RISING.prior()
    assert bool((prior[:-1, ALL] > prior[:-1, ONCE]).all()) and bool((prior[:-1, ONCE] >= prior[:-1, FEW]).all())
    assert bool(((prior > 0) & (prior <= 1)).all())


def test_old_trials_weigh_less() -> None:
    counts = torch.tensor([[MAX_TRIALS + 1, 7], [MAX_TRIALS, 7]], dtype=torch.int32)
    assert halved(counts).tolist() == [[(MAX_TRIALS + 1) // 2, 3], [MAX_TRIALS, 7]]


def test_the_kernels_learn_the_same() -> None:
    from specdec.draft.join.survival_triton import launch_learn

    survival = some()
    survival.counts_CLKG2.random_(2 * MAX_TRIALS)
    ours = survival.counts_CLKG2.to(DEVICE)
    for seed in range(4):
        paths, new, active = a_round(seed)
        survival.learn(paths, new, active)
        there = NewTokens(*(None if x is None else x.to(DEVICE) for x in new))  # type: ignore[arg-type]
        launch_learn(ours, Paths(*(x.to(DEVICE) for x in paths)), there, active.to(DEVICE))
    assert torch.equal(ours.cpu(), survival.counts_CLKG2)


def test_the_kernel_halves_the_same() -> None:
    """Keeps out: cells that are halved alone, or beyond the table's end."""
    from specdec.draft.join.survival_triton import launch_learn

    survival, (paths, new, active) = some(), a_round(1)
    survival.counts_CLKG2.random_(2 * MAX_TRIALS)
    ours = survival.counts_CLKG2.to(DEVICE)
    there = NewTokens(*(None if x is None else x.to(DEVICE) for x in new))  # type: ignore[arg-type]
    launch_learn(ours, Paths(*(x.to(DEVICE) for x in paths)), there, torch.zeros_like(active).to(DEVICE))
    assert torch.equal(ours.cpu(), halved(survival.counts_CLKG2))


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    test_the_kernels_learn_the_same()
