"""Shows all of a finished measurement, at any width of the terminal: what ran, and a table for each question.

The screen with the verdict is `report`'s.  Knows no model and measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec.bench.measurement import REPEAT_FLAG, REPEAT_N, Cell, Measurement, PlainCell
from specdec.bench.show.advice import NOISY
from specdec.bench.show.legend import phases_shown
from specdec.bench.show.words import SYNTHETIC, busy_with, empty_outputs, number, outputs, speed_up, tag_of
from specdec.config import SAMPLING_OPTIONS, SamplingParams
from specdec.lossless.verification import Divergence
from specdec.screen.grid import Grid

DEPTHS_SHOWN = 10
USUAL = ("temperature", "top_p", "top_k", "seed")  # options that are shown where texts are sampled
RARE = (*(name for name, each in SAMPLING_OPTIONS.items() if each.step and name not in USUAL), "stop", "stop_token_ids")
MEMORY = ("weights", "KV pool", "peak", f"repeated\n{REPEAT_N}-grams")
Values = Callable[[Cell], Iterable[str | Text]]  # what a cell shows in the columns of a table
SHOWN_DIVERGENCES = 3  # a cell; the JSON holds all


def print_details(measurement: Measurement, console: Console) -> None:
    """Every table but those of a profile."""
    console.print(_facts(measurement))
    for failure in measurement.failures:
        console.print(Text(f"\nbatch {failure.batch_size}, {failure.name}: FAILED: {failure.message}", "bold red"))
    if measurement.cells:
        _print_cells(measurement, console)
    if measurement.plain_cells:
        _print(console, "Plain decoding: no draft was given, so there is one side", plain_table(measurement.plain_cells))
        for cell in measurement.plain_cells:
            if cell.empty:
                said = empty_outputs(cell.empty, measurement.prompts["count"])
                console.print(Text(f"batch {cell.batch_size}: {said}", "bold red"))


def _print_cells(measurement: Measurement, console: Console) -> None:
    cells, tag = measurement.cells, tag_of(measurement)
    _print(console, f"{tag}Speed", speed_table(cells, predicted=True))
    for line in _warnings(cells, _router_note(measurement.settings)):
        console.print(line)
    for cell in cells:
        for reason in cell.reasons:
            console.print(Text(f"batch {cell.batch_size}, {cell.name} chose in the end for {reason}", "cyan"))
    if any(cell.speed_up_factors for cell in cells):
        _print(console, f"{tag}Why the speed-up is not the predicted one: predicted x all three = measured", _why_table(cells))
    phases = _phase_table(cells, phases_shown(measurement))
    _print(console, f"{tag}Milliseconds by phase, from a separate pass that waits for each", phases)
    depths = max(len(cell.acceptance_by_depth) for cell in cells)
    more = f"; the first {DEPTHS_SHOWN} of {depths}, all in --json" if depths > DEPTHS_SHOWN else ""
    title = f"{tag}Acceptance by depth in the tree (accepted / reached{more})"
    _print(console, title, _depth_table(cells, min(depths, DEPTHS_SHOWN)))
    _print(console, f"{tag}Accept length, averaged in two ways", _table(cells, ("over tokens", "over requests"), _averages))
    title = f"Memory (peak: {cells[0].memory.peak_of}), and text that repeats itself"
    _print(console, title, _table(cells, MEMORY, _memory, marked=False))


def _print(console: Console, title: str, grid: Grid) -> None:
    console.print(Text("\n" + title, "bold"))
    grid.print(console)


def _facts(m: Measurement) -> Table:
    s, prompts, tokens = m.settings, m.prompts, m.prompts["tokens"]
    torch_version = m.versions["torch"] + (f", driver {m.machine['driver']}" if m.machine["gpus"] else "")
    without = "off" if s["device"].startswith("cuda") else "off (no GPU)"
    graphs = f"one a {s['cuda_graphs']}" if s["cuda_graphs"] else without
    kept = "" if s.get("kv_cache_dtype", "auto") == "auto" else f", KV {s['kv_cache_dtype']}"
    kept += ", int8 queries" if s.get("int8_queries", False) else ""
    sampling = s["sampling"]
    sampled = f"sampled with {', '.join(f'{name} {sampling[name]}' for name in USUAL)} (+ prompt number)"
    how = ("greedy" if sampling["temperature"] == 0 else sampled) + _with_rules(sampling)
    rows = [
        ("machine", m.machine["runs_on"]),
        ("versions", f"specdec {m.versions['specdec']}, torch {torch_version}"),
        ("target", s["target"]),
        *([("", f"by {s['backend']}: {s['backend_reason']}")] if s.get("backend", "native") != "native" else []),
        ("draft", s["draft"] or "none: plain decoding alone is measured"),
        ("runs in", f"{s['dtype']}{kept}, CUDA graphs {graphs}, page size {s['page_size']}, max_seq_len {s['max_seq_len']}"),
        ("attention", f"{s['attention']} ({s['attention_reason']})"),
        *([("experts", s["experts"])] if s.get("experts") else []),
        ("prompts", f"{prompts['count']} of {tokens['min']} to {tokens['max']} tokens from {prompts['source']}"),
        ("", f"sha256 of the ids {prompts['sha256'][:16]}" + (", chat template applied" if prompts["chat_template"] else "")),
        ("output", f"at most {sampling['max_tokens']} tokens, {how}" + (", EOS ignored" if sampling["ignore_eos"] else "")),
    ]
    sides = [side.counters for cell in m.cells for side in (cell.baseline, cell.speculative)]
    sides += [cell.baseline.counters for cell in m.plain_cells]
    if s.get("prefix_caching") and sides:  # the warm-up passes left the prompts there
        found = sum(stats.cached_tokens for stats in sides) / sum(stats.prefill_tokens for stats in sides)
        rows.append(("prefixes", f"cached: {found:.0f} of a prompt's {tokens['sum'] / prompts['count']:.0f} tokens were found"))
    if m.synthetic_acceptance is not None:
        forced = ", ".join(f"{p:g}" for p in m.synthetic_acceptance)
        said = (
            f"a chain's acceptance by depth is forced to {forced}. In a tree a round also ends where the head's own scores "
            "have pruned the path, so a tree accepts less than that: shapes can't be compared by it. The speculative text is "
            "not the target's, so outputs are not compared"
        )
        rows.append((SYNTHETIC, f"{said} and near-ties not looked for: a plan, no measurement of this head"))
    if busy := busy_with(m.machine):
        rows.append(("BUSY", f"{busy}: these timings suffer from it"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value, "bold yellow" if name in ("BUSY", SYNTHETIC) else ""))
    return table


def _with_rules(sampling: dict[str, object]) -> str:
    """The options that are not as usual, of those that most runs leave alone; empty if there are none."""
    default = vars(SamplingParams())
    changed = [name for name in RARE if sampling.get(name, default[name]) != default[name]]
    return "".join(f", {name} {sampling[name]}" for name in changed)


def _table(cells: list[Cell], columns: Sequence[str], values: Values, marked: bool = True) -> Grid:
    """A row a cell, whose first two columns name it.  marked: rows are tagged where acceptance was forced."""
    is_synthetic = marked and any(cell.outputs.is_synthetic for cell in cells)
    grid = Grid(("batch", "S,k,nd"), *columns, tag=SYNTHETIC if is_synthetic else "")
    for cell in cells:
        grid.add(str(cell.batch_size), cell.name, *values(cell))
    return grid


def speed_table(cells: list[Cell], predicted: bool) -> Grid:
    """predicted: with the speed-up that was predicted."""
    columns = ["accept\nlength", "baseline\ntok/s", "specdec\ntok/s", "speed-up", *["predicted"] * predicted, "outputs"]

    def values(cell: Cell) -> Iterator[str | Text]:
        yield f"{cell.speculative.counters.accept_length:.2f}"
        yield from (number(side.tokens_per_second) for side in (cell.baseline, cell.speculative))
        yield speed_up(cell.speed_up)
        if predicted:
            yield "-" if cell.predicted_speed_up is None else f"{cell.predicted_speed_up:.2f}x"
        yield outputs(cell)

    return _table(cells, columns, values, marked=False)  # the last column says it


def plain_table(cells: list[PlainCell], with_memory: bool = True) -> Grid:
    grid = Grid(("batch",), "tok/s", "plain\nstep", "all\nprefill", *(MEMORY if with_memory else ()))
    for cell in cells:
        phases = cell.baseline.phases
        ms = [f"{phases.ms_per_round:.2f} ms", f"{phases.prefill_ms:.2f} ms"]
        taken = _memory(cell) if with_memory else []
        grid.add(str(cell.batch_size), number(cell.baseline.tokens_per_second), *ms, *taken)
    return grid


def _why_table(cells: list[Cell]) -> Grid:
    def values(cell: Cell) -> Iterable[str]:
        factors = (f"x {factor:.2f}" for factor in cell.speed_up_factors or ())
        return f"{cell.predicted_speed_up:.2f}x", *factors, f"{cell.speed_up:.2f}x"

    explained = [cell for cell in cells if cell.speed_up_factors is not None]
    return _table(explained, ("predicted", "uneven\nends", "prefill", "other", "measured"), values)


def _router_note(settings: dict[str, Any]) -> str:
    """Another cause of differing outputs, which only a mixture of experts has; empty for other targets, and in float32."""
    if not settings.get("mixture_of_experts") or settings["dtype"] not in ("bfloat16", "float16"):
        return ""
    return f"mixture of experts: in {settings['dtype']} a router flip between passes can cause this; --dtype float32 decides"


def _warnings(cells: list[Cell], router_note: str) -> list[Text]:
    """What must not be overlooked.  router_note: said where outputs diverged, unless empty."""
    lines = []
    for cell in cells:
        is_synthetic = cell.outputs.is_synthetic
        name = f"{SYNTHETIC} " * is_synthetic + f"batch {cell.batch_size}, {cell.name}: "
        if cell.speed_up is not None and cell.speed_up < 1:
            lines.append(Text(f"{name}SLOWER THAN BASELINE ({cell.speed_up:.2f}x)", "bold red"))
        equal = f"{cell.outputs.num_equal} of {cell.outputs.prompts} equal"
        if cell.outputs.verdict == "DIVERGED":
            lines.append(Text(f"{name}speed-up not shown: outputs differ ({equal})", "bold red"))
            lines += [Text("  " + router_note, "yellow")] if router_note else []
        if cell.outputs.empty:
            said = empty_outputs(cell.outputs.empty, cell.outputs.prompts)
            lines.append(Text(f"{name}speed-up not shown: {said}", "bold red"))
        if cell.outputs.verdict == "near-tie":
            lines.append(Text(f"{name}outputs part at near-ties only ({equal})", "yellow"))
        shown = sorted(cell.outputs.differing, key=lambda part: part.verdict != "DIVERGED")[:SHOWN_DIVERGENCES]
        lines += [Text("  " + _divergence(part), "red" if part.verdict == "DIVERGED" else "yellow") for part in shown]
        if more := len(cell.outputs.differing) - len(shown):
            lines.append(Text(f"  and {more} more, see --json", "yellow"))
        if cell.speed_up is not None and max(cell.speed_ups) > NOISY * min(cell.speed_ups):
            low, high = min(cell.speed_ups), max(cell.speed_ups)
            lines.append(Text(f"{name}noisy machine: single repeats gave {low:.2f}x to {high:.2f}x", "yellow"))
        if cold := cell.baseline.cold_timed + cell.speculative.cold_timed:
            lines.append(Text(f"{name}{cold} of the timed passes compiled kernels or captured graphs", "bold yellow"))
        if cell.repeat_ratio > REPEAT_FLAG and not is_synthetic:  # the text accepts nothing then
            share = f"{cell.repeat_ratio:.0%} of {REPEAT_N}-grams occurred before"
            lines.append(Text(f"{name}repetitive outputs ({share}), which inflates acceptance", "bold yellow"))
    return lines


def _divergence(part: Divergence) -> str:
    where = f"prompt {part.prompt + 1}: {part.verdict} at output token {part.index}"
    if part.token_baseline is None or part.token_speculative is None:
        return where + ", where one output ends and the other goes on"
    tokens = f"{part.token_baseline} (rank {part.rank_baseline}) or {part.token_speculative} (rank {part.rank_speculative})"
    margin = "not comparable" if part.margin is None else f"{part.margin:.3g}"
    return f"{where}: {tokens}, the worse {margin} below the best, bound {part.bound:.3g}"


def _phase_table(cells: list[Cell], names: list[str]) -> Grid:
    def values(cell: Cell) -> Iterable[str]:
        phases = cell.speculative.phases
        parts = [phases.ms(name) for name in names]
        return (f"{ms:.2f}" for ms in (cell.baseline.phases.ms_per_round, phases.ms_per_round, *parts, phases.prefill_ms))

    return _table(cells, ("plain\nstep", "whole\nround", *names, "all\nprefill"), values)


def _depth_table(cells: list[Cell], depths: int) -> Grid:
    def values(cell: Cell) -> Iterable[str]:
        shares = ["-" if share is None else f"{share:.2f}" for share in cell.acceptance_by_depth[:depths]]
        return *shares, *[""] * (depths - len(shares))

    return _table(cells, [str(depth + 1) for depth in range(depths)], values)


def _averages(cell: Cell) -> Iterable[str]:
    side = cell.speculative
    return (f"{length:.2f}" for length in (side.counters.accept_length, side.accept_length_by_request))


def _memory(cell: Cell | PlainCell) -> list[str]:
    memory = cell.memory
    return [*map(_bytes, (memory.weights, memory.kv_pool, memory.peak)), f"{cell.repeat_ratio:.2f}"]


def _bytes(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
