"""The capability table: what each attention backend can do.  `auto`, errors, `specdec doctor` and docs/SETTINGS.md use it.

This module knows what a pair of models needs (`AttentionNeeds`), not which models they are.  It knows backends by what they say
of themselves, in the modules that specdec/options.py lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import NamedTuple

from specdec.attention.caches.fp8_latent import FP8_LATENTS, GROUP
from specdec.attention.caches.int8_keys import INT8_KEYS
from specdec.attention.caches.quant_cache import KV_CACHE_DTYPES
from specdec.attention.capability import Capability, Feature, listed, short
from specdec.attention.flash.rule import MEASURED, MEASURED_HEAD_DIM, why
from specdec.attention.invariant.plan import MAX_WIDTH
from specdec.attention.kinds import LayerKind
from specdec.attention.needs import AttentionNeeds, installed
from specdec.checks import major_minor
from specdec.options import ATTENTION_BACKENDS

INT8_KEPT = ("int8", INT8_KEYS)  # the settings of kv_cache_dtype with keys in int8
PREFERRED = ("triton", "torch", "fa4", "fa3", "fa2")  # the order in which errors suggest a backend that can run; others follow


def table_of(declared: Mapping[str, str]) -> dict[str, Capability]:
    """What backends say of themselves.  declared: by name, "module:name" of each Capability."""
    table = {name: resolve_name(place) for name, place in declared.items()}
    assert all(isinstance(c, Capability) and c.name == name for name, c in table.items()), declared
    return table


Table = Mapping[str, Capability]
TABLE: Table = table_of(ATTENTION_BACKENDS)
BACKENDS = tuple(TABLE)


def kind_name(kind: LayerKind) -> str:
    """The kind's name in KINDS: "full", "window" (which one of skipped keys is too: its queries have first keys) or "chunk"."""
    return "window" if kind.window or kind.skip else "chunk" if kind.chunk else "full"


# ---- why a backend can't be used ----


class Fault(NamedTuple):
    """A need that a backend can't meet.

    problem: what is wrong, as the end of a sentence that starts with the backend's name.
    setting: a setting that removes the fault; None: there is none.
    mended: the needs with that setting.
    """

    problem: str
    setting: str | None = None
    mended: AttentionNeeds | None = None


def faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    """Everything that keeps a backend from answering these needs, the most fundamental fault first."""
    yield from _machine_faults(c, n)
    if n.dtype not in c.dtypes:
        names = " or ".join(short(dtype) for dtype in c.dtypes)
        best = c.dtypes[0]
        yield Fault(f"computes {names}, got {short(n.dtype)}", f"dtype='{short(best)}'", replace(n, dtype=best))
    for dim in (*n.head_dims, *n.value_dims):
        if c.head_dims and not c.head_dims.hold(dim):
            yield Fault(f"takes heads of {c.head_dims}, got {dim}")
        elif n.kv_cache_dtype == "fp8" and c.fp8_head_dims and not c.fp8_head_dims.hold(dim):
            problem = f"takes heads of {c.fp8_head_dims} with fp8 KV, got {dim}"
            yield Fault(problem, "kv_cache_dtype='auto'", replace(n, kv_cache_dtype="auto"))
    if unread := c.pages.fault(n.page_size):
        reads, fits = unread
        yield Fault(f"{reads}, got page_size={n.page_size}", f"page_size={fits}", replace(n, page_size=fits))
    asked = dict.fromkeys(map(kind_name, n.kinds))
    if not set(asked) & set(c.kinds) and not n.latents:
        yield Fault(f"reads {', '.join(c.kinds)} layers, and these models have {' and '.join(asked)} layers only")
    yield from _kv_faults(c, n)
    for latents in dict.fromkeys((*([n.latents] if n.latents else []), *n.draft_latents)):
        if not c.latents or latents == c.latents:
            continue
        takes, got = (" + ".join(map(str, dims)) for dims in (c.latents, latents))
        yield Fault(f"reads latents of {takes} numbers, got {got}")
    missing = n.asked - c.features
    yield from _split_faults(c, n, missing)  # before int8 queries, which its nearest setting switches off too
    yield from _query_faults(n, missing)
    yield from _deterministic_faults(n, missing)
    for feature in Feature:
        if feature in missing:
            problem = feature.refusal.format(values=listed(n.value_dims)) if n.value_dims else feature.refusal
            yield Fault(problem, feature.setting, n.without(feature) if feature.setting else None)


