"""specdec: speculative decoding with EAGLE heads.

Imports nothing until a name is used, so that `import specdec` is instant and needs no GPU, triton or flash-attn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec.async_decoder import AsyncSpecDecoder
    from specdec.config import SamplingParams, SpecConfig
    from specdec.decoder import SpecDecoder
    from specdec.generation import Chunk, Generation, Stats, TokenLogprob
    from specdec.lossless.verification import Verification
    from specdec.options import EngineOptions

__version__ = "0.1.0"
__all__ = [
    "AsyncSpecDecoder",
    "Chunk",
    "EngineOptions",
    "Generation",
    "SamplingParams",
    "SpecConfig",
    "SpecDecoder",
    "Stats",
    "TokenLogprob",
    "Verification",
]

_HOMES = {
    "AsyncSpecDecoder": "specdec.async_decoder",
    "SpecDecoder": "specdec.decoder",
    "SpecConfig": "specdec.config",
    "SamplingParams": "specdec.config",
    "EngineOptions": "specdec.options",
    "Chunk": "specdec.generation",
    "Generation": "specdec.generation",
    "Stats": "specdec.generation",
    "TokenLogprob": "specdec.generation",
    "Verification": "specdec.lossless.verification",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    import sys
    from importlib import import_module

    from specdec.startup import without_collections

    home = _HOMES[name]
    if home in sys.modules:  # the collector looks through all objects of the process: once is enough
        return getattr(import_module(home), name)
    with without_collections():
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
