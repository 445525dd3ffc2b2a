"""Speed as bars of a terminal: plain decoding and each shape beside it, for each batch size.  Knows a measurement's cells."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from specdec.bench.measurement import Cell

BLOCKS, FULL = " ▏▎▍▌▋▊▉", "█"
NARROWEST = 20  # columns of the longest bar, without which none are drawn


def print_bars(cells: list[Cell], console: Console) -> None:
    """Nothing where the output is no terminal, its encoding lacks the characters, or there is no room."""
    try:
        (BLOCKS + FULL).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return
    rows = list(_rows(cells))
    labels, numbers = max((len(row[0]) for row in rows), default=0), max((len(row[2]) for row in rows), default=0)
    room = console.width - labels - numbers - 3
    if not console.is_terminal or room < NARROWEST:
        return
    most = max((row[1] for row in rows), default=0.0)
    console.print()
    for label, rate, number, style in rows:
        line = Text(f"{label:<{labels}} ")
        console.print(line.append(bar(rate / most if most else 0.0, room), style).append(f" {number}"))


def bar(share: float, columns: int) -> str:
    """A bar of that share of the columns, to an eighth of one."""
    eighths = round(share * columns * 8)
    return FULL * (eighths // 8) + BLOCKS[eighths % 8].strip()


def _rows(cells: list[Cell]) -> Iterator[tuple[str, float, str, str]]:
    """What each bar is called, its tokens a second, the number after it, and its colour."""
    seen = set[int]()
    for cell in cells:
        if cell.batch_size not in seen:
            plain = cell.baseline.tokens_per_second
            yield f"batch {cell.batch_size}, plain", plain, f"{plain:,.0f} tok/s", "dim"
            seen.add(cell.batch_size)
        rate = cell.speculative.tokens_per_second
        ratio = "" if cell.speed_up is None else f", {cell.speed_up:.2f}x"
        yield f"batch {cell.batch_size}, {cell.name}", rate, f"{rate:,.0f} tok/s{ratio}", "green" if ratio else "red"
