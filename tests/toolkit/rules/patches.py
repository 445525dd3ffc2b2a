"""Tests that replace what a module, a class or an object holds, instead of passing something else in."""

import ast
from collections.abc import Sequence
from pathlib import Path

from toolkit.rules.source import nodes

METHODS = {"setattr", "delattr", "setitem", "delitem"}  # of pytest's MonkeyPatch; setenv and chdir are free


def patches(paths: Sequence[Path]) -> dict[Path, int]:
    """How many places of each file patch, whether by pytest's fixture, by `unittest.mock`, by hand or by `setattr`."""
    counts = {path: sum(map(_patches, nodes(path))) for path in paths}
    return {path: count for path, count in counts.items() if count}


def _patches(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name, owned = _last_name(node.func), isinstance(node.func, ast.Attribute)
    owner = _last_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return (
        (name == "setattr" and not owned)
        or (name in METHODS and owned)
        or name == "patch"
        or (owner == "patch" and name in {"object", "dict", "multiple"})
    )


def _last_name(node: ast.expr) -> str:
    """c of a.b.c; empty if the expression ends in no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
