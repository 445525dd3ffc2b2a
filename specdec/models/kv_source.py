"""Which layer's keys and values each layer of a target reads: its own, or those of an earlier layer.

A layer that reads another layer's keys and values is said to share them.  It projects queries only, and stores nothing.  This
module knows configs; it knows neither weights nor caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.attention.kinds import LayerKind

KEY = "kv_source"  # of a config.json of the Llama family or DiffLlama; no other library reads it


def parse_kv_source(raw: dict[str, Any], kinds: Sequence[LayerKind], where: str) -> tuple[int, ...]:
    """The config's list of source layers, such as [0, 1, 1, 1], by which layers 2 and 3 read the keys of layer 1.

    kinds: which keys each layer reads.  The result is empty if the config has no such list.
    """
    sources, count = raw.get(KEY), len(kinds)
    if sources is None:
        return ()
    if not isinstance(sources, list) or len(sources) != count or any(type(source) is not int for source in sources):
        raise ValueError(f"{where}: {KEY} must be null or a list of {count} layer numbers, one a layer, got {sources!r}")
    for layer, source in enumerate(sources):
        if not 0 <= source <= layer:
            raise ValueError(f"{where}: {KEY}[{layer}] must be {layer} or the number of an earlier layer, got {source}")
        if sources[source] != source:
            raise ValueError(
                f"{where}: {KEY}[{layer}] must name a layer that stores its own keys and values, got {source}, which reads "
                f"those of layer {sources[source]}; nearest: {sources[source]}"
            )
    check_shared_kinds(kinds, sources, where)
    return tuple(sources)


def check_shared_kinds(kinds: Sequence[LayerKind], sources: Sequence[int], where: str) -> None:
    """ValueError if a layer reads the stored keys of a layer with another window, which may be gone when they are wanted."""
    for layer, source in enumerate(sources):
        if kinds[layer] != kinds[source]:
            raise ValueError(
                f"{where}: layer {layer} ({kinds[layer]}) shares the keys and values of layer {source} ({kinds[source]}); "
                "expected layers of one type and one window"
            )
