"""A training loop for small models: AdamW, warm-up and cosine schedule, evaluation, a budget of seconds, resuming.

This file knows steps, losses, rates and seconds.  It does not know what the model is or what the model reads: the step and the
evaluation are callables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.screen.progress import show_progress
from specdec.train.checkpoint import Progress, TrainingCheckpoint
from specdec.train.settings import MAX_NUMBER, HeadRun, TargetRun

PARTS = 8  # evaluations of a run that names no number of steps between them
LAST_RATE = 0.01  # of the peak
# Why a call of `fit` may end.
ENDS = STEPS, SECONDS, WORSE, PAUSED = "all steps", "all seconds", "no lower held-out loss", "the seconds of this call"


@dataclass(frozen=True)
class TrainSchedule:
    """The optimizer's settings of a run.

    steps: optimizer steps.  lr: peak learning rate.  warmup: steps until the rate reaches its peak.  weight_decay: AdamW's.
    eval_every: steps between two evaluations; 0: an eighth of the run.
    seconds: of steps and evaluations, in which the run ends if its steps have not come to an end; 0: as many as they take.
    call_seconds: wall seconds of this call, after which it ends; 0: none do.
    patience: evaluations without a lower loss that end the run; 0: none do.
    """

    steps: int
    lr: float
    warmup: int
    weight_decay: float
    eval_every: int
    seconds: float = 0.0
    call_seconds: float = 0.0
    patience: int = 0

    def done(self, step: int, seconds: float) -> float:
        """The share of the run that lies before a 0-based step, which begins after so many seconds."""
        of_steps = min(1.0, step / self.steps)
        return max(of_steps, min(1.0, seconds / self.seconds)) if self.seconds else of_steps


def schedule_of(run: HeadRun | TargetRun) -> TrainSchedule:
    patience = run.patience if isinstance(run, HeadRun) else 0
    return TrainSchedule(run.steps, run.lr, run.warmup, run.weight_decay, run.eval_every, patience=patience)


def learning_rate(schedule: TrainSchedule, step: int, seconds: float = 0.0) -> float:
    """The rate of a 0-based step, which begins after so many seconds of the run: a linear warm-up, then half a cosine that ends
    at a hundredth of the peak, with the steps or with the seconds, whichever end first.
    """
    if step < schedule.warmup:
        return schedule.lr * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
    if schedule.seconds:
        done = max(done, seconds / schedule.seconds)
    return schedule.lr * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimizer(model: torch.nn.Module, schedule: TrainSchedule) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters.  Weight decay applies to matrices only, not to gains of norms.

    On a GPU the rate is a tensor, so that a captured step reads what it is now.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    gains = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    on_gpu, betas = matrices[0].is_cuda, (0.9, 0.95)
    if not on_gpu:
        return torch.optim.AdamW(groups, lr=schedule.lr, betas=betas)
    for group in groups:
        group["lr"] = torch.tensor(schedule.lr, dtype=torch.float32, device=matrices[0].device)
    return torch.optim.AdamW(groups, betas=betas, fused=True)


# Makes a 0-based step at a learning rate.  It gives (loss, norm of the gradient), tensors of one number each.
Step = Callable[[int, float], tuple[Tensor, Tensor]]


def fit(
    schedule: TrainSchedule,
    checkpoint: TrainingCheckpoint,
    progress: Progress,
    make_step: Step,
    evaluate: Callable[[], float],
    on_best: Callable[[Progress], object],
    clock: Callable[[], float] = time.monotonic,
    before: float = 0.0,
) -> Progress:
    """Trains the checkpoint's model from progress.step on, and returns the progress at the end, whose `ended` says why.

    make_step: where batches depend on the step's number alone, a resumed run reads the same batches as an uninterrupted one.
    evaluate: the evaluation loss of the model as it is.  on_best: called when that loss is the lowest so far.
    clock: seconds.  before: wall seconds that this call has taken before.
    The loop evaluates and saves the checkpoint as the schedule says, and after the last step.  ValueError if the training loss
    is inf or NaN then.  Each evaluation prints a line; stderr shows the steps.
    """
    checkpoint.model.train()
    started, earlier, spent = clock(), progress.seconds, progress.spent + before

    def now() -> float:
        return earlier + clock() - started

    ended = _end(schedule, progress.step, earlier, 0.0)
    progress.ended, part, since = ended, _part(schedule, progress.step, earlier), (progress.step, earlier)
    with show_progress("train", "seconds" if schedule.seconds else "steps") as show:
        while not ended:
            seconds = now()
            timed = (int(seconds), int(schedule.seconds)) if schedule.seconds else (progress.step, schedule.steps)
            show("training", *timed)
            loss, norm = make_step(progress.step, learning_rate(schedule, progress.step, seconds))
            progress.step += 1
            seconds = now()
            ended = _end(schedule, progress.step, seconds, before + seconds - earlier)
            if not ended and _part(schedule, progress.step, seconds) <= part:
                continue
            value = loss.item()  # waits for the device, so that its steps are timed
            pace = 1000 * (now() - since[1]) / (progress.step - since[0])
            text = _milestone(progress, value, evaluate(), norm.item(), on_best)
            if not ended and schedule.patience and progress.stale >= schedule.patience:
                ended = WORSE
            progress.seconds, progress.ended = now(), ended
            progress.spent = spent + progress.seconds - earlier
            checkpoint.save(progress)
            part, since = _part(schedule, progress.step, progress.seconds), (progress.step, now())
            steps = f"/{schedule.steps}" if schedule.steps < MAX_NUMBER else ""
            print(f"step {progress.step}{steps} {text} {pace:.1f} ms a step {progress.seconds:.0f}s", flush=True)
    return progress


def _part(schedule: TrainSchedule, step: int, seconds: float) -> int:
    """Evaluations that are due until then."""
    return step // schedule.eval_every if schedule.eval_every else int(PARTS * schedule.done(step, seconds))


def _end(schedule: TrainSchedule, step: int, seconds: float, of_call: float) -> str:
    if step >= schedule.steps:
        return STEPS
    if schedule.seconds and seconds >= schedule.seconds:
        return SECONDS
    return PAUSED if schedule.call_seconds and of_call >= schedule.call_seconds else ""


def _milestone(progress: Progress, loss: float, held: float, norm: float, on_best: Callable[[Progress], object]) -> str:
    if not math.isfinite(loss):
        raise ValueError(f"lr: expected one that trains, got loss {loss} at step {progress.step}; try a lower lr")
    progress.history.append((progress.step, loss, held))
    if held < progress.best_loss:
        progress.best_loss, progress.best_step = held, progress.step
        on_best(progress)
    return f"loss {loss:.3f} held-out {held:.4f} best {progress.best_loss:.4f}@{progress.best_step} grad {norm:.2f}"
