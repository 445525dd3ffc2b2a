"""The training loop, and the rows that it reads: a resumed run is the run, and each row comes once an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specdec.train.checkpoint import BLOCK, Progress, TrainingCheckpoint
from specdec.train.loop import PAUSED, SECONDS, STEPS, WORSE, TrainSchedule, fit, learning_rate, make_optimizer
from specdec.train.step import StepClock, TrainStep
from specdec.train.text.rows import SIDE_ENDS, TokenRows, mixed_batches

SCHEDULE = TrainSchedule(steps=8, lr=0.1, warmup=2, weight_decay=0.1, eval_every=4)
ROWS = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0))


CLOCK = StepClock(torch.device("cpu"))


def fresh(folder: Path, small: bool = False) -> TrainingCheckpoint:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    return TrainingCheckpoint(folder / "checkpoint.pt", model, make_optimizer(model, SCHEDULE), {}, small)


def run(
    checkpoint: TrainingCheckpoint,
    progress: Progress,
    scale: float = 1.0,
    stop: int = 99,
    losses: Callable[[], float] = lambda: 0.0,
    schedule: TrainSchedule = SCHEDULE,
    clock: Callable[[], float] = lambda: 0.0,
    before: float = 0.0,
) -> list[int]:
    """Trains, up to an interrupt at step `stop`; the steps at which the loss was the lowest so far."""
    best: list[int] = []
    step = TrainStep(
        checkpoint.model, checkpoint.optimizer, lambda x: scale * (checkpoint.model(x[0]) - x[1]).square().mean(), CLOCK
    )

    def make_step(number: int, lr: float) -> tuple[Tensor, Tensor]:
        if number == stop:
            raise KeyboardInterrupt
        return step((ROWS[number % len(ROWS)], torch.tensor(float(number))), lr)

    on_best = lambda progress: best.append(progress.step)  # noqa: E731
    try:
        fit(schedule, checkpoint, progress, make_step, losses, on_best, clock, before)
    except KeyboardInterrupt:
        pass
    return best


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Keeps out: a resume that begins with step 0, with another rate, or without what the optimizer remembers."""
    whole, first, second = fresh(tmp_path), fresh(tmp_path), fresh(tmp_path)
    run(whole, Progress())
    run(first, Progress(), stop=6)
    progress = second.load()
    assert progress.step == 4 and len(progress.history) == 1
    run(second, progress)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "list"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    """Keeps out: a run that goes on with weights that a disk has changed, or ends with an error about something else."""
    checkpoint = fresh(tmp_path)
    checkpoint.save(Progress())
    saved, weights = checkpoint.path.read_bytes(), checkpoint.model.state_dict()["0.weight"].numpy().tobytes()
    assert saved.count(weights) == 1
    if damage == "list":
        torch.save([1, 2], checkpoint.path)
    else:
        changed = {"empty": b"", "cut": saved[:900], "changed": saved.replace(weights, weights[::-1])}
        checkpoint.path.write_bytes(changed[damage])
    with pytest.raises(ValueError, match="resume: expected a checkpoint at .*; start without --resume"):
        checkpoint.load()


@torch.no_grad()
def test_a_small_checkpoint_holds_the_run_in_a_third_of_the_bytes(tmp_path: Path) -> None:
    """Keeps out: second moments of 0, by which the next step divides, scales of another block, and a step counted anew."""
    torch.manual_seed(0)
    model = nn.Linear(3 * BLOCK + 5, 7)
    sizes, optimizer = [], make_optimizer(model, SCHEDULE)
    for weight in model.parameters():
        first = torch.randn(weight.shape) * torch.logspace(-6, 1, weight.numel()).view(weight.shape)
        optimizer.state[weight] = {"step": torch.tensor(9.0), "exp_avg": first, "exp_avg_sq": first.square() * 0.1}
    for small in (False, True):
        checkpoint = TrainingCheckpoint(tmp_path / "checkpoint.pt", model, optimizer, {}, small)
        checkpoint.save(Progress(step=9))
        sizes.append(checkpoint.path.stat().st_size)
    again = nn.Linear(3 * BLOCK + 5, 7)
    other = TrainingCheckpoint(checkpoint.path, again, make_optimizer(again, SCHEDULE), {})
    assert other.load().step == 9 and sizes[1] < 0.4 * sizes[0]
    for own, read in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(read, own.bfloat16().float())
        was, now = optimizer.state[own], other.optimizer.state[read]
        assert now["step"] == was["step"] and (now["exp_avg_sq"] > 0).all()
        for name in ("exp_avg", "exp_avg_sq"):
            a, b = (
                torch.nn.functional.pad(x[name].flatten(), (0, -x[name].numel() % BLOCK)).view(-1, BLOCK) for x in (was, now)
            )
            assert ((a - b).abs().amax(1) <= a.abs().amax(1) / 120).all(), name


