"""Classes of the product that share a name: a reader who has learnt one would mistake the other for it."""

import ast
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from toolkit.rules.source import parsed


def shared_class_names(paths: Sequence[Path], root: Path) -> list[str]:
    """Every class name that is defined more than once, with the places of all its definitions."""
    places = defaultdict[str, list[str]](list)
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]
