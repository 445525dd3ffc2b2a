"""A plugin of pytest that writes down which of specdec's kernels a run of tests launches: `-p toolkit.sanitize.launches`.

The file that the environment variable SPECDEC_LAUNCHES names gets a line for each test: its id, then the kernels.  Works on a
GPU and in Triton's interpreter.  Processes that a test starts write lines of their own, if they use `written_down`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

FILE = "SPECDEC_LAUNCHES"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with written_down(item.nodeid):
        yield


@contextmanager
def written_down(name: str) -> Iterator[None]:
    """Writes down which kernels this process launches in the block, if there is a file for it."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launched: set[str] = set()

    def watched(launcher: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            launched.add(self.fn.__name__)
            return launcher(self, *args, **kwargs)

        return run

    with (
        patch.object(JITFunction, "run", watched(JITFunction.run)),
        patch.object(InterpretedFunction, "run", watched(InterpretedFunction.run)),
    ):
        yield
    if FILE in os.environ:
        with Path(os.environ[FILE]).open("a") as file:
            print(name, *sorted(launched), file=file)
