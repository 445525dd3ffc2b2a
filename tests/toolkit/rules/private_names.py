"""Private names (`_x`) of one file of the product that another file imports, or reaches into.

An attribute counts as another file's if that file defines it and this one doesn't.  So `a._x` between objects of one file is
free, and so are `_replace` of a named tuple, and private names of torch and Triton.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.rules.source import nodes, parsed


def borrowed_names(paths: Sequence[Path], root: Path) -> list[str]:
    """Every private name that a file takes from another, once each."""
    of_files, of_objects = defaultdict[str, set[Path]](set), defaultdict[str, set[Path]](set)
    for path in paths:
        top = set(_defined(*parsed(path).body))
        for name in top:
            of_files[name].add(path)
        for name in set(_defined(*nodes(path))) - top:
            of_objects[name].add(path)
    found = set()
    for path in paths:
        for name, of_file in _taken(nodes(path)):
            owners = of_files[name] if of_file else of_objects[name]
            if owners - {path} and (of_file or path not in owners | of_files[name]):
                found.add(f"{path.relative_to(root)} takes {name}")
    return sorted(found)


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in {"_", "_fields"}


def _defined(*nodes: ast.AST) -> Iterator[str]:
    """Private names that these nodes define: functions, classes, variables, and attributes that they assign."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        for each in (part for target in targets for part in getattr(target, "elts", [target])):
            name = getattr(each, "name", None) or getattr(each, "id", None) or getattr(each, "attr", None)
            stored = isinstance(getattr(each, "ctx", ast.Store()), ast.Store)
            if isinstance(name, str) and stored and _private(name):
                yield name


def _taken(all_nodes: Sequence[ast.AST]) -> Iterator[tuple[str, bool]]:
    """(private name, whether it is a name of a module and not of an object): what a file may have from another one."""
    modules = set()
    for node in all_nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "specdec"):
            yield from ((alias.name, True) for alias in node.names if _private(alias.name))
    for node in all_nodes:
        if isinstance(node, ast.Attribute) and _private(node.attr):
            yield node.attr, ast.unparse(node.value) in modules
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in {"getattr", "setattr", "hasattr"}
            and len(node.args) > 1
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and _private(name.value):
                yield name.value, ast.unparse(node.args[0]) in modules
