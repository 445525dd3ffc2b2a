"""A decoder that is none: it counts what the benchmark asks of it, and answers at once."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from specdec.attention.kinds import FULL
from specdec.config import SpecConfig
from specdec.generation import Generation, Stats
from specdec.runner.phase_clock import PhaseClock
from toolkit.driver import stub_engine


class StubModel(torch.nn.Module):
    """A target whose next-token logits are the same everywhere."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(torch.tensor(logits))
        self.config = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=4, layer_kinds=(FULL,))

    def forward(self, ids_T, positions_T, attn):
        assert positions_T.tolist() == list(range(len(ids_T)))
        return SimpleNamespace(hidden_TH=torch.ones(len(ids_T), 1))

    def logits(self, hidden):
        return self.row.expand(hidden.shape[0], -1)


class StubDecoder:
    """Counts what is asked of it; speculates five times as fast, or writes `wrong` while it does.

    outputs: ids of a prompt, the same for every one.
    """

    def __init__(
        self, wrong: list[int] | None = None, logits: list[float] = (0.0,) * 9, dtype=torch.float32, synthetic: bool = False
    ) -> None:
        self.model, self.head = StubModel(list(logits)), None
        self.settings = SimpleNamespace(
            spec=SpecConfig(2, 2, 4), max_batch_size=2, device=torch.device("cpu"), dtype=dtype, page_size=4,
            cuda_graphs=False, kv_cache_dtype="auto",
        )  # fmt: skip
        self.clock = PhaseClock(torch.device("cpu"))
        stub_engine(self, self.clock, synthetic)
        self.right, self.wrong = [5, 6, 7, 8, 5, 6], wrong
        self.calls: list[tuple[bool, bool]] = []

    def generate(self, prompts, params, *, speculate):
        self.calls.append((speculate, self.clock.enabled))
        self.asked = prompts, params
        if self.clock.enabled:
            for name in ("prefill", *(["draft", "verify", "extend"] if speculate else ["decode"] * 5)):
                self.clock.seconds[name] += 0.001
                self.clock.calls[name] += 1
        ids = self.wrong if speculate and self.wrong else self.right
        return [self._output(prompt, ids, speculate) for prompt in prompts]

    def _output(self, prompt, ids, speculate):
        stats = Stats(prefill_tokens=1)
        for _ in range(2 if speculate else 5):
            stats.count_round(3 if speculate else 0, 2 if speculate else 0, 2 if speculate else 0)
        stats.truncated = stats.emitted + 1 - len(ids)
        return Generation(prompt, ids, "", "length", stats)
