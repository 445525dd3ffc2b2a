"""A session with no decoder in it, which counts what the benchmark asks of it and answers at once; a budget without a GPU."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch

from specdec.attention.kinds import FULL
from specdec.bench.budget import Budget, RoundBytes
from specdec.bench.cell import measure_cell
from specdec.bench.kernels import Span, split
from specdec.bench.measurement import Cell, Measurement, Phases
from specdec.config import SamplingParams, SpecConfig
from specdec.engine.needs import RowChoice
from specdec.generation import Generation, Stats
from specdec.ops.products.numerics import FAST
from specdec.options import EngineOptions
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary
from specdec.session import Session

PROMPTS = [[1, 2, 3], [4, 5]]
GREEDY = SamplingParams(max_tokens=9)


class StubModel(torch.nn.Module):
    """A target whose next-token logits are the same everywhere, but off by `error` while its weights are of that dtype."""

    def __init__(self, logits: list[float], dtype: torch.dtype, error: list[float]) -> None:
        super().__init__()
        self.row, self.error, self.dtype = torch.tensor(logits), torch.tensor(error), dtype
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        self.config = SimpleNamespace(
            num_layers=1,
            num_kv_heads=1,
            head_dim=4,
            layer_kinds=(FULL,),
            kv_source=(0,),
            has_experts=False,
            max_read=None,
        )
        self.vocabulary = Vocabulary.of(len(logits), ALONE)

    def forward(self, ids_T, positions_T, attn):
        assert positions_T.tolist() == list(range(len(ids_T)))
        return SimpleNamespace(hidden_TH=torch.ones(len(ids_T), 1))

    def chain(self):
        return torch.nn.ModuleList()

    def logits(self, hidden):
        row = self.row + self.error if self.weight.dtype == self.dtype else self.row
        return row.expand(hidden.shape[0], -1)


class StubPhases:
    """Times of phases that a test can read."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()


class StubSession(Session):
    """Speculates two rounds where plain decoding takes five, or writes `wrong` while it does.

    right: ids of every prompt's output.  text: of every output; None is a decoder without a tokenizer.  reason: why it ended.
    logits, error: see StubModel.
    """

    model = settings = head = as_stored = None
    readiness, kv_pool_bytes, rounds_run = (0, 0, 0), 1536, 0
    reasons: list[str] = []

    def __init__(
        self,
        wrong: list[int] | None = None,
        logits: list[float] = (0.0,) * 9,
        dtype=torch.float32,
        synthetic: bool = False,
        right: list[int] = (5, 6, 7, 8, 5, 6),
        text: str | None = None,
        reason: str = "length",
        error: list[float] = (0.0,),
    ) -> None:
        self.model = StubModel(list(logits), dtype, list(error))
        self.settings = SimpleNamespace(
            options=EngineOptions(max_batch_size=2, page_size=4), spec=SpecConfig(2, 2, 4), device=torch.device("cpu"),
            dtype=dtype, cuda_graphs=False, numerics=FAST,
        )  # fmt: skip
        self.synthetic, self.right, self.wrong, self.text = synthetic, list(right), wrong, text
        self.reason = reason
        self.phases, self.is_timing = StubPhases(), False
        self.calls: list[tuple[bool, bool]] = []
        self.prepared: list[str] = []

    def when_timing(self) -> None:
        """Called in each pass that times phases."""

    @property
    def writes_text(self) -> bool:
        return self.text is not None

    @property
    def forces_acceptance(self) -> bool:
        return self.synthetic

    def choice(self, prompt_ids, sampling):
        return RowChoice.of(sampling, sampling.seed or 0, prompt_ids)

    @contextmanager
    def timed_phases(self):
        self.phases.clear()
        self.is_timing = True
        try:
            yield self.phases
        finally:
            self.is_timing = False

    def make_ready(self, sizes=()) -> None:
        self.prepared.append("auto")

    def rehearse(self, prompts, sampling) -> None:
        self.prepared.append("rehearsed")

    def capture_rounds(self, prompts, sampling) -> None:
        self.prepared.append("captured")

    def generate(self, prompts, sampling, *, speculate):
        self.calls.append((speculate, self.is_timing))
        self.asked = prompts, sampling
        self.rounds_run += 2 if speculate else 5
        if self.is_timing:
            self.when_timing()
            for name in ("prefill", *(["draft", "verify", "extend"] if speculate else ["decode"] * 5)):
                self.phases.seconds[name] += 0.001
                self.phases.calls[name] += 1
        ids = self.wrong if speculate and self.wrong else self.right
        return [self._output(prompt, ids, speculate) for prompt in prompts]

    def _output(self, prompt, ids, speculate):
        stats = Stats(prefill_tokens=1)
        for _ in range(2 if speculate else 5):
            stats.count_round(3 if speculate else 0, 2 if speculate else 0, 2 if speculate else 0)
        stats.truncated = stats.emitted + 1 - len(ids)
        return Generation(prompt, ids, self.text or "", self.reason, stats, [0] * len(ids))


