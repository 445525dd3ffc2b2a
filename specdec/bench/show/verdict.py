"""The verdict on a finished measurement in plain words, the worst first: wrong texts, failures, what is slower, what is faster.

Knows no console; every number is one of the table's.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from specdec.bench.measurement import Cell, Measurement
from specdec.bench.show.words import empty_outputs, number, tag_of

MAX_LINES = 4  # of batch sizes, rows or failures; the table has the rest
MAX_CHARACTERS = 240  # of a failure
SLOWER = "SLOWER THAN BASELINE"
RED, GREEN, YELLOW = "bold red", "bold green", "bold yellow"


def verdict(measurement: Measurement) -> list[Text]:
    """At least one line."""
    lines = [*_wrong(measurement), *_failed(measurement), *_speeds(measurement), *_plain(measurement)]
    return lines or [Text("Nothing was measured", RED)]


def _wrong(measurement: Measurement) -> list[Text]:
    cells = measurement.cells
    differing = [cell for cell in cells if cell.outputs.verdict == "DIVERGED"]
    empty = next((cell.outputs for cell in cells if cell.outputs.verdict == "EMPTY"), None)
    lines = []
    if differing:
        equal, of = min(cell.outputs.num_equal or 0 for cell in differing), differing[0].outputs.prompts
        said = f"OUTPUTS DIFFER by more than rounding at {_places(differing)} ({equal} of {of} equal): "
        lines.append(Text(f"{said}specdec did not write the target's texts there, and no speed-up is shown", RED))
    if empty is not None:
        where = _places([cell for cell in cells if cell.outputs.verdict == "EMPTY"])
        lines.append(Text(f"EMPTY at {where}: {empty_outputs(empty.empty, empty.prompts)}", RED))
    return lines


def _failed(measurement: Measurement) -> list[Text]:
    failures, lines = measurement.failures, list[Text]()
    for failure in failures[:MAX_LINES]:
        message = " ".join(failure.message.split())
        message = message if len(message) <= MAX_CHARACTERS else message[: MAX_CHARACTERS - 3] + "..."
        lines.append(Text(f"FAILED: batch {failure.batch_size}, {failure.name}: {message}", RED))
    if more := len(failures) - MAX_LINES:
        lines += [Text(f"and {more} more failed, see --details", RED)] if more > 0 else []
    return lines


def _speeds(measurement: Measurement) -> list[Text]:
    """A line for each batch size, about its best shape, and one about shapes that are slower than the baseline beside it."""
    tag, best = tag_of(measurement), measurement.best
    lines = [_speed(measurement, cell, tag) for cell in list(best.values())[:MAX_LINES]]
    if len(best) > MAX_LINES:
        lines.append(Text(f"and {len(best) - MAX_LINES} more batch sizes below", "dim"))
    if slower := [cell for cell in measurement.right if cell.gain < 1 <= best[cell.batch_size].gain and not _is_even(cell)]:
        shown = "; ".join(f"batch {cell.batch_size} with {cell.name} ({cell.gain:.2f}x)" for cell in slower[:MAX_LINES])
        more = f" and {len(slower) - MAX_LINES} more below" if len(slower) > MAX_LINES else ""
        lines.append(Text(f"{tag}{SLOWER}: {shown}{more}", RED))
    return lines


def _speed(measurement: Measurement, cell: Cell, tag: str) -> Text:
    """About the best shape of a batch size."""
    ratio, shapes = cell.gain, len({each.name for each in measurement.cells})
    if ratio < 1 and not _is_even(cell):
        best = f", the best of {shapes} shapes" if shapes > 1 else ""
        return Text(f"{tag}{SLOWER} at batch {cell.batch_size}: {ratio:.2f}x with {cell.name}{best}", RED)
    at, noise = f"plain decoding at batch {cell.batch_size} with {cell.name}", measurement.noise(cell)
    if noise is not None and noise[0] <= 1:
        return Text(f"{tag}No faster than {at}: {ratio:.2f}x, within the noise of {noise[0]:.2f}x to {noise[1]:.2f}x", YELLOW)
    if _is_even(cell):
        return Text(f"{tag}As fast as {at}", YELLOW)
    if cell.speculative.counters.accepted == 0:
        return Text(f"{tag}No faster than {at}: no draft was accepted, so {ratio:.2f}x is noise", YELLOW)
    forced = ", if acceptance were as it was forced to be" if tag else ""
    return Text(f"{tag}{ratio:.2f}x faster than {at}{forced}", YELLOW if tag else GREEN)


def _plain(measurement: Measurement) -> list[Text]:
    cells = measurement.plain_cells
    if not cells:
        return []
    rates = ", ".join(f"{number(cell.baseline.tokens_per_second)} tok/s at batch {cell.batch_size}" for cell in cells)
    lines = [Text(f"Plain decoding: {rates}. No draft was given, so nothing is compared", "bold")]
    for cell in cells:
        if cell.empty:
            said = empty_outputs(cell.empty, measurement.prompts["count"])
            lines.insert(0, Text(f"EMPTY at batch {cell.batch_size}: {said}", RED))
    return lines


def _is_even(cell: Cell) -> bool:
    """Whether the table shows no difference."""
    return f"{cell.gain:.2f}" == "1.00"


def _places(cells: Sequence[Cell]) -> str:
    shown = "; ".join(f"batch {cell.batch_size} with {cell.name}" for cell in cells[:MAX_LINES])
    return shown + (f" and {len(cells) - MAX_LINES} more" if len(cells) > MAX_LINES else "")
