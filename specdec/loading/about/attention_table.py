"""The capability table as text, for `specdec doctor --table` and for docs/SETTINGS.md; a test keeps that page equal to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specdec.attention.caches.fp8_latent import FP8_LATENTS
from specdec.attention.capabilities import TABLE
from specdec.attention.capability import KINDS, KV_DTYPES, Capability, Feature, listed, short


def table_rows() -> list[list[str]]:
    """The table as text: a heading, then a line for each need, with a cell for each attention backend."""
    cells: dict[str, Callable[[Capability], str]] = {
        "": lambda c: c.name,
        "keys are read by": lambda c: c.prefix_by,
        "runs on": _machine,
        "needs": _package,
        "computes in": lambda c: ", ".join(short(dtype) for dtype in c.dtypes),
        "head dim": _head_dims,
        "page size": lambda c: str(c.pages),
        **{f"{kind} layers": partial(_kind, kind) for kind in KINDS},
        **_yes(Feature.SOFTCAP, Feature.SINKS, Feature.ALIBI, Feature.ENCODER),
        **{f"{kv} KV": partial(_kv, kv) for kv in KV_DTYPES[1:]},
        **_yes(Feature.INT8_QUERIES),
        Feature.LATENTS.shown: _mla,
        **_yes(Feature.SPARSE),
        Feature.SPLIT_HEADS.shown: _split,
        **_yes(Feature.DIFFERENTIAL, can="KV in the model's own dtype, fp8 or int8"),
        **_yes(Feature.DETERMINISTIC, can="on CUDA 9.x"),  # other conditions come from the products around attention
        **_yes(Feature.TREES),
        "CUDA graphs": _graphs,
        Feature.SHARED_PREFIXES.shown: _shared,
        **_yes(Feature.CONTEXT_PARALLEL),
        "tests passed on": lambda c: c.machine.tested,
    }
    return [[name, *map(cell, TABLE.values())] for name, cell in cells.items()]


def table_as_markdown() -> str:
    """The table in Markdown, as it stands in the README."""
    head, *rows = table_rows()
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _yes(*features: Feature, can: str = "yes") -> dict[str, Callable[[Capability], str]]:
    """A line for each feature.  can: what backends that have it show."""
    return {feature.shown: lambda c, f=feature: can if f in c.features else "no" for feature in features}  # type: ignore[misc]


def _split(c: Capability) -> str:
    kept = ("the model's own dtype", *c.split_kv_cache_dtypes[1:])
    return f"KV in {listed(kept)}" if Feature.SPLIT_HEADS in c.features else "no"


def _machine(c: Capability) -> str:
    if "cpu" in c.machine.devices:
        return "CPU, CUDA"
    return " ".join(("CUDA", ", ".join(f"{major}.x" for major in c.machine.architectures))).strip()


def _package(c: Capability) -> str:
    least = c.machine.min_version
    return (c.machine.package or "nothing") + (f" {'.'.join(map(str, least))}+" if any(least) else "")


def _head_dims(c: Capability) -> str:
    own = str(c.head_dims or "any")
    return f"{own}; with fp8 KV {c.fp8_head_dims}" if c.fp8_head_dims else own


def _kind(kind: str, c: Capability) -> str:
    if kind not in c.kinds:
        return "our kernel"
    if Feature.HEADS not in c.features:
        return "latents; heads by our kernel"
    return "yes" if kind in c.tree_kinds else "yes; under draft trees by our kernel"


def _kv(kv: str, c: Capability) -> str:
    if kv not in c.kv_cache_dtypes:
        return "no"
    return f"on {'.'.join(map(str, c.fp8_from))} and later" if kv.startswith("fp8") and c.fp8_from else "yes"


def _mla(c: Capability) -> str:
    """The cell on latent caches, which are kept in one of two ways."""
    if Feature.LATENTS not in c.features:
        return "no"
    of = "" if c.latents is None else f" of {' + '.join(map(str, c.latents))} numbers"
    limits = "" if Feature.SCORED_LATENTS in c.features else ", without softcap, sinks or ALiBi"
    return f"latents{of} in the model's own dtype or {FP8_LATENTS}{limits}"


def _graphs(c: Capability) -> str:
    return ", ".join(f.shown for f in (Feature.STEP_GRAPHS, Feature.ROUND_GRAPHS) if f in c.features) or "no"


def _shared(c: Capability) -> str:
    if Feature.SHARED_PREFIXES not in c.features:
        return "no"
    if not c.shares:
        return "our kernel"
    return "yes" if c.kinds == KINDS else "yes; what follows them by our kernel"
