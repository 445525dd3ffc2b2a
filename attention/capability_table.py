"""The capability table as text, for `specdec doctor --table` and for docs/SETTINGS.md; a test keeps that page equal to it."""

from __future__ import annotations

from specdec.attention.caches.fp8_latent import FP8_LATENTS
from specdec.attention.capabilities import BACKENDS, KINDS, KV_DTYPES, TABLE, Capability, listed, short


def table_rows() -> list[list[str]]:
    """The table as text: a heading, then a line for each need, with a cell for each attention backend."""
    cs = list(TABLE.values())
    lines: dict[str, list[str]] = {
        "keys are read by": [c.prefix_by for c in cs],
        "runs on": [_machine(c) for c in cs],
        "needs": [_package(c) for c in cs],
        "computes in": [", ".join(short(dtype) for dtype in c.dtypes) for c in cs],
        "head dim": [_head_dims(c) for c in cs],
        "page size": [_pages(c) for c in cs],
        **{f"{kind} layers": [_kind(c, kind) for c in cs] for kind in KINDS},
        "softcap": [_yes(c.softcap) for c in cs],
        "sinks": [_yes(c.sinks) for c in cs],
        "ALiBi": [_yes(c.alibi) for c in cs],
        "encoder and cross attention": [_yes(c.encoder) for c in cs],
        **{f"{kv} KV": [_kv(c, kv) for c in cs] for kv in KV_DTYPES[1:]},
        "int8 queries": [_yes(c.int8_queries) for c in cs],
        "MLA": [_mla(c) for c in cs],
        "sparse MLA": [_yes(c.sparse) for c in cs],
        "different key and value widths": [_split(c) for c in cs],
        "differential attention": [_split(c) for c in cs],
        "deterministic": [_deterministic(c) for c in cs],
        "draft trees": [_yes(c.tree) for c in cs],
        "CUDA graphs": [", ".join(str(mode) for mode in c.graphs if mode) or "no" for c in cs],
        "shared prefixes": ["our kernel" if c.shared_prefixes and c.ours else _yes(c.shared_prefixes) for c in cs],
        "decode context parallelism": [_yes(c.divided) for c in cs],
        "tests passed on": [c.run_on for c in cs],
    }
    return [["", *BACKENDS], *([name, *cells] for name, cells in lines.items())]


def table_as_markdown() -> str:
    """The table in Markdown, as it stands in the README."""
    head, *rows = table_rows()
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _machine(c: Capability) -> str:
    if "cpu" in c.devices:
        return "CPU, CUDA"
    return "CUDA" + (" " + ", ".join(f"{major}.x" for major in c.architectures) if c.architectures else "")


def _package(c: Capability) -> str:
    if c.package is None:
        return "nothing"
    return c.package + (f" {'.'.join(map(str, c.least_version))}+" if any(c.least_version) else "")


def _head_dims(c: Capability) -> str:
    own = str(c.head_dims or "any")
    return f"{own}; with fp8 KV {c.fp8_head_dims}" if c.fp8_head_dims else own


def _pages(c: Capability) -> str:
    if c.page_sizes:
        return listed(c.page_sizes)
    if c.unread_pages:
        return f"any but {listed(c.unread_pages)}"
    return "any" if c.page_multiple == 1 else f"multiples of {c.page_multiple}"


def _kind(c: Capability, kind: str) -> str:
    if kind in c.kinds:
        return "yes" if c.heads else "latents; heads by our kernel"
    return "our kernel" if kind in c.ours else "no"


def _kv(c: Capability, kv: str) -> str:
    if kv.startswith("fp8") and kv in c.kv_cache_dtypes and c.fp8_from:
        return f"on {'.'.join(map(str, c.fp8_from))} and later"
    return _yes(kv in c.kv_cache_dtypes)


def _mla(c: Capability) -> str:
    """The cell on latent caches, which are kept in one of two ways."""
    of = "" if c.latent_dims is None else f" of {' + '.join(map(str, c.latent_dims))} numbers"
    own = f"latents{of} in the model's own dtype or {FP8_LATENTS}"
    return {"any scoring": own, "plain": f"{own}, without softcap, sinks or ALiBi", "": "no"}[c.mla]


def _split(c: Capability) -> str:
    """The cell on values that are not as wide as their keys.  No backend reads them in 8 bits."""
    return "KV in the model's own dtype" if c.split_heads else "no"


def _deterministic(c: Capability) -> str:
    """The cell on results that don't depend on the batch: other conditions come from the products around attention."""
    return "on CUDA 9.x" if c.deterministic else "no"


def _yes(can: bool) -> str:
    return "yes" if can else "no"
