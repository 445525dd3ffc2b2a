"""For tests of Triton kernels: where they run, and a switch that makes every dispatch take its kernel.

Importing this module skips the whole test file where Triton is not installed.  Without a GPU the kernels run in Triton's
interpreter, which conftest.py chooses before anything imports Triton.
"""

import importlib
import math
import re
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

from toolkit.paths import ROOT

pytest.importorskip("triton")

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FENCE, MARK = 128, 77
SWITCHES = ("use_kernels", "use_index_kernels")  # what a dispatch asks


def modules_that_say(pattern: str) -> list[ModuleType]:
    """Modules of specdec whose source holds a match at the beginning of a line."""
    found = []
    for room in ("specdec", "attention", "draft", "verify"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if re.search(pattern, path.read_text(), re.M):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found.append(importlib.import_module(".".join(parts if room == "specdec" else ("specdec", *parts))))
    return found


def use_kernels_everywhere(monkeypatch: pytest.MonkeyPatch, *without: ModuleType) -> Counter[str]:
    """Makes every dispatch, except those in `without`, choose its kernel.  Returns a counter of launches by function name.

    The dispatches are found, not listed: all modules that import one of SWITCHES; and all functions named launch_*.
    """
    counts: Counter[str] = Counter()

    def counted(name: str, launch: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return launch(*args, **kwargs)

        return run

    for module in modules_that_say(r"^from specdec\.ops\.\w+ import .*\buse_(index_)?kernels\b"):
        for name in SWITCHES:
            if module not in without and hasattr(module, name):
                monkeypatch.setattr(module, name, lambda x: True)
    for module in modules_that_say(r"^def launch_\w+"):
        for name, launch in list(vars(module).items()):
            if name.startswith("launch_") and getattr(launch, "__module__", None) == module.__name__:
                monkeypatch.setattr(module, name, counted(name, launch))
    return counts


class _Fenced:
    """Stands for torch in one module; its `empty` returns memory between two fences."""

    def __init__(self) -> None:
        self.rooms: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, **options: Any) -> torch.Tensor:
        size = math.prod(shape)
        room = torch.full((size + 2 * FENCE,), MARK, **options)
        self.rooms += room[:FENCE], room[FENCE + size :]
        return room[FENCE : FENCE + size].view(shape)


def fence_new_memory(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Makes a module's torch.empty return memory between fences that hold MARK.  Returns a list that grows by each."""
    fenced = _Fenced()
    monkeypatch.setattr(module, "torch", fenced)
    return fenced.rooms
