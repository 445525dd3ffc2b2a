"""Reads kernels' source: when a kernel triggers, and which of its arguments it reads before its wait.

Both are found by following the statements in order, into the functions that a kernel calls.  What stands under a condition
counts as done: no branch is left out, so more may be found than one launch does, and never less.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from toolkit.paths import ROOT

READS = {"load", "atomic_add", "atomic_or", "tma_load", "prefetch", "gather4"}  # of their first argument's memory
ROOMS = ("specdec", "attention", "draft", "verify")


@dataclass
class Found:
    """waits, triggers: whether the function does so at all.  early: whether it may trigger before it has waited.

    reads: names of arguments that are read before a wait.  stores: those that are written there.
    """

    waits: bool = False
    triggers: bool = False
    early: bool = False
    reads: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)


class Module:
    """The functions of one file, and of those that it imports them from."""

    def __init__(self, path: Path) -> None:
        self.tree, self.functions, self.imported = ast.parse(path.read_text()), {}, {}  # type: ignore[var-annotated]
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("specdec."):
                parts = node.module.split(".")
                parts = parts[1:] if parts[1] in ROOMS else parts
                source = ROOT.joinpath(*parts).with_suffix(".py")
                if source.exists():
                    self.imported.update({each.asname or each.name: (source, each.name) for each in node.names})

    def function(self, name: str) -> tuple[Module, ast.FunctionDef] | None:
        if name in self.functions:
            return self, self.functions[name]
        if name in self.imported:
            source, there = self.imported[name]
            return module_of(source).function(there)
        return None


@cache
def module_of(path: Path) -> Module:
    return Module(path)


class Walk:
    """One function's statements, in order."""

    def __init__(self, module: Module, function: ast.FunctionDef) -> None:
        self.module, self.found, self.waited = module, Found(), False
        self.flags = {"PDL"}  # names of what is true in a chained launch that waits there
        self.roots = {each.arg: {each.arg} for each in function.args.args}
        self.block(function.body)

    def block(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.If):
            self.expression(node.test)
            before, is_chained = self.waited, ast.unparse(node.test) in self.flags
            self.block(node.body)
            after, self.waited = self.waited, before
            self.block(node.orelse)
            self.waited = after and (self.waited or is_chained or _ends(node.body))
        elif isinstance(node, ast.For | ast.While):
            self.expression(node.iter if isinstance(node, ast.For) else node.test)
            self.block(node.body)
        else:
            for child in ast.iter_child_nodes(node):
                self.expression(child)
            if isinstance(node, ast.AnnAssign) and "PDL" in ast.unparse(node.value or node):
                self.flags.add(ast.unparse(node.target))
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self.roots[name.id] = self.memory(node.value)

    def expression(self, node: ast.AST) -> None:
        """Calls inside of it, inner ones first."""
        for child in ast.iter_child_nodes(node):
            self.expression(child)
        if not isinstance(node, ast.Call):
            return
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "gdc_wait":
            self.waited = self.found.waits = True
        elif name == "gdc_launch_dependents":
            self.found.triggers = True
            self.found.early |= not self.waited
        elif name == "warp_specialize":
            before, ends = self.waited, []
            for part in node.args[0].elts:  # type: ignore[attr-defined]
                self.waited = before
                self.call(part.elts[0].id, part.elts[1].elts, ordered=False)
                ends.append(self.waited)
            self.waited = all(ends)
        elif name in READS | {"store"} and not self.waited:
            (self.found.stores if name == "store" else self.found.reads).update(self.memory(node.args[0]))
        elif isinstance(node.func, ast.Name):
            self.call(name, node.args)

    def call(self, name: str, arguments: list[ast.expr], ordered: bool = True) -> None:
        """ordered: False for warps beside others, which barriers keep from memory until another one has waited."""
        known = self.module.function(name)
        if known is None:
            return
        inner = Walk(*known)
        self.found.waits |= inner.found.waits
        self.found.triggers |= inner.found.triggers
        self.found.early |= inner.found.early and not self.waited
        if ordered and not self.waited:
            given = dict(zip([each.arg for each in known[1].args.args], arguments))
            for mine, theirs in ((self.found.reads, inner.found.reads), (self.found.stores, inner.found.stores)):
                for each in theirs & given.keys():
                    mine.update(self.memory(given[each]))
        self.waited |= inner.found.waits and inner.waited

    def memory(self, node: ast.AST) -> set[str]:
        """The arguments whose memory an address lies in: addresses begin with one."""
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.BinOp):
                node = node.left
            elif isinstance(node, ast.Subscript | ast.Attribute):
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "where":
                return self.memory(node.args[1]) | self.memory(node.args[2])
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                node = node.func.value
            else:
                return set()
        return self.roots.get(node.id, set())


def _ends(statements: list[ast.stmt]) -> bool:
    return isinstance(statements[-1], ast.Return)


def kernels() -> dict[str, Found]:
    """Of all kernels of the product, by name."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.stem.endswith(("_triton", "_hopper")):
                module = module_of(path)
                for name, function in module.functions.items():
                    if name.endswith("_kernel"):
                        found[name] = Walk(module, function).found
    return found
