"""Source as syntax trees, each file parsed and walked once for all rules of a file of tests."""

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


@cache
def parsed(path: Path) -> ast.Module:
    """The file's syntax tree.  The file must not change."""
    enabled = gc.isenabled()
    gc.disable()  # Python would look for garbage in all trees again and again: most of the time that parsing takes
    try:
        return ast.parse(path.read_text())
    finally:
        if enabled:
            gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the file's syntax tree, as `ast.walk` gives them."""
    return tuple(ast.walk(parsed(path)))


@pytest.fixture(scope="module", autouse=True)
def source_is_forgotten() -> Iterator[None]:
    """A file of tests imports this: later tests of the process need not look for garbage in a million nodes."""
    yield
    parsed.cache_clear()
    nodes.cache_clear()