def _machine_faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    _, package, min_version, architectures, devices = c.machine
    if n.device.type not in devices:
        yield Fault(f"needs a CUDA device, got {n.device}")
    elif architectures and n.architecture and n.architecture[0] not in architectures:
        majors = ", ".join(f"{major}.x" for major in architectures)
        yield Fault(f"needs a GPU of compute capability {majors}, got {'.'.join(map(str, n.architecture))}")
    if package is not None:
        found, wanted = installed(package), ".".join(map(str, min_version))
        if found is None:
            yield Fault(f"needs the package {package}, which is not installed")
        elif major_minor(found) < min_version:
            yield Fault(f"needs {package} {wanted} or later, got {found}")


def _split_faults(c: Capability, n: AttentionNeeds, missing: frozenset[Feature]) -> Iterator[Fault]:
    """How values that are not as wide as their keys can't be kept."""
    kept = n.kv_cache_dtype
    if not n.value_dims or kept == "auto" or missing & {Feature.SPLIT_HEADS, Feature.DIFFERENTIAL}:
        return
    if Feature.SPLIT_HEADS in n.asked:
        own = " or as ".join(("the model's own dtype", *c.split_kv_cache_dtypes[1:]))
        problem = f"reads values that are not as wide as their keys in {own}, got kv_cache_dtype={kept!r}"
        if kept not in c.split_kv_cache_dtypes:
            yield Fault(problem, *_kept_as(n, "auto"))
    elif kept not in KV_CACHE_DTYPES:  # a pair's two keys must lie side by side
        own = f"the model's own dtype or as {' or '.join(KV_CACHE_DTYPES)}"
        yield Fault(f"reads differential attention in {own}, got kv_cache_dtype={kept!r}", *_kept_as(n, "int8"))


def _query_faults(n: AttentionNeeds, missing: frozenset[Feature]) -> Iterator[Fault]:
    """Beside which keys queries can't be rounded to int8."""
    if Feature.INT8_QUERIES in n.features - missing and n.kv_cache_dtype not in INT8_KEPT:
        problem = (
            f"rounds queries to int8 where keys are in int8, got int8_queries=True with kv_cache_dtype={n.kv_cache_dtype!r}"
        )
        without = "int8_queries=False", n.without(Feature.INT8_QUERIES)
        yield Fault(problem, *(without if n.latents or n.value_dims else _kept_as(n, INT8_KEYS)))


def _deterministic_faults(n: AttentionNeeds, missing: frozenset[Feature]) -> Iterator[Fault]:
    """Which heads can't be added up in one order."""
    if Feature.DETERMINISTIC not in n.features - missing:
        return
    without = "deterministic=False", n.without(Feature.DETERMINISTIC)
    if (widest := max((*n.head_dims, *n.value_dims), default=0)) > MAX_WIDTH:
        yield Fault(f"adds up heads of at most {MAX_WIDTH} in one order, got deterministic=True with {widest}", *without)
    if Feature.SPLIT_HEADS in n.asked:
        yield Fault("adds up values that are as wide as their keys in one order, got deterministic=True", *without)


def _kept_as(n: AttentionNeeds, kv_cache_dtype: str) -> tuple[str, AttentionNeeds]:
    """A setting of kv_cache_dtype, with int8_queries if that has to change with it, and the needs with both."""
    mended = replace(n, kv_cache_dtype=kv_cache_dtype)
    if Feature.INT8_QUERIES in n.features and kv_cache_dtype not in INT8_KEPT:
        return f"kv_cache_dtype={kv_cache_dtype!r} with int8_queries=False", mended.without(Feature.INT8_QUERIES)
    return f"kv_cache_dtype={kv_cache_dtype!r}", mended