@pytest.mark.parametrize(("seconds", "steps", "end"), [(6.0, 1 << 40, SECONDS), (600.0, 8, STEPS)])
def test_a_run_ends_with_its_seconds_or_its_steps(seconds: float, steps: int, end: str, tmp_path: Path) -> None:
    """Keeps out: a rate that has not fallen when the time is over, a run without an end, evaluations at other times."""
    checkpoint, progress, rates, now = fresh(tmp_path), Progress(), [], 100.0
    schedule = TrainSchedule(steps, 1.0, 0, 0.0, 0, seconds=seconds)

    def clock() -> float:
        return now

    def make_step(number: int, lr: float) -> tuple[Tensor, Tensor]:
        nonlocal now
        rates.append(lr)
        now += 0.5
        return torch.zeros(()), torch.zeros(())

    fit(schedule, checkpoint, progress, make_step, lambda: 0.0, lambda _: None, clock, before=7.0)
    assert progress.ended == end and progress.step == (12 if end == SECONDS else 8)
    assert progress.spent == progress.seconds + 7 and len(progress.history) == 8
    assert rates[0] == 1.0 and rates[-1] < 0.06 and rates == sorted(rates, reverse=True)


def test_a_call_that_pauses_is_gone_on_with(tmp_path: Path) -> None:
    """Keeps out: a call that ends without a checkpoint, counts the seconds of earlier calls, or goes on with another run."""
    ticks, whole = iter(range(1000)), fresh(tmp_path)
    run(whole, Progress())
    first, second, progress = fresh(tmp_path), fresh(tmp_path), Progress()
    pausing = replace(SCHEDULE, call_seconds=12.0)
    run(first, progress, schedule=pausing, clock=lambda: next(ticks), before=4.0)
    assert progress.ended == PAUSED and 0 < progress.step < 8
    progress = second.load()
    run(second, progress)
    assert progress.ended == STEPS and progress.step == 8
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


def test_a_run_that_gets_worse_ends(tmp_path: Path) -> None:
    """Keeps out: hours of overfitting, and a run that ends while another evaluation may still be better."""
    losses, progress = iter([3.0, 2.0, 2.5, 1.0, 1.5, 1.0, 9.0, 9.0]), Progress()
    every = replace(SCHEDULE, eval_every=1, patience=3)
    assert run(fresh(tmp_path), progress, losses=lambda: next(losses), schedule=every) == [1, 2, 4]
    assert (progress.ended, progress.step, progress.best_step) == (WORSE, 7, 4)