def traced(**changes: object) -> Budget:
    """A budget as a GPU gives it: 3 TB/s, 15 GB of weights, five passes of a draft."""
    spans = [Span("nvjet_tst_64x8", 0, 6000), Span("void paged_attention_kernel", 5990, 7000), Span("grow_kernel", 7500, 8000)]
    fields = {
        "batch_size": 32, "spec": (5, 1, 6), "context": 32768.0, "bandwidth": 3e12, "graphs": "round",
        "bytes": RoundBytes(15_000_000_000, 130_000_000, 3_700_000_000, 4_000_000, 5), "round_ms": [8.0, 7.0, 9.0],
        "host_ms": 0.3, "phases_ms": {"draft": 1.2, "verify": 6.0, "extend": 0.4, "rest": 1.0}, "kernels": split(spans, 1),
    }  # fmt: skip
    return Budget(**{**fields, **changes})


def cell_of(seconds: tuple[list[float], list[float]] = ([2.0, 2.5, 4.0], [1.0, 0.5, 0.8]), **stub: object) -> Cell:
    """A cell of round numbers: 12 output tokens in each pass.  seconds: of the baseline's repeats and of specdec's."""
    cell = measure_cell(StubSession(**stub), PROMPTS, GREEDY, 3)
    plain = Phases(0.062, {"prefill": 0.012, "decode": 0.049}, {"prefill": 1, "decode": 5})
    fast = Phases(0.035, {"prefill": 0.015, "draft": 0.004, "verify": 0.012, "extend": 0.003},
                  {"prefill": 1, "draft": 2, "verify": 2, "extend": 2})  # fmt: skip
    baseline = replace(cell.baseline, seconds=seconds[0], phases=plain)
    return replace(cell, baseline=baseline, speculative=replace(cell.speculative, seconds=seconds[1], phases=fast))


def measured(*cells: Cell, **changes: object) -> Measurement:
    sampling = {name: getattr(GREEDY, name) for name in GREEDY.__dataclass_fields__}
    settings = {
        "target": "/folder/of/a/target/model", "draft": "/folder/of/its/draft/head", "device": "cpu", "dtype": "float32",
        "attention": "torch", "attention_reason": "there is no GPU", "cuda_graphs": False, "page_size": 16, "max_seq_len": 64,
        "repeats": 3, "sampling": sampling,
    }  # fmt: skip
    prompts = {
        "source": "p.jsonl", "count": 17, "tokens": {"min": 2, "max": 3, "sum": 5}, "sha256": "0" * 64, "chat_template": False
    }  # fmt: skip
    machine = {"runs_on": "a CPU", "gpus": [], "driver": None, "load_average": 3.0, "cpus_usable": 2, "cpu_steal": 0.5}
    return Measurement(machine, {"specdec": "0", "torch": "2"}, settings, prompts, list(cells), **changes)
