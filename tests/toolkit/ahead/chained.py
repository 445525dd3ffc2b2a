"""Reads kernels' source: when a kernel triggers, and which of its arguments it reads and writes before its wait.

All three are found by following the statements in order, into the functions that a kernel calls.  No branch is left out unless
CASES decides its condition, so more may be found than one launch does, and never less; a loop counts as run at least once.

Partitions of `gl.warp_specialize` run beside each other.  What a partition reads or writes before its own gdc_wait counts as
before the wait.  A partition that need not wait itself counts as waiting where it first waits for an mbarrier's phase 0, if the
mbarrier is signalled after a wait only: every arrival at it, and every TMA load that completes it, comes after a wait of the
partition that does so.  (A wait for phase 1 of a new mbarrier is over at once.)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any

from toolkit.paths import ROOT

ROOMS = ("specdec", "attention", "draft", "verify")
ATOMICS = {"atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or", "atomic_xchg", "atomic_xor"}
READS = {"load", "tma_load", *ATOMICS}
STORES = {"store", "tma_store", *ATOMICS}
COPIES = {"copy_to_shared", "async_copy_global_to_shared"}  # from their second argument's memory into shared memory
# Of kernels whose waits stand under conditions: constexprs that decide the conditions, in all combinations that matter.
CASES: dict[str, dict[str, tuple[Any, ...]]] = {
    "quantised_warp_kernel": {"BLOCK_M": (1, 8), "KIND": ("int4", "lossless")},
    "quantised_warpgroup_kernel": {"KIND": ("int4", "lossless")},
    "few_down_kernel": {"ONE_TOKEN": (False, True)},
    "quantised_experts_kernel": {"ACTIVATION": ("none", "swiglu"), "SORTED": (False, True)},
    "ssd_tree_hopper_kernel": {"COPIED": (False, True)},
}

Items = frozenset[tuple[str, Any]]  # of a dictionary
Value = Any  # what an expression may point to: a frozenset of names of memory, or a tuple of values
NOTHING: frozenset[str] = frozenset()
SHARED = "shared memory of line "


@dataclass
class Found:
    """waits, triggers: whether the kernel does so at all.  always: whether all partitions wait, whichever branches they take.
    early: whether it may trigger before it has waited.

    reads: names of arguments that are read before a wait.  by_l1: those of them that plain loads read, which may find in L1
    what stood there before.  stores: those that are written there.  signals: mbarriers that are arrived at, or loaded for, and
    whether a wait is over there.
    """

    waits: bool = False
    always: bool = True
    triggers: bool = False
    early: bool = False
    reads: set[str] = field(default_factory=set)
    by_l1: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    signals: set[tuple[str, bool]] = field(default_factory=set)

    def add(self, other: Found) -> None:
        self.waits |= other.waits
        self.always &= other.always
        self.triggers |= other.triggers
        self.early |= other.early
        self.reads |= other.reads
        self.by_l1 |= other.by_l1
        self.stores |= other.stores
        self.signals |= other.signals


class Module:
    """The functions of one file, and of those that it imports them from."""

    def __init__(self, path: Path) -> None:
        self.tree, self.functions, self.imported = ast.parse(path.read_text()), {}, {}  # type: ignore[var-annotated]
        self.name = path.stem
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

    def kernels(self) -> dict[str, Found]:
        return {name: _kernel(self, each) for name, each in self.functions.items() if name.endswith("_kernel")}


@cache
def module_of(path: Path) -> Module:
    return Module(path)


@cache
def calls_in(node: ast.AST) -> tuple[ast.Call, ...]:
    """Calls inside of it and itself if it is one, inner ones first."""
    inside = tuple(call for child in ast.iter_child_nodes(node) for call in calls_in(child))
    return (*inside, node) if isinstance(node, ast.Call) else inside


@cache
def code_of(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "", "eval")


@cache
def text_of(node: ast.AST) -> str:
    return ast.unparse(node)


@cache
def walk_of(
    module: Module, function: ast.FunctionDef, given: Items, known: Items, phases: Items, waited: bool, guarded: frozenset[str]
) -> Walk:
    """The walk through a function that another one calls; kernels call the same ones in the same way again and again."""
    return Walk(module, function, dict(given), dict(known), dict(phases), waited, guarded)


def _kernel(module: Module, function: ast.FunctionDef) -> Found:
    found, cases = Found(), CASES.get(function.name, {})
    for values in product(*cases.values()):
        given = {each.arg: frozenset({each.arg}) for each in function.args.args}
        walk = Walk(module, function, given, {"PDL": True, **dict(zip(cases, values))})
        walk.found.always = walk.waited
        found.add(walk.found)
    return found


class Walk:
    """One function's statements, in order.

    given: what its parameters point to.  known: constexprs whose values are known.  phases: other names whose values are known
    when an mbarrier is first waited for.  waited: whether the caller has.  guarded: mbarriers that are signalled after a wait
    only.
    """

    def __init__(
        self, module: Module, function: ast.FunctionDef, given: Mapping[str, Value], known: Mapping[str, Any],
        phases: Mapping[str, int] | None = None, waited: bool = False, guarded: frozenset[str] = NOTHING,
    ) -> None:  # fmt: skip
        self.module, self.found, self.waited, self.guarded = module, Found(), waited, guarded
        self.roots, self.known, self.phases = dict(given), dict(known), dict(phases or {})
        self.returned: list[tuple[bool, Value]] = []
        if not self.block(function.body):
            self.returned.append((self.waited, NOTHING))
        self.waited = all(waited for waited, _ in self.returned)

    def block(self, statements: list[ast.stmt]) -> bool:
        """Whether it ends in a return."""
        return any(self.statement(each) for each in statements)

    def statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.If):
            return self.condition(node)
        if isinstance(node, ast.Return):
            self.expression(node)
            self.returned.append((self.waited, self.value(node.value) if node.value else NOTHING))
            return True
        if isinstance(node, ast.For | ast.While):
            self.expression(node.iter if isinstance(node, ast.For) else node.test)
            before = dict(self.roots)
            self.block(node.body)
            self.join(before)
            if not self.waited:  # what the first run leaves is read by the next one
                self.block(node.body)
                self.join(before)
            return False
        for child in ast.iter_child_nodes(node):
            self.expression(child)
        if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            self.known.pop(node.target.id, None)
            if (value := self.constant(node.value)) is not None:
                self.known[node.target.id] = value
            self.assign(node.target, self.value(node.value))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.assign(target, self.value(node.value), self.phase(node.value))
        elif isinstance(node, ast.AugAssign):
            self.phases.pop(text_of(node.target), None)
        return False

    def condition(self, node: ast.If) -> bool:
        self.expression(node.test)
        decided = self.constant(node.test)
        if decided is not None:
            return self.block(node.body if decided else node.orelse)
        before, roots, phases = self.waited, dict(self.roots), dict(self.phases)
        ends = self.block(node.body)
        after, others, then = self.waited, self.roots, self.phases
        self.waited, self.roots, self.phases = before, roots, phases
        else_ends = self.block(node.orelse)
        if ends:
            return else_ends
        self.waited = after and (self.waited or else_ends)
        self.phases = then if else_ends else dict(self.phases.items() & then.items())
        self.join(others)
        return False

    def join(self, others: dict[str, Value]) -> None:
        """What a name points to after either of two ways."""
        for name, value in others.items():
            mine = self.roots.get(name, value)
            self.roots[name] = mine if mine == value else _flat(mine) | _flat(value)

    def assign(self, target: ast.expr, value: Value, phase: int | None = None) -> None:
        if isinstance(target, ast.Name):
            self.roots[target.id] = value
            self.phases.pop(target.id, None)
            if phase is not None:
                self.phases[target.id] = phase
        elif isinstance(target, ast.Tuple):
            whole = isinstance(value, tuple) and len(value) == len(target.elts)
            for n, each in enumerate(target.elts):
                self.assign(each, value[n] if whole else _flat(value))

    def constant(self, node: ast.expr) -> Any:
        """None if the value of an expression is not known."""
        try:
            return eval(code_of(node), {"__builtins__": {}}, self.known)
        except (NameError, TypeError, AttributeError):
            return None

    def phase(self, node: ast.expr) -> int | None:
        known = node.value if isinstance(node, ast.Constant) else self.phases.get(text_of(node))
        return known if isinstance(known, int) else None

    def expression(self, node: ast.AST) -> None:
        for each in calls_in(node):
            self.follow(each)

    def follow(self, node: ast.Call) -> None:
        """One call, whose arguments have been followed."""
        name, owner = _name(node)
        if name == "gdc_wait":
            self.waited = self.found.waits = True
        elif name == "gdc_launch_dependents":
            self.found.triggers = True
            self.found.early |= not self.waited
        elif name == "warp_specialize":
            self.partitions(node)
        elif owner == "mbarrier":
            self.mbarrier(name, node)
        elif name == "inline_asm_elementwise":
            self.assembly(node)
        elif name in COPIES:
            self.touch(self.found.reads, self.value(node.args[1]))
        elif name in READS | STORES:
            is_method = isinstance(node.func, ast.Attribute) and owner not in ("tl", "gl")
            memory = self.value(node.func.value if is_method else node.args[0])  # type: ignore[attr-defined]
            if name == "tma_load":
                self.signal(node.args[2])
            if name == "load" and "cache_modifier='.cg'" not in text_of(node):
                self.touch(self.found.by_l1, memory)
            for kinds, names in ((READS, self.found.reads), (STORES, self.found.stores)):
                if name in kinds:
                    self.touch(names, memory)
        elif isinstance(node.func, ast.Name):
            self.call(node)

    def touch(self, names: set[str], memory: Value) -> None:
        if not self.waited:
            names.update(each for each in _flat(memory) if not each.startswith(SHARED))

    def mbarrier(self, name: str, node: ast.Call) -> None:
        if name == "arrive":
            self.signal(node.args[0])
        elif name == "wait" and self.phase(node.args[1]) == 0 and not node.keywords:  # a keyword says whether to wait
            bars = _flat(self.value(node.args[0]))
            self.waited |= bool(bars) and bars <= self.guarded

    def signal(self, node: ast.expr) -> None:
        self.found.signals.update((each, self.waited) for each in _flat(self.value(node)))

    def assembly(self, node: ast.Call) -> None:
        text, memory = ast.unparse(node.args[0]), self.value(node.args[2])
        is_open = '"' not in text and "'" not in text and "is_pure=True" not in text_of(node)  # it may do anything
        if is_open or re.search(r"\b(ld|ld_reduce|atom|prefetch)\.", text):
            self.touch(self.found.reads, memory)
        if is_open or re.search(r"\b(st|red|atom)\.", text):
            self.touch(self.found.stores, memory)

    def partitions(self, node: ast.Call) -> None:
        """All of them again, until no more mbarriers are known to be signalled after a wait only."""
        calls = [ast.Call(part.elts[0], part.elts[1].elts, []) for part in node.args[0].elts]  # type: ignore[attr-defined]
        while True:
            walks = [self.inner(each) for each in calls]
            signals = set().union(*(each.found.signals for each in walks if each))
            guarded = frozenset(bar for bar, waited in signals if waited and (bar, False) not in signals)
            if guarded <= self.guarded:
                break
            self.guarded |= guarded
        for walk in walks:
            assert walk is not None, "a partition whose source is not found"
            self.found.add(walk.found)
        self.waited = all(each.waited for each in walks if each)

    def inner(self, node: ast.Call) -> Walk | None:
        """The function that is called, from here on."""
        target = self.module.function(node.func.id) if isinstance(node.func, ast.Name) else None
        if target is None:
            return None
        module, function = target
        arguments = dict(zip([each.arg for each in function.args.args], node.args))
        arguments |= {each.arg: each.value for each in node.keywords if each.arg}
        given = {name: self.value(each) for name, each in arguments.items()}
        constexprs = {each.arg for each in function.args.args if each.annotation is not None}
        known = {name: self.constant(each) for name, each in arguments.items() if name in constexprs}
        known = {name: value for name, value in known.items() if value is not None}
        phases = {name: value for name, each in arguments.items() if (value := self.phase(each)) is not None}
        return walk_of(
            module, function, *(frozenset(each.items()) for each in (given, known, phases)), self.waited, self.guarded
        )

    def call(self, node: ast.Call) -> None:
        if (walk := self.inner(node)) is not None:
            self.found.add(walk.found)
            self.waited = walk.waited

    def value(self, node: ast.expr) -> Value:
        """What an expression points to: addresses begin with what they are computed from."""
        if isinstance(node, ast.Name):
            return self.roots.get(node.id, NOTHING)
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(self.value(each) for each in node.elts)
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left), self.value(node.right)
            return _flat(left) | _flat(right) if isinstance(right, tuple) else left
        if isinstance(node, ast.Subscript):
            whole, at = self.value(node.value), self.constant(node.slice)
            return whole[at] if isinstance(whole, tuple) and isinstance(at, int) and at < len(whole) else _flat(whole)
        if isinstance(node, ast.Attribute):
            is_constexpr = isinstance(node.value, ast.Name) and node.value.id.isupper()  # of whose fields none is an address
            return NOTHING if is_constexpr else self.value(node.value)
        if isinstance(node, ast.IfExp):
            decided = self.constant(node.test)
            if decided is not None:
                return self.value(node.body if decided else node.orelse)
            return _flat(self.value(node.body)) | _flat(self.value(node.orelse))
        if isinstance(node, ast.Call):
            name, _ = _name(node)
            if name == "allocate_shared_memory":
                return frozenset({f"{SHARED}{node.lineno} of {self.module.name}"})
            if name == "where":
                return _flat(self.value(node.args[1])) | _flat(self.value(node.args[2]))
            if isinstance(node.func, ast.Attribute):
                return self.value(node.func.value)
            return self.result(node)
        return NOTHING

    def result(self, node: ast.Call) -> Value:
        """What a function returns."""
        walk = self.inner(node)
        values = [value for _, value in walk.returned] if walk else []
        if not values:
            return NOTHING
        return values[0] if all(each == values[0] for each in values) else frozenset().union(*map(_flat, values))


def _flat(value: Value) -> frozenset[str]:
    return frozenset().union(*map(_flat, value)) if isinstance(value, tuple) else value


def _name(node: ast.Call) -> tuple[str, str]:
    """(the function's name, the name that stands before it)."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr, getattr(node.func.value, "id", "")
    return getattr(node.func, "id", ""), ""


def kernels() -> dict[str, Found]:
    """Of all kernels of the product, by name."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.stem.endswith(("_triton", "_hopper")):
                found.update(module_of(path).kernels())
    return found