def test_the_rate_rises_to_its_peak_and_falls_to_a_hundredth() -> None:
    """Keeps out: a first step of rate 0, which trains nothing, and a fall that ends early, late or at 0."""
    schedule = TrainSchedule(steps=104, lr=1.0, warmup=4, weight_decay=0.0, eval_every=1)
    assert [learning_rate(schedule, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(schedule, 54) == pytest.approx(0.505) and learning_rate(schedule, 104) == pytest.approx(0.01)
    assert all(learning_rate(schedule, step) > learning_rate(schedule, step + 1) for step in range(4, 103))


def test_matrices_decay_and_gains_do_not(tmp_path: Path) -> None:
    """Keeps out: norms that are pulled to 0, and a weight decay that reaches nothing."""
    checkpoint = fresh(tmp_path)
    before = {name: weight.detach().clone() for name, weight in checkpoint.model.named_parameters()}
    for weight in checkpoint.model.parameters():
        weight.grad = torch.zeros_like(weight)
    checkpoint.optimizer.step()
    for name, weight in checkpoint.model.named_parameters():
        torch.testing.assert_close(weight, before[name] * (1 - 0.1 * 0.1) if weight.dim() > 1 else before[name])


def test_gradients_are_clipped(tmp_path: Path) -> None:
    """Keeps out: one odd row of text that throws the weights away."""
    checkpoint = fresh(tmp_path)
    run(checkpoint, Progress(), scale=1e4)
    squares = sum(float(weight.grad.square().sum()) for weight in checkpoint.model.parameters() if weight.grad is not None)
    assert math.sqrt(squares) == pytest.approx(1.0, 1e-3)


def test_the_lowest_loss_is_what_is_kept(tmp_path: Path) -> None:
    """Keeps out: weights of the last evaluation in place of the best one's."""
    found = iter([2.0, 3.0])
    progress = Progress()
    assert run(fresh(tmp_path), progress, losses=lambda: next(found)) == [4]
    assert (progress.best_step, progress.best_loss) == (4, 2.0)
    assert [(step, held) for step, _, held in progress.history] == [(4, 2.0), (8, 3.0)]


def token_rows(documents: int, first: int = 0) -> TokenRows:
    """Documents of 1 to `documents` tokens; each token is its own number, so that it tells where it stood."""
    ends = list(accumulate(range(documents + 1)))
    texts = [" ".join(str(first + i) for i in range(start, end)) for start, end in zip(ends, ends[1:])]
    return TokenRows(texts, lambda text: [int(word) for word in text.split()], width=4)


def test_an_epoch_has_whole_documents_in_another_order() -> None:
    """Keeps out: documents cut, lost or read twice in an epoch, and epochs that are alike or can't be made again."""
    rows, documents = token_rows(8), [list(range(n * (n - 1) // 2, n * (n + 1) // 2)) for n in range(1, 9)]
    seen = set()
    for number in range(4):
        tokens = rows.epoch(number, seed=3).flatten().tolist()
        seen.add(tuple(tokens))
        assert len(tokens) == rows.rows * 4 == len(set(tokens))
        left = tokens
        while left:  # each token begins a document, which goes on to its end or to that of the rows
            document = next(document for document in documents if document[0] == left[0])
            assert left[: len(document)] == document[: len(left)]
            left = left[len(document) :]
    assert len(seen) == 4
    assert rows.epoch(0, seed=3).flatten().tolist() == token_rows(8).epoch(0, seed=3).flatten().tolist()
    assert rows.in_order().flatten().tolist() == list(range(rows.rows * 4))


def test_batches_read_each_row_once() -> None:
    """Keeps out: rows passed over or read again where the extra text ends, and a resumed run that reads others."""
    main, side, steps = token_rows(12), token_rows(5, first=1000), 10
    batches = mixed_batches(main, side, 4, steps, 0.5, seed=1)
    found = [batches(step) for step in range(steps)]
    assert all(batch.shape == (4, 4) for batch in found)
    of_side = [int((batch[:, 0] >= 1000).sum()) for batch in found]
    assert of_side[0] == 2 and of_side == sorted(of_side, reverse=True) and not any(of_side[round(SIDE_ENDS * steps) :])
    for rows, wanted in ((main, [row for batch in found for row in batch[batch[:, 0] < 1000].tolist()]),
                         (side, [row for batch in found for row in batch[batch[:, 0] >= 1000].tolist()])):  # fmt: skip
        assert wanted == rows.take(0, len(wanted), seed=1).tolist()
    again = mixed_batches(token_rows(12), token_rows(5, first=1000), 4, steps, 0.5, seed=1)
    assert torch.equal(again(7), found[7])
