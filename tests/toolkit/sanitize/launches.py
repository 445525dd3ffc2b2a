"""A plugin of pytest that writes down which of specdec's kernels a run of tests launches: `-p toolkit.sanitize.launches`.

The file that the environment variable SPECDEC_LAUNCHES names gets a line for each test: its id, then the kernels.  Works on a
GPU and in Triton's interpreter.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
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
    with Path(os.environ["SPECDEC_LAUNCHES"]).open("a") as file:
        print(item.nodeid, *sorted(launched), file=file)
