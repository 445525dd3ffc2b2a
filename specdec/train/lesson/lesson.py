"""A fresh head, what it learns from, and the steps that train it.

This file joins rows, states, loss, optimizer and checkpoint to one run.  It knows neither how the text came to be nor how heads
are saved.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.decoder import SpecDecoder
from specdec.draft.head import DraftHead
from specdec.screen.progress import show_progress
from specdec.train.card.card import Made
from specdec.train.checkpoint import Progress, TrainingCheckpoint
from specdec.train.heads.fresh import new_head
from specdec.train.lesson.objective import loss_of_head, objective
from specdec.train.loop import fit, make_optimizer, schedule_of
from specdec.train.selftext import SelfText, coverage, frequent_ids
from specdec.train.settings import HeadRun
from specdec.train.states import StateStore
from specdec.train.step import StepClock, TrainStep

CPU_STATES = 4096  # MiB


def dtype_of(run: HeadRun, device: torch.device) -> torch.dtype:
    """Of products, and of the target."""
    if run.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if run.precision == "bfloat16" else torch.float32


class Lesson:
    """One run.

    origin: which target and text the run is of.  began: when the command did, by time.monotonic.
    notes: lines about the draft vocabulary.
    """

    def __init__(
        self,
        decoder: SpecDecoder,
        text: SelfText,
        run: HeadRun,
        layers: tuple[int, ...],
        checkpoint: Path,
        origin: dict[str, str],
        began: float,
    ) -> None:
        model, self.device, self.run, self.began = decoder.model, decoder.settings.device, run, began
        vocab = model.config.vocab_size
        self.text, self.model, self.layers = text, model, layers
        ids_V = frequent_ids(text.goals()[: -text.checked], run.draft_vocab_size or vocab, vocab)
        self.notes = [coverage(text, len(ids_V), vocab)]
        print(self.notes[0], flush=True)
        self.precision = dtype_of(run, self.device)
        self.head, self.draft_ids_V = new_head(model, layers, ids_V, run), ids_V.to(self.device)
        self.schedule = schedule_of(run)
        self.optimizer = make_optimizer(self.head, self.schedule)
        made_of = {**vars(run), **origin, "aux_layers": layers}
        self.checkpoint = TrainingCheckpoint(checkpoint, self.head, self.optimizer, made_of, run.checkpoint_size == "small")

    def fit(self, resume: bool, save_head: Callable[[DraftHead], object]) -> Progress:
        run, progress = self.run, self.checkpoint.load() if resume and self.checkpoint.path.is_file() else Progress()
        with show_progress("train", "texts") as show:
            free = torch.cuda.mem_get_info(self.device)[0] // 2 if self.device.type == "cuda" else CPU_STATES << 20
            keep = free if run.keep_states < 0 else run.keep_states << 20
            states = StateStore(self.model, self.text.to(self.device), self.layers, keep, show)
        loss_of = loss_of_head(self.model, self.head, self.draft_ids_V, run)
        clock, capture = StepClock(self.device), run.capture == "auto" and self.device.type == "cuda"
        step = TrainStep(self.head, self.optimizer, lambda inputs: loss_of(inputs)[0], clock, self.precision, capture)
        inputs_of, evaluate = objective(states, loss_of, self.text, run, self.precision)

        def make_step(number: int, lr: float) -> tuple[Tensor, Tensor]:
            clock.begin()
            done = step(inputs_of(number, clock.mark), lr)
            if line := clock.line():
                print(line, flush=True)
            return done

        spent = time.monotonic() - self.began
        left = run.seconds - progress.spent - spent
        if run.seconds and left <= 0:
            raise ValueError(
                f"seconds: expected more than the {progress.spent + spent:.0f} that loading and the text took, got "
                f"{run.seconds}; the text is kept: go on with --resume and more --seconds"
            )
        schedule = replace(
            self.schedule, seconds=progress.seconds + left if run.seconds else 0.0, call_seconds=float(run.call_seconds)
        )
        return fit(schedule, self.checkpoint, progress, make_step, evaluate, lambda _: save_head(self.head), before=spent)

    def made(self, target: str, notes: list[str]) -> Made:
        numbers = sum(weight.numel() for weight in self.head.parameters() if weight.requires_grad)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.processor() or "a CPU"
        return Made(target, name, notes, numbers, int(self.text.written()[: -self.text.checked].sum()))
