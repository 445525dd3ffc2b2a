"""Shows budgets: for each kind of work, what a round took part by part, beside the least that part could take.

Knows no model and measures nothing.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from specdec.bench.budget import ATTENTION, GEMM, PHASES, Budget
from specdec.bench.measurement import Measurement
from specdec.bench.show.words import tag_of
from specdec.screen.grid import Grid

MAX_SHOWN = 5
NAME_SHOWN = 28  # characters of a kernel's name

HOW = {"round": "one graph a round", "step": "one graph a phase", False: "no graphs"}


def print_budgets(measurement: Measurement, console: Console) -> None:
    """Nothing if no budgets were asked for."""
    if not measurement.budgets:
        return
    rate = measurement.budgets[0].bandwidth
    console.print(Text("\nWhere each millisecond goes", "bold"))
    shown = f"{rate / 1e12:.2f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GB/s"
    console.print(f"Read bandwidth, measured here: {shown}")
    for budget in measurement.budgets:
        tag = tag_of(measurement) if budget.spec else ""
        what = f"{budget.name}, batch {budget.batch_size}, {budget.context:,.0f} tokens of context"
        console.print(Text(f"\n{tag}{what}", "bold"))
        _budget_grid(budget, tag).print(console)


class _Rows:
    """A grid of parts.  Each group's share is of the time on its first line."""

    def __init__(self, tag: str) -> None:
        self.grid = Grid(("part",), "ms", "share", "limit ms", "x limit", tag=tag.rstrip(": "), left=True)

    def add(
        self, part: str, ms: float | None = None, whole: float | None = None, limit: float | None = None, style: str = ""
    ) -> None:
        cells = [
            "" if ms is None else _ms(ms),
            "" if ms is None or not whole else f"{ms / whole:.1%}",
            "" if limit is None else _ms(limit),
            "" if ms is None or not limit else f"{ms / limit:.2f}",
        ]
        self.grid.add(Text(part, style), *cells, style=style)


def _budget_grid(budget: Budget, tag: str) -> Grid:
    rows = _Rows(tag)
    _add_round(rows, budget)
    _add_phases(rows, budget)
    if budget.kernels is not None:
        _add_kernels(rows, budget)
    return rows.grid


def _add_round(rows: _Rows, budget: Budget) -> None:
    rows.add(f"as it runs ({HOW[budget.graphs]})", budget.ms, budget.ms, budget.limit_ms, "bold")
    if budget.host_ms is not None:
        rows.add("  host at work meanwhile", budget.host_ms, budget.ms)
    count = budget.bytes
    for name, size in (
        ("target weights", count.target),
        ("target KV", count.target_kv),
        (f"draft weights, {count.draft_passes} times", count.draft),
        (f"draft KV, {count.draft_passes} times", count.draft_kv),
    ):
        if size:
            rows.add(f"  {name}, {_size(size)}", limit=budget.ms_of(size))
    for whose, experts in (("target", count.target_experts), ("draft", count.draft_experts)):
        if experts is not None:
            chosen = "all" if experts.chosen is None else f"{experts.chosen:.1f} of"
            rows.add(f"  of that {whose} experts, {chosen} {experts.count}", limit=budget.ms_of(experts.bytes))


def _add_phases(rows: _Rows, budget: Budget) -> None:
    whole = sum(budget.phases_ms.values())
    rows.add("phases, each waited for", whole, whole, style="bold")
    for name in (*PHASES, "rest"):
        if name in budget.phases_ms:
            count = budget.bytes.of_phase(name)
            rows.add(f"  {name}", budget.phases_ms[name], whole, None if count is None else budget.ms_of(count))


def _add_kernels(rows: _Rows, budget: Budget) -> None:
    gpu = budget.kernels
    assert gpu is not None
    rows.add(f"GPU, {gpu.rounds} rounds traced", gpu.span, gpu.span, style="bold")
    limits = {GEMM: budget.bytes.weights, ATTENTION: budget.bytes.kv}
    for kind, ms in gpu.by_kind.items():
        rows.add(f"  {kind}", ms, gpu.span, budget.ms_of(limits[kind]) if limits.get(kind) else None)
    rows.add("  idle", gpu.idle, gpu.span)
    if gpu.by_phase:
        rows.add("the same by phase", style="bold")
    for phase, ms in gpu.by_phase.items():
        size = budget.bytes.of_phase(phase)
        rows.add(f"  {phase}", ms, gpu.span, None if size is None else budget.ms_of(size))
    rows.add(f"longest of {gpu.kernels:.0f} kernels", style="bold")
    for name, ms, launches in gpu.longest[:MAX_SHOWN]:
        shown = name if len(name) <= NAME_SHOWN else name[: NAME_SHOWN - 2] + ".."
        rows.add(f"  {launches:.0f} x {shown}", ms, gpu.span)


def _ms(value: float) -> str:
    """With three significant digits, or a few more."""
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
