"""Source as syntax trees, each file parsed and walked once for all rules of a file of tests."""

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest


@contextmanager
def no_garbage() -> Iterator[None]:
    """Python would look for garbage in all trees again and again: most of the time that parsing and walking take."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def parsed(path: Path) -> ast.Module:
    """The file's syntax tree.  The file must not change."""
    with no_garbage():
        return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the file's syntax tree, in the order of `ast.walk`."""
    found: list[ast.AST] = [parsed(path)]
    with no_garbage():
        for node in found:  # which grows
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    found += [each for each in value if isinstance(each, ast.AST)]
                elif isinstance(value, ast.AST):
                    found.append(value)
    return tuple(found)


@pytest.fixture(scope="module", autouse=True)
def source_is_forgotten() -> Iterator[None]:
    """A file of tests imports this: later tests of the process need not look for garbage in a million nodes."""
    yield
    parsed.cache_clear()
    nodes.cache_clear()
