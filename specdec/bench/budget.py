"""A finished profile: what a step or a round took, part by part, beside the least time that it could take.

Holds raw fields and the numbers that derive from them.  `profile` measures them and `show/budget_report` shows them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

PHASES = ("draft", "verify", "extend", "decode")
TRACED_PHASES = ("draft", "build", "verify", "decode", "accept, commit", "extend")
GEMM, ATTENTION, RECURRENT, NORM, TREE, EXCHANGE, COPY, OTHER = KINDS = (
    "GEMM", "attention", "recurrent layers", "norm, rope, elementwise", "top-k, tree, accept", "exchange between ranks", "copy",
    "other",
)  # fmt: skip

BUDGET_DEFINITIONS = {
    "byte_limit": "bytes that a step or round must read / read bandwidth: every weight once a pass (of an embedding table only "
    "the rows that are used, of a mixture only the experts that tokens chose, counted in rounds of their own), and the keys "
    "and values of the committed tokens once a pass. The draft makes one pass a level. "
    "Writes and activations are left out. A model that fits a cache can be faster than this",
    "read_bandwidth": "bytes per second, measured here: the fastest of a few sums over a tensor larger than any cache, median",
    "ms": "median wall milliseconds of the engine's rounds in which every sequence runs, as in normal use, host included",
    "phases_ms": "medians of rounds in which each phase was waited for (in step mode where a round is one graph), so their sum "
    "can differ from ms; rest is the time that no phase took",
    "kernels": "from a profiler's trace: every instant belongs to the kernel that started first; idle is the time between the "
    "first and the last kernel in which none ran, between rounds included. Tracing itself slows launches",
    "host_ms": "median milliseconds of a round that the calling thread did not wait for the GPU; none without a GPU",
}


@dataclass(frozen=True)
class ChosenExperts:
    """What a model's mixtures are counted for.

    bytes: of the experts that a step or round reads, included in the weights.  chosen: how many of `count` experts the tokens
    of one pass chose, mean over passes and layers; None: nobody can say, and all are counted.  Where ranks divide the experts,
    all are those of one rank, and chosen those of the rank that reads the most.
    """

    bytes: int
    count: int
    chosen: float | None


@dataclass(frozen=True)
class RoundBytes:
    """Bytes that one plain step or one round must read at least, each of them once a pass."""

    target: int  # weights; of an embedding table only the rows that are read
    target_kv: int  # keys and values of the committed tokens
    draft: int = 0  # weights, likewise, counted once for each pass
    draft_kv: int = 0  # the draft reads its own in every pass
    draft_passes: int = 0  # one for each level, the extend included
    target_experts: ChosenExperts | None = None  # of models with mixtures
    draft_experts: ChosenExperts | None = None

    @property
    def weights(self) -> int:
        return self.target + self.draft

    @property
    def kv(self) -> int:
        return self.target_kv + self.draft_kv

    @property
    def total(self) -> int:
        return self.weights + self.kv

    def of_phase(self, phase: str) -> float | None:
        """Bytes of one phase; None where nothing has to be read.  The weights that fuse features, which only the extend reads,
        and chosen experts, of which it reads the most, are spread over all passes of the draft."""
        passes = {"draft": self.draft_passes - 1, "extend": 1}.get(phase, 0)
        if passes > 0 and self.draft_passes:
            return passes * (self.draft + self.draft_kv) / self.draft_passes
        return self.target + self.target_kv if phase in ("verify", "decode") else None


@dataclass(frozen=True)
class KernelSplit:
    """Milliseconds and launches of one round under the profiler.  Times of all kinds (or phases) and `idle` add up to `span`.

    by_kind, by_phase: milliseconds of the kernels by KINDS and by TRACED_PHASES, every instant counted once.  by_phase is empty
    where specdec's own kernels did not run, since they tell phases apart.  idle: milliseconds between the first kernel and the
    last in which none ran.  kernels: launches, those inside a graph included, copies left out.
    longest: (short name, ms, launches) of the kernels that took the most time.
    """

    rounds: int
    by_kind: dict[str, float]
    by_phase: dict[str, float]
    idle: float
    kernels: float
    longest: list[tuple[str, float, float]]

    @property
    def span(self) -> float:
        return sum(self.by_kind.values()) + self.idle

    @property
    def idle_share(self) -> float:
        return self.idle / self.span if self.span else 0.0


@dataclass(frozen=True)
class Budget:
    """One batch size with one tree shape (S,k,nd), or with plain decoding (spec None).

    context: committed tokens of a sequence, mean over the rounds measured.  bandwidth: bytes per second.  graphs: how the
    rounds ran.  round_ms: of each round.  host_ms, phases_ms: see BUDGET_DEFINITIONS.  kernels: None without a GPU.
    """

    batch_size: int
    spec: tuple[int | str, ...] | None
    context: float
    bandwidth: float
    bytes: RoundBytes
    graphs: str | bool
    round_ms: list[float]
    host_ms: float | None
    phases_ms: dict[str, float]
    kernels: KernelSplit | None

    @property
    def name(self) -> str:
        return "plain step" if self.spec is None else "round " + ",".join(map(str, self.spec))

    @property
    def ms(self) -> float:
        return median(self.round_ms)

    @property
    def limit_ms(self) -> float:
        return self.ms_of(self.bytes.total)

    def ms_of(self, count: float) -> float:
        """Milliseconds that reading so many bytes takes at least."""
        return 1e3 * count / self.bandwidth

    def as_json(self) -> dict[str, Any]:
        derived: dict[str, Any] = {"ms": self.ms, "byte_limit_ms": self.limit_ms, "times_limit": self.ms / self.limit_ms}
        if self.kernels is not None:
            derived |= {"gpu_span_ms": self.kernels.span, "gpu_idle_share": self.kernels.idle_share}
        return {**asdict(self), "derived": derived}
