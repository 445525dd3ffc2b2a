"""A training loop for small models: AdamW, warm-up and cosine schedule, gradient clipping, evaluation, resuming.

This file knows steps, losses, and checkpoint files.  It does not know what the model is or what the
model reads: the loss and the evaluation are callables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from specdec.screen.progress import show_progress
from specdec.train.folder import check_same
from specdec.train.settings import HeadRun, TargetRun


@dataclass(frozen=True)
class TrainSchedule:
    """The optimizer's settings of a run.

    steps: optimizer steps.  lr: peak learning rate.  warmup: steps until the rate reaches its peak.  weight_decay: AdamW's.
    eval_every: steps between two evaluations.
    """

    steps: int
    lr: float
    warmup: int
    weight_decay: float
    eval_every: int


@dataclass
class Progress:
    """How far a run has come; a checkpoint holds it beside the weights.

    seconds: time spent in all runs that led here.  best_loss, best_step: the lowest evaluation loss so far, and its step.
    history: (step, training loss, evaluation loss) of each evaluation.
    """

    step: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    history: list[tuple[int, float, float]] = field(default_factory=list)


def schedule_of(run: HeadRun | TargetRun) -> TrainSchedule:
    return TrainSchedule(run.steps, run.lr, run.warmup, run.weight_decay, run.eval_every)


def learning_rate(schedule: TrainSchedule, step: int) -> float:
    """The rate of a 0-based step: a linear warm-up, then half a cosine that ends at a hundredth of the peak."""
    if step < schedule.warmup:
        return schedule.lr * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
    return schedule.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def make_optimizer(model: torch.nn.Module, schedule: TrainSchedule) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters.  Weight decay applies to matrices only, not to gains of norms."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    gains = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=schedule.lr, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


class TrainingCheckpoint:
    """Model, optimizer and progress of a run in one file.

    A save writes another file and then renames it, so a run that is killed leaves its last complete checkpoint.
    made_of: the run's settings; only a run with the same ones goes on from the file (see folder.check_same).
    """

    def __init__(
        self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, made_of: Mapping[str, Any]
    ) -> None:
        self.path, self.model, self.optimizer, self.made_of = path, model, optimizer, dict(made_of)

    def save(self, progress: Progress) -> None:
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "progress": vars(progress),
            "made_of": self.made_of,
        }  # fmt: skip
        torch.save(state, self.path.with_suffix(".part"))
        self.path.with_suffix(".part").replace(self.path)

    def load(self) -> Progress:
        """Fills model and optimizer from the file.  ValueError if there is no file, or one of another run or shape."""
        if not self.path.is_file():
            raise ValueError(f"resume: expected a checkpoint at {self.path}, got no file; start without --resume")
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, UnpicklingError) as error:
            raise ValueError(f"resume: expected a checkpoint at {self.path}, got a file that can't be read: {error}") from error
        check_same(self.path, state.get("made_of", {}), self.made_of)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(f"resume: expected a checkpoint of this shape in {self.path}, got {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])
        return Progress(**state["progress"])


def fit(
    schedule: TrainSchedule,
    checkpoint: TrainingCheckpoint,
    progress: Progress,
    loss_at: Callable[[int], torch.Tensor],
    evaluate: Callable[[], float],
    on_best: Callable[[Progress], None],
) -> Progress:
    """Trains the checkpoint's model from progress.step to schedule.steps, and returns the progress at the end.

    loss_at: the training loss of a 0-based step.  Where batches depend on the step's number alone, a resumed run reads the same
    batches as an uninterrupted one.
    evaluate: the evaluation loss of the model as it is.  on_best: called when that loss is the lowest so far.
    The loop evaluates and saves the checkpoint every schedule.eval_every steps and after the last one.  ValueError if the
    training loss is inf or NaN then.  Each evaluation prints a line; stderr shows the steps.
    """
    model, optimizer = checkpoint.model, checkpoint.optimizer
    model.train()
    started, before = time.monotonic(), progress.seconds
    with show_progress("train", "steps") as show:
        show("training", progress.step, schedule.steps)
        for step in range(progress.step, schedule.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(schedule, step)
            loss = loss_at(step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.step = step + 1
            if progress.step % schedule.eval_every == 0 or progress.step == schedule.steps:
                progress.seconds = before + time.monotonic() - started
                text = _milestone(progress, loss.item(), evaluate(), norm.item(), on_best)
                checkpoint.save(progress)
                print(f"step {progress.step}/{schedule.steps} {text}", flush=True)
            show("training", progress.step, schedule.steps)
    return progress


def _milestone(progress: Progress, loss: float, held: float, norm: float, on_best: Callable[[Progress], None]) -> str:
    if not math.isfinite(loss):
        raise ValueError(f"lr: expected one that trains, got loss {loss} at step {progress.step}; try a lower lr")
    progress.history.append((progress.step, loss, held))
    if held < progress.best_loss:
        progress.best_loss, progress.best_step = held, progress.step
        on_best(progress)
    return (
        f"loss {loss:.3f} held-out {held:.4f} best {progress.best_loss:.4f}@{progress.best_step} "
        f"grad {norm:.2f} {progress.seconds:.0f}s"
    )