def _kv_faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    """Faults of how keys and values, or latents, are to be kept."""

    def fault(problem: str, nearest: str) -> Fault:
        return Fault(f"{problem}, got {got}", *_kept_as(n, nearest))

    kept, got = n.kv_cache_dtype, f"kv_cache_dtype={n.kv_cache_dtype!r}"
    is_too_old = c.fp8_from is not None and n.architecture is not None and n.architecture < c.fp8_from
    if kept not in c.kv_cache_dtypes:
        kinds = "" if c.kv_cache_dtypes == ("auto",) else f" or as {' or '.join(c.kv_cache_dtypes[1:])}"
        yield fault(f"reads KV in the models' own dtype{kinds}", "auto")
    elif kept == FP8_LATENTS and not n.latents:
        nearest = "auto" if n.value_dims else "int8" if is_too_old else "fp8"
        yield fault(f"keeps latents (MLA) as {FP8_LATENTS}, which these models have none of", nearest)
    elif n.latents and kept in (*KV_CACHE_DTYPES, INT8_KEYS):
        nearest = "auto" if is_too_old or n.latents[0] % GROUP else FP8_LATENTS
        yield fault(f"keeps latents (MLA) in the model's own dtype or as {FP8_LATENTS}", nearest)
    elif n.latents and kept == FP8_LATENTS and (ranks := [own[0] for own in (n.latents, *n.draft_latents) if own[0] % GROUP]):
        yield fault(f"keeps latents of a multiple of {GROUP} numbers as {FP8_LATENTS}, these have {ranks[0]}", "auto")
    elif kept in ("fp8", FP8_LATENTS) and is_too_old:
        wanted, got = (".".join(map(str, numbers)) for numbers in (c.fp8_from or (), n.architecture or ()))
        yield fault(f"reads {kept} KV on GPUs of compute capability {wanted} or later", "int8" if kept == "fp8" else "auto")


def why_not(name: str, needs: AttentionNeeds, table: Table = TABLE) -> str:
    """Why this backend can't answer these needs, with the nearest setting that works; the empty string if it can."""
    if name not in table:
        known = ", ".join(("auto", *table))
        return f"attention must be one of {known}; got {name!r}; nearest setting that works: 'auto'"
    if not (fault := _first_fault(name, needs, table)):
        return ""
    return f"attention={name!r} {fault.problem}; nearest setting that works: {_nearest(name, needs, fault, table)}"


def problem_of(name: str, needs: AttentionNeeds, table: Table = TABLE) -> str:
    """Why this backend can't answer these needs, for a text that asks for no other setting; the empty string if it can."""
    return fault.problem if (fault := _first_fault(name, needs, table)) else ""


def _first_fault(name: str, needs: AttentionNeeds, table: Table) -> Fault | None:
    return next(faults(table[name], needs), None)


def _nearest(name: str, needs: AttentionNeeds, fault: Fault, table: Table) -> str:
    """The nearest settings that work.  Each was checked against the table and is enough by itself, except where "with" joins
    two.
    """
    ways = [fault.setting] if fault.mended and not _first_fault(name, fault.mended, table) else []
    others = [other for other in dict.fromkeys((*PREFERRED, *table)) if other != name and other in table]
    works = next((other for other in others if not _first_fault(other, needs, table)), None)
    if works:
        return " or ".join(filter(None, [*ways, f"attention={works!r}"]))
    if not ways:  # two settings have to change
        for other in others:
            second = _first_fault(other, needs, table)
            if second and second.mended and not _first_fault(other, second.mended, table):
                return f"attention={other!r} with {second.setting}"
    assert ways, f"nothing answers {needs}"
    return " or ".join(filter(None, ways))


# ---- choosing a backend ----


class BackendChoice(NamedTuple):
    """name: one of BACKENDS.  reason: why it was chosen.  by_rule: it reads where it measured faster, the Triton kernels
    elsewhere.
    """

    name: str
    reason: str
    by_rule: bool = False


def choose_backend(name: str, needs: AttentionNeeds, table: Table = TABLE) -> BackendChoice:
    """Resolves `auto`, or checks a backend that was named against the needs.

    Raises TypeError if the name is no string, and ValueError with the nearest setting that works if the backend can't answer
    the needs.
    """
    if not isinstance(name, str):
        raise TypeError(f"attention must be a str, auto or {' or '.join(table)}, got {name!r} of type {type(name).__name__}")
    if name != "auto":
        if reason := why_not(name, needs, table):
            raise ValueError(reason)
        return BackendChoice(name, "asked for by name")
    if problem := problem_of("triton", needs, table):
        if not_torch := why_not("torch", needs, table):
            raise ValueError(not_torch)
        return BackendChoice("torch", f"triton {problem}")
    library = MEASURED.get(needs.gpu) if needs.kv_cache_dtype == "auto" else None  # no rule was measured over 8-bit caches
    if library and not why_not(library, needs, table) and set(needs.head_dims) == {MEASURED_HEAD_DIM}:
        if reason := why(needs.gpu, needs.largest, Feature.TREES in needs.features):
            return BackendChoice(library, reason, by_rule=True)
    return BackendChoice("triton", "CUDA device and triton installed")
