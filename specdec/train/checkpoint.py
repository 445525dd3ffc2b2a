"""The checkpoint of a training run: what is trained, the optimizer's moments and how far the run has come, in one file.

A full one goes on bit for bit.  A small one takes about a third of the bytes: weights in bfloat16, as the finished head has
them, and moments in 8 bits with a scale for each block.  This file knows neither losses nor schedules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.train.folder import check_same, load_whole, save_whole

BLOCK = 256  # numbers that share a scale
FIRST, SECOND = "exp_avg", "exp_avg_sq"  # AdamW's moments, by its own names


@dataclass
class Progress:
    """How far a run has come; a checkpoint holds it beside the weights.

    seconds: spent in steps and evaluations, in all calls that led here.  spent: wall seconds of all of these calls.
    best_loss, best_step: the lowest evaluation loss so far, and its step.
    history: (step, training loss, evaluation loss) of each evaluation.
    ended: why the last call ended: one of loop.ENDS; empty while it runs.
    """

    step: int = 0
    seconds: float = 0.0
    spent: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    history: list[tuple[int, float, float]] = field(default_factory=list)
    ended: str = ""

    @property
    def stale(self) -> int:
        """Evaluations since the best one."""
        return sum(step > self.best_step for step, _, _ in self.history)


class TrainingCheckpoint:
    """Model, optimizer and progress of a run in one file.  Weights that are not trained belong to the target, and stay there.

    A save writes another file and then renames it, so a run that is killed leaves its last complete checkpoint.
    made_of: the run's settings; only a run with the same ones goes on from the file (see folder.check_same).
    small: whether it is saved small; either kind is read.
    """

    def __init__(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        made_of: Mapping[str, Any],
        small: bool = False,
    ) -> None:
        self.path, self.model, self.optimizer, self.made_of, self.small = path, model, optimizer, dict(made_of), small

    def _trained(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}

    def save(self, progress: Progress) -> None:
        weights, moments = self._trained(), self.optimizer.state_dict()["state"]
        if self.small:
            weights = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
            moments = {index: _packed(state) for index, state in moments.items()}
        held = {"model": weights, "moments": moments, "progress": vars(progress), "made_of": self.made_of}
        save_whole(self.path, held)

    def load(self) -> Progress:
        """Fills model and optimizer from the file.  ValueError if there is no file, or one of another run or shape."""
        if not self.path.is_file():
            raise ValueError(f"resume: expected a checkpoint at {self.path}, got no file; start without --resume")
        expected = f"resume: expected a checkpoint at {self.path}, got"
        try:
            state = load_whole(self.path)
        except ValueError as error:
            raise ValueError(f"{expected} {error}; start without --resume") from error
        if not isinstance(state, dict):
            raise ValueError(f"{expected} something else; start without --resume")
        check_same(self.path, state.get("made_of", {}), self.made_of)
        own, saved = self._trained(), state.get("model", {})
        shapes, found = ({name: tuple(weight.shape) for name, weight in of.items()} for of in (own, saved))
        if shapes != found:
            unlike = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
            raise ValueError(f"resume: expected a checkpoint of this shape in {self.path}, got another {', '.join(unlike[:4])}")
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(saved[name])
        moments = {index: _unpacked(each) if "scale" in each else each for index, each in state["moments"].items()}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        return Progress(**state["progress"])


def _packed(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """AdamW's state of one weight, in two bytes a number.  Roots of the second moments are rounded up, so that none is 0: by
    those a step divides.
    """
    first, root = _blocks(state[FIRST]), _blocks(state[SECOND]).sqrt()
    scales = torch.stack([each.abs().amax(1, keepdim=True).clamp(min=1e-30) for each in (first, root)])
    return {
        "step": state["step"], "shape": tuple(state[FIRST].shape), "scale": scales.to(torch.float32),
        FIRST: (first / scales[0] * 127).round().to(torch.int8),
        SECOND: (root / scales[1] * 255).ceil().clamp(1, 255).to(torch.uint8),
    }  # fmt: skip


def _unpacked(state: Mapping[str, Any]) -> dict[str, Tensor]:
    size, scales = math.prod(state["shape"]), state["scale"]
    first, root = state[FIRST].float() * scales[0] / 127, state[SECOND].float() * scales[1] / 255
    whole = {FIRST: first, SECOND: root.square()}
    return {"step": state["step"]} | {name: x.flatten()[:size].view(state["shape"]) for name, x in whole.items()}


def _blocks(x: Tensor) -> Tensor:
    flat = x.float().flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
