"""Classes that share a name: a reader who has learnt one would mistake the other for it."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from toolkit.rules.source import nodes


def shared_class_names(product: Sequence[Path], others: Sequence[Path], root: Path) -> list[str]:
    """Every name of a product's class that another class has too, with the places of all of them.

    others: files outside of the product, whose classes may share names among themselves.
    """
    places, shared = _places(product, root), _places(others, root)
    everywhere = {name: [*found, *shared.get(name, ())] for name, found in sorted(places.items())}
    return [f"{name}: {', '.join(found)}" for name, found in everywhere.items() if len(found) > 1]


def _places(paths: Sequence[Path], root: Path) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for path in paths:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return found
