"""Tests that replace what a module, a class or an object holds, instead of passing something else in."""

import ast
from collections.abc import Sequence
from pathlib import Path

from toolkit.rules.source import parsed

METHODS = {"setattr", "delattr", "setitem", "delitem"}  # of pytest's MonkeyPatch; setenv and chdir are free


def patches(paths: Sequence[Path]) -> dict[Path, int]:
    """How many places of each file patch, whether by pytest's fixture, by `unittest.mock`, by hand or by `setattr`."""
    counts = {path: sum(map(_patches, ast.walk(parsed(path)))) for path in paths}
    return {path: count for path, count in counts.items() if count}


def _patches(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    *owners, name = ast.unparse(node.func).split(".")
    if name == "setattr" and not owners:
        return True
    return (
        (name in METHODS and bool(owners))
        or name == "patch"
        or "patch" in owners[-1:]
        and name in {"object", "dict", "multiple"}
    )
