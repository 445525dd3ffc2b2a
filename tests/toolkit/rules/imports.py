"""The one-way order of imports: where each module of the product stands in it, and which imports go against it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from toolkit.rules.source import nodes

ROOMS = ("attention", "draft", "verify")
# Two layers have several rooms: what all may import, the engine too, and what computes with tensors.
BASE = {
    "plain": {"chat", "checks", "config", "files", "generation", "grammar", "limits", "options", "screen", "shipped", "startup"}
    | {"steps", "tables", "trees", "__version__"},
    "ops": {"ops", "parallel"},
}
MAY_IMPORT = {
    "plain": {"plain"},
    "ops": {"ops"},
    "attention": {"attention", "ops", "plain"},
    "models": {"models", "attention", "ops", "plain"},
    "batch": {"batch", "attention", "ops", "plain"},
    "draft": {"draft", "batch", "models", "attention", "ops", "plain"},
    "verify": {"verify", "batch", "models", "attention", "ops", "plain"},
    "runner": {"runner", "verify", "draft", "batch", "models", "attention", "ops", "plain"},
    "engine": {"engine", "plain"},
}
# The door's own layers, from the inside out: each may import those before it, and all rooms above; of OUTER not each other.
DOOR = ("prompts", "loading", "loaded", "session", "lossless", "audit", "trace", "decoder")
OUTER = ("bench", "serve", "train", "tune", "operators")
for name in DOOR:
    MAY_IMPORT[name] = {*MAY_IMPORT, name}
INNER = {*MAY_IMPORT}
MAY_IMPORT |= {name: INNER | {name} for name in OUTER}
MAY_IMPORT["cli"] = {*MAY_IMPORT, "cli"}


def package_files(root: Path) -> list[Path]:
    return sorted(p for folder in ("specdec", *ROOMS) for p in (root / folder).rglob("*.py"))


def module_name(path: Path, root: Path) -> str:
    """The import name of a file: draft/worker.py is specdec.draft.worker."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "specdec" else ("specdec", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    """Where a module of specdec stands in the one-way order: a key of MAY_IMPORT."""
    head = (module.split(".") + [""])[1]
    if head in ("", "async_decoder"):  # the package itself names what is public
        return "decoder"
    return next((name for name, rooms in BASE.items() if head in rooms), head)


def module_of(name: str, root: Path) -> str:
    """The module on which `from specdec import name` depends."""
    if name == "__version__" or (root / "specdec" / f"{name}.py").is_file():
        return f"specdec.{name}"
    return "specdec"


@cache
def imported(path: Path, root: Path) -> tuple[tuple[int, str], ...]:
    """Every module that a file names in an import, at any depth, as (line, absolute name).  The file must not change."""
    return tuple(_imported(path, root))


def _imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    name = module_name(path, root)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            modules = {module_of(each.name, root) if base == "specdec" else base for each in node.names}
            yield from ((node.lineno, module) for module in sorted(modules))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))  # its last name
            if called in {"import_module", "__import__"}:
                yield node.lineno, str(node.args[0].value)


def wrong_imports(root: Path) -> list[str]:
    found = []
    for path in package_files(root):
        here = layer(module_name(path, root))
        for line, target in imported(path, root):
            where = f"{path.relative_to(root)}:{line}"
            if target.split(".")[0] in ROOMS:
                found.append(f"{where} imports {target}: its name is specdec.{target}")
            elif target.split(".")[0] == "specdec" and layer(target) not in MAY_IMPORT[here]:
                found.append(f"{where} ({here}) imports {target} ({layer(target)})")
    return found
