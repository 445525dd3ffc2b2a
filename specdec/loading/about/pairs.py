"""A table of names and what is said of each, as `doctor` and `inspect` print it.  Knows nothing of what is said."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text


def pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2), show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
