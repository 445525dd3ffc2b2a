"""One optimizer step of a training run, eager or as one CUDA graph, and how long its parts take.

The code of a step is the same for eager calls, capture and replay: it reads static inputs, waits for nothing and asks the host
for nothing.  Weights, moments, sums and the loss are float32; products are in bfloat16 where the run says so.  This file knows
no head and no text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.cuda_graph import GraphSet, on_device

EAGER = 6  # steps before a capture: the optimizer makes its moments in the first, libraries load; the last ones are timed
TIMED = range(3, EAGER)
AHEAD = 8  # steps that the host may be ahead of a GPU, so that the clock tells how far the run has come


class StepResult(NamedTuple):
    """What a step leaves: its loss, and the norm of its gradient before it was clipped, each a tensor of one number."""

    loss: Tensor
    norm: Tensor


Loss = Callable[[Sequence[Tensor]], Tensor]  # of a step's inputs


class StepClock:
    """Seconds of the parts of the steps in TIMED, for which the device is waited for; of others nothing is measured.

    clock: seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._step, self._parts, self._last = -1, dict[str, list[float]](), 0.0

    def begin(self) -> None:
        self._step += 1
        self._last = self._now() if self._step in TIMED else 0.0

    def mark(self, part: str) -> None:
        """What ran since the mark before is that part of the step."""
        if self._step in TIMED:
            now = self._now()
            self._parts.setdefault(part, []).append(now - self._last)
            self._last = now

    def line(self) -> str:
        """What to print after the last timed step; else empty."""
        if self._step != TIMED[-1] or not self._parts:
            return ""
        least = {part: 1000 * min(seconds) for part, seconds in self._parts.items()}
        parts = ", ".join(f"{part} {ms:.1f}" for part, ms in least.items())
        return f"an eager step takes {sum(least.values()):.1f} ms: {parts}"

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()


class TrainStep:
    """Calls make steps.

    loss_of: of inputs that have the same shapes in all steps; it must neither wait for the device nor copy from the host.
    precision: of products.  capture: whether steps after the first ones are replays of a CUDA graph.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: Loss,
        clock: StepClock,
        precision: torch.dtype = torch.float32,
        capture: bool = False,
    ) -> None:
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.device, self.precision = self.weights[0].device, precision
        self._optimizer, self._loss_of, self._clock = optimizer, loss_of, clock
        self._graphs, self._calls = GraphSet(capture), 0
        self._inputs: list[Tensor] = []
        self._queued: deque[torch.cuda.Event] = deque()

    def __call__(self, inputs: Sequence[Tensor], lr: float) -> StepResult:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._calls += 1
        if not self._graphs.enabled or self._calls <= EAGER:
            done = self._run(inputs)
        else:
            done = self._replay(inputs)
        self._keep_pace()
        return done

    def _run(self, inputs: Sequence[Tensor]) -> StepResult:
        self._optimizer.zero_grad(set_to_none=True)
        with products(self.device, self.precision):
            loss = self._loss_of(inputs)
        self._clock.mark("head and loss")
        loss.backward()
        self._clock.mark("backward")
        norm = torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        for group in self._optimizer.param_groups:  # torch refuses a capture of others, and warns of an eager step of these
            group["capturable"] = is_captured(self.device)
        self._optimizer.step()
        self._clock.mark("optimizer")
        return StepResult(loss.detach(), norm)

    def _replay(self, inputs: Sequence[Tensor]) -> StepResult:
        if not self._inputs:
            self._inputs = [each.clone() for each in inputs]
        for static, new in zip(self._inputs, inputs, strict=True):
            static.copy_(new, non_blocking=True)
        moments = [x for state in self._optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        changed = [*(weight.detach() for weight in self.weights), *moments]
        with on_device(self.device):
            return self._graphs.run("step", lambda: self._run(self._inputs), changed, warm_ups=1)

    def _keep_pace(self) -> None:
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._queued.append(event)
        if len(self._queued) > AHEAD:
            self._queued.popleft().synchronize()


def is_captured(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def products(device: torch.device, precision: torch.dtype) -> Iterator[None]:
    """Inside, products of float32 numbers are computed in that dtype; weights stay what they are."""
    with torch.autocast(device.type, precision, enabled=precision != torch.float32, cache_enabled=False):
        yield
