"""Source as syntax trees, each file parsed once for all rules."""

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The file's syntax tree.  The file must not change."""
    return ast.parse(path.read_text())
