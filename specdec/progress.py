"""Shows on stderr how far a call of `generate` is: a bar on a terminal, and one line at the end elsewhere.

Knows finished requests and tokens as numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 0.1  # between two looks at the numbers

Show = Callable[[int, int], None]  # requests that have ended, tokens written by all


@contextmanager
def show_tokens(requests: int, enabled: bool) -> Iterator[Show | None]:
    """Gives the function to call with the present numbers; None if nothing is to be shown.  requests: how many there are."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("0 tokens", total=requests)

        def show(ended: int, tokens: int) -> None:
            seconds = bar.tasks[0].elapsed or 0.0
            rate = f", {tokens / seconds:,.0f} tok/s" if seconds > 0 else ""
            bar.update(task, completed=ended, description=f"{tokens:,} tokens{rate}")

        yield show
