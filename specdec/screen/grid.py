"""Rows of named numbers on a console of any width: a table where it fits, else a block of `name: number` lines for each row.

A number is never cut or wrapped.  This file knows nothing of what the numbers mean.
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

UNBOUNDED = 10_000  # columns, to ask how wide a table would like to be


class Grid:
    """Rows with the same columns.

    lead: names of the cells that say which row it is; in a block these cells are the first line.  columns: names of the
    values, "\\n" where the head of a table breaks.  tag: a mark on every row, or "".  left: the lead cells are words, set to
    the left, and say what they are without their names.
    """

    def __init__(self, lead: tuple[str, ...], *columns: str, tag: str = "", left: bool = False) -> None:
        self.lead, self.columns, self.tag, self.left = lead, columns, tag, left
        self.rows: list[tuple[list[Text], str]] = []

    def add(self, *cells: str | Text, style: str = "") -> None:
        """One cell for each name of `lead` and of `columns`; an empty one has no line in a block."""
        assert len(cells) == len(self.lead) + len(self.columns), cells
        self.rows.append(([cell if isinstance(cell, Text) else Text(cell) for cell in cells], style))

    def print(self, console: Console) -> None:
        table = self._table()
        unbounded = console.options.update(max_width=UNBOUNDED)
        if console.measure(table, options=unbounded).maximum <= console.width:
            console.print(table)
            return
        for cells, style in self.rows:
            self._print_block(console, cells, style)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), collapse_padding=bool(self.tag), pad_edge=False, header_style="cyan")
        for i, name in enumerate((*self.lead, *self.columns)):
            is_left = self.left and i < len(self.lead)
            table.add_column(name, justify="left" if is_left else "right", no_wrap=True, vertical="bottom")
        if self.tag:
            table.add_column("", no_wrap=True, style="yellow")
        for cells, style in self.rows:
            table.add_row(*cells, *([Text(self.tag, "yellow")] if self.tag else []), style=style)
        return table

    def _print_block(self, console: Console, cells: list[Text], style: str) -> None:
        named = list(zip(self.lead, cells, strict=False))
        head = ", ".join(cell.plain.strip() if self.left else f"{name} {cell.plain}" for name, cell in named)
        console.print(Text(f"{head} {self.tag}".rstrip(), style or "cyan"))
        for name, cell in zip(self.columns, cells[len(self.lead) :], strict=True):
            if cell.plain:
                line = Text(" ".join(name.split()) + ": ").append_text(cell)
                console.print(Padding(line, (0, 0, 0, 2), expand=False))
