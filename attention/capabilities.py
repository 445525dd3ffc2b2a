"""The capability table: what each attention backend can do.  `auto`, errors, `specdec doctor` and docs/SETTINGS.md use it.

This module knows what a pair of models needs (`AttentionNeeds`), not which models they are.  It imports no attention backend
and no backend's library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from specdec.attention.caches.fp8_latent import FP8_LATENTS, GROUP
from specdec.attention.caches.int8_keys import INT8_KEYS
from specdec.attention.caches.quant_cache import FP8_LEAST_ARCHITECTURE, KV_CACHE_DTYPES
from specdec.attention.flash.rule import MEASURED, MEASURED_HEAD_DIM, Reads, why
from specdec.attention.kinds import LayerKind
from specdec.attention.needs import AttentionNeeds, installed
from specdec.checks import major_minor
from specdec.config import GraphMode

KINDS = ("full", "window", "chunk")
KV_DTYPES = ("auto", *KV_CACHE_DTYPES, INT8_KEYS, FP8_LATENTS)
INT8_KEPT = ("int8", INT8_KEYS)  # the settings of kv_cache_dtype with keys in int8
GRAPH_MODES: tuple[GraphMode, ...] = (False, "step", "round")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


class HeadDims(NamedTuple):
    """The head dims that an attention backend takes: `least` to `most`, in multiples of `multiple`."""

    least: int
    most: int
    multiple: int

    def hold(self, dim: int) -> bool:
        """Whether the head dim is one of them."""
        return self.least <= dim <= self.most and dim % self.multiple == 0

    def __str__(self) -> str:
        return f"{self.least} to {self.most}, multiples of {self.multiple}"


@dataclass(frozen=True)
class Capability:
    """One attention backend and its limits.

    prefix_by: what reads the prefix, as shown in the table of capabilities.
    run_on: the hardware on which this backend's own tests have passed.
    devices: device types.
    package, least_version: the package that must be installed, and its lowest version.
    architectures: the major numbers of the GPU's compute capability that work; empty: any.
    dtypes: the dtypes in which it computes.
    head_dims: the head dims that it takes; None: any.
    page_sizes: the page sizes that it takes; empty: any, as far as page_multiple and unread_pages let it.
    fp8_head_dims: those that it takes with keys and values in fp8; None: the same.
    page_multiple: page sizes must be a multiple of this.
    unread_pages: page sizes that it can't use, because at these sizes it also reads the unwritten slots of a page, which may
        hold NaN.
    kinds: the kinds of layers that its own kernel reads.
    ours: the kinds of layers that specdec's Triton kernels read in its place.  Where this is not empty, they read shared
        prefixes too.
    kv_cache_dtypes: the settings of kv_cache_dtype that it takes.
    int8_queries: whether it multiplies keys in int8 with queries in int8.
    fp8_from: the lowest compute capability for float8, in KV or latents.
    heads: whether it reads ordinary heads; if not, specdec's Triton kernels read those of a draft head.
    latent_dims: the rank and the rotated dim of the latents that it takes; None: any.
    mla: whether it reads latent caches: with any scoring, only without softcap and sinks ("plain"), or not at all ("").
    sparse: whether it reads latents that an indexer chose for each query.
    alibi, encoder: whether it adds ALiBi's slopes times distances, and computes an encoder's attention and a decoder's to it.
    split_heads: whether it reads keys and values of different width, and differential attention, whose values are as wide as
        two keys.  No backend reads these in 8 bits.
    deterministic: whether a query's result can be had in one order of sums, whatever is computed beside it.
    tree, graphs: whether it answers branching trees, and which modes of cuda_graphs it allows.
    shared_prefixes, divided: whether it reads shared prefixes, and sequences that several ranks divide among them.
    """

    name: str
    prefix_by: str
    run_on: str
    devices: tuple[str, ...] = ("cuda",)
    package: str | None = None
    least_version: tuple[int, int] = (0, 0)
    architectures: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = HALVES
    head_dims: HeadDims | None = None
    page_sizes: tuple[int, ...] = ()
    fp8_head_dims: HeadDims | None = None
    page_multiple: int = 1
    unread_pages: tuple[int, ...] = ()
    kinds: tuple[str, ...] = KINDS
    ours: tuple[str, ...] = ()
    softcap: bool = True
    sinks: bool = True
    alibi: bool = False
    encoder: bool = False
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    int8_queries: bool = False
    fp8_from: tuple[int, int] | None = None
    heads: bool = True
    latent_dims: tuple[int, int] | None = None
    mla: Literal["any scoring", "plain", ""] = ""
    sparse: bool = False
    split_heads: bool = False
    deterministic: bool = False
    tree: bool = True
    graphs: tuple[GraphMode, ...] = GRAPH_MODES
    shared_prefixes: bool = True
    divided: bool = False


TABLE = {
    c.name: c
    for c in (
        Capability(
            "torch", "gathered keys, a mask", "CPU, H100, H200", ("cpu", "cuda"), dtypes=FLOATS, kv_cache_dtypes=KV_DTYPES,
            int8_queries=True, mla="any scoring", sparse=True, split_heads=True, alibi=True, encoder=True, divided=True,
        ),
        Capability(
            "triton", "our kernels", "H100, H200", package="triton", dtypes=FLOATS[1:], head_dims=HeadDims(8, 256, 2),
            kv_cache_dtypes=KV_DTYPES, int8_queries=True, fp8_from=FP8_LEAST_ARCHITECTURE, mla="plain", sparse=True,
            split_heads=True, alibi=True, encoder=True, divided=True, deterministic=True,
        ),
        Capability(
            "fa2", "flash_attn", "H200", package="flash-attn", least_version=(2, 8), architectures=(8, 9, 10, 12),
            head_dims=HeadDims(8, 256, 8), page_multiple=256, kinds=("full",), ours=("window", "chunk"),
        ),
        Capability(
            "fa3", "flash_attn_interface", "H200", package="flash-attn-3", least_version=(3, 0), architectures=(9,),
            head_dims=HeadDims(8, 256, 8), fp8_head_dims=HeadDims(16, 256, 16), kinds=("full",), ours=("window", "chunk"),
            kv_cache_dtypes=("auto", "fp8"),
        ),
        Capability(
            "fa4", "flash_attn.cute", "H100", package="flash-attn-4", least_version=(4, 0), architectures=(9,),
            head_dims=HeadDims(8, 256, 8), unread_pages=(80, 112, 128, 144), kinds=("full",), ours=("window", "chunk"),
        ),
        Capability(
            "flashmla", "flash_mla", "H200", package="flash_mla", architectures=(9,), head_dims=HeadDims(8, 256, 2),
            page_sizes=(64,), kinds=("full",), ours=("window", "chunk"), kv_cache_dtypes=("auto", FP8_LATENTS),
            fp8_from=FP8_LEAST_ARCHITECTURE, heads=False, latent_dims=(512, 64), mla="plain", sparse=True,
        ),
    )
}  # fmt: skip
BACKENDS = tuple(TABLE)
PREFERRED = ("triton", "torch", "fa4", "fa3", "fa2", "flashmla")  # the order in which errors suggest a backend that can run


def kind_name(kind: LayerKind) -> str:
    """The kind's name in KINDS: "full", "window" (which one of skipped keys is too: its queries have first keys) or "chunk"."""
    return "window" if kind.window or kind.skip else "chunk" if kind.chunk else "full"


def short(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def listed(numbers: tuple[int, ...]) -> str:
    """Numbers as text: 1, 2 or 3."""
    return str(numbers[0]) if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


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
    if n.page_size in c.unread_pages:
        problem = f"reads pages of {listed(c.unread_pages)} tokens whole, unwritten slots included, got page_size={n.page_size}"
        yield Fault(problem, "page_size=64", replace(n, page_size=64))
    if c.page_sizes and n.page_size not in c.page_sizes:
        problem, fits = f"reads pages of {listed(c.page_sizes)} tokens, got page_size={n.page_size}", c.page_sizes[0]
        yield Fault(problem, f"page_size={fits}", replace(n, page_size=fits))
    if n.page_size % c.page_multiple:
        fits = -(-n.page_size // c.page_multiple) * c.page_multiple
        problem = f"reads pages of a multiple of {c.page_multiple} tokens, got page_size={n.page_size}"
        yield Fault(problem, f"page_size={fits}", replace(n, page_size=fits))
    asked = dict.fromkeys(map(kind_name, n.kinds))
    if not set(asked) & set(c.kinds) and not n.mla:
        yield Fault(f"reads {', '.join(c.kinds)} layers, and these models have {' and '.join(asked)} layers only")
    yield from _kv_faults(c, n)
    if not n.mla and not c.heads:
        yield Fault("reads latents (MLA), which these models have none of")
    if n.mla and c.latent_dims and (n.latent_rank, n.rope_dim) != c.latent_dims:
        takes, got = (" + ".join(map(str, dims)) for dims in (c.latent_dims, (n.latent_rank, n.rope_dim)))
        yield Fault(f"reads latents of {takes} numbers, got {got}")
    yield from _split_faults(c, n)  # before int8 queries, which its nearest setting switches off too
    yield from _query_faults(c, n)
    if n.mla and not c.mla:
        yield Fault("does not read MLA's latent cache")
    if n.sparse and not c.sparse:
        yield Fault("does not read latents that an indexer chose")
    if n.mla and c.mla == "plain" and (n.softcap or n.sinks or n.alibi):
        yield Fault("reads MLA's latent cache without softcap, sinks or ALiBi, which these models use")
    yield from _plan_faults(c, n)


def _split_faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    """What keeps a backend from values that are not as wide as their keys."""
    if not n.value_dims:
        return
    what = "differential attention" if n.differential else "values that are not as wide as their keys"
    if not c.split_heads:
        yield Fault(f"does not read {what}, got values of {listed(n.value_dims)}")
    if n.kv_cache_dtype != "auto":
        problem = f"reads {what} in the model's own dtype, got kv_cache_dtype={n.kv_cache_dtype!r}"
        yield Fault(problem, *_kept_as(n, "auto"))


def _machine_faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    if n.device.type not in c.devices:
        yield Fault(f"needs a CUDA device, got {n.device}")
    elif c.architectures and n.architecture and n.architecture[0] not in c.architectures:
        majors = ", ".join(f"{major}.x" for major in c.architectures)
        yield Fault(f"needs a GPU of compute capability {majors}, got {'.'.join(map(str, n.architecture))}")
    if c.package is not None:
        found, wanted = installed(c.package), ".".join(map(str, c.least_version))
        if found is None:
            yield Fault(f"needs the package {c.package}, which is not installed")
        elif major_minor(found) < c.least_version:
            yield Fault(f"needs {c.package} {wanted} or later, got {found}")


def _kept_as(n: AttentionNeeds, kv_cache_dtype: str) -> tuple[str, AttentionNeeds]:
    """A setting of kv_cache_dtype, with int8_queries if that has to change with it, and the needs with both."""
    mended = replace(n, kv_cache_dtype=kv_cache_dtype)
    if n.int8_queries and kv_cache_dtype not in INT8_KEPT:
        return f"kv_cache_dtype={kv_cache_dtype!r} with int8_queries=False", replace(mended, int8_queries=False)
    return f"kv_cache_dtype={kv_cache_dtype!r}", mended


def _query_faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    """What keeps a backend from queries in int8."""
    if not n.int8_queries:
        return
    without = "int8_queries=False", replace(n, int8_queries=False)
    if not c.int8_queries:
        yield Fault("multiplies queries in the models' own dtype, got int8_queries=True", *without)
    elif n.kv_cache_dtype not in INT8_KEPT:
        problem = (
            f"rounds queries to int8 where keys are in int8, got int8_queries=True with kv_cache_dtype={n.kv_cache_dtype!r}"
        )
        yield Fault(problem, *(without if n.mla or n.value_dims else _kept_as(n, INT8_KEYS)))


def _kv_faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    """Faults of how keys and values, or latents, are to be kept."""

    def fault(problem: str, nearest: str) -> Fault:
        return Fault(f"{problem}, got {got}", *_kept_as(n, nearest))

    kept, got = n.kv_cache_dtype, f"kv_cache_dtype={n.kv_cache_dtype!r}"
    is_too_old = c.fp8_from is not None and n.architecture is not None and n.architecture < c.fp8_from
    if kept not in c.kv_cache_dtypes:
        kinds = "" if c.kv_cache_dtypes == ("auto",) else f" or as {' or '.join(c.kv_cache_dtypes[1:])}"
        yield fault(f"reads KV in the models' own dtype{kinds}", "auto")
    elif kept == FP8_LATENTS and not n.mla:
        nearest = "auto" if n.value_dims else "int8" if is_too_old else "fp8"
        yield fault(f"keeps latents (MLA) as {FP8_LATENTS}, which these models have none of", nearest)
    elif n.mla and kept in (*KV_CACHE_DTYPES, INT8_KEYS):
        nearest = "auto" if is_too_old or n.latent_rank % GROUP else FP8_LATENTS
        yield fault(f"keeps latents (MLA) in the model's own dtype or as {FP8_LATENTS}", nearest)
    elif kept == FP8_LATENTS and n.latent_rank % GROUP:
        yield fault(f"keeps latents of a multiple of {GROUP} numbers as {FP8_LATENTS}, these have {n.latent_rank}", "auto")
    elif kept in ("fp8", FP8_LATENTS) and is_too_old:
        wanted, got = (".".join(map(str, numbers)) for numbers in (c.fp8_from or (), n.architecture or ()))
        yield fault(f"reads {kept} KV on GPUs of compute capability {wanted} or later", "int8" if kept == "fp8" else "auto")


def _plan_faults(c: Capability, n: AttentionNeeds) -> Iterator[Fault]:
    """Limits that no backend in the table has today; a new backend may have them."""
    for what, wanted, has in (
        ("softcap", n.softcap, c.softcap), ("attention sinks", n.sinks, c.sinks), ("ALiBi", n.alibi, c.alibi),
        ("encoder attention or cross attention", n.encoder, c.encoder),
    ):  # fmt: skip
        if wanted and not has:
            yield Fault(f"has no {what}, which these models use")
    if n.deterministic and not c.deterministic:
        problem = "adds up a query's keys in an order that depends on the batch, got deterministic=True"
        yield Fault(problem, "deterministic=False", replace(n, deterministic=False))
    if n.tree and not c.tree:
        yield Fault("answers chains only", "topk=1", replace(n, tree=False))
    if n.graphs not in c.graphs:
        yield Fault(f"can't be captured with cuda_graphs={n.graphs!r}", "cuda_graphs=False", replace(n, graphs=False))
    if n.divided and not c.divided:
        yield Fault("reads whole sequences only", "decode_context_parallel_size=1", replace(n, divided=False))
    if n.shared_prefixes and not c.shared_prefixes:
        yield Fault("does not share prefixes", "prefix_caching=False", replace(n, shared_prefixes=False))


def why_not(name: str, needs: AttentionNeeds) -> str:
    """Why this backend can't answer these needs, with the nearest setting that works; the empty string if it can."""
    if name not in TABLE:
        known = ", ".join(("auto", *BACKENDS))
        return f"attention must be one of {known}; got {name!r}; nearest setting that works: 'auto'"
    fault = _first_fault(name, needs)
    return f"attention={name!r} {fault.problem}; nearest setting that works: {_nearest(name, needs, fault)}" if fault else ""


def problem_of(name: str, needs: AttentionNeeds) -> str:
    """Why this backend can't answer these needs, for a text that asks for no other setting; the empty string if it can."""
    return fault.problem if (fault := _first_fault(name, needs)) else ""


def _first_fault(name: str, needs: AttentionNeeds) -> Fault | None:
    return next(faults(TABLE[name], needs), None)


def _nearest(name: str, needs: AttentionNeeds, fault: Fault) -> str:
    """The nearest settings that work.  Each was checked against the table and is enough by itself, except where "with" joins
    two.
    """
    ways = [fault.setting] if fault.mended and not _first_fault(name, fault.mended) else []
    others = [other for other in PREFERRED if other != name]
    works = next((other for other in others if not _first_fault(other, needs)), None)
    if works:
        return " or ".join(filter(None, [*ways, f"attention={works!r}"]))
    if not ways:  # two settings have to change
        for other in others:
            second = _first_fault(other, needs)
            if second and second.mended and not _first_fault(other, second.mended):
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


def choose_backend(name: str, needs: AttentionNeeds) -> BackendChoice:
    """Resolves `auto`, or checks a backend that was named against the needs.

    Raises TypeError if the name is no string, and ValueError with the nearest setting that works if the backend can't answer
    the needs.
    """
    if not isinstance(name, str):
        raise TypeError(f"attention must be a str, auto or {' or '.join(BACKENDS)}, got {name!r} of type {type(name).__name__}")
    if name != "auto":
        if reason := why_not(name, needs):
            raise ValueError(reason)
        return BackendChoice(name, "asked for by name")
    if problem := problem_of("triton", needs):
        if not_torch := why_not("torch", needs):
            raise ValueError(not_torch)
        return BackendChoice("torch", f"triton {problem}")
    library = MEASURED.get(needs.gpu) if needs.kv_cache_dtype == "auto" else None  # no rule was measured over 8-bit caches
    if library and not why_not(library, needs) and set(needs.head_dims) == {MEASURED_HEAD_DIM}:
        if reason := why(needs.gpu, Reads(needs.rows, needs.kv_heads, needs.packed, needs.tokens), needs.tree):
            return BackendChoice(library, reason, by_rule=True)
    return BackendChoice("triton", "CUDA device and triton installed")
