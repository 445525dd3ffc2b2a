"""What an attention backend says of itself, and the words in which models and settings ask for it.

A backend declares a `Capability` in its own folder, and `specdec/options.py` lists it.  This file knows no backend, and
declarations import neither a kernel nor a library: what a backend is made of is imported by its `make`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from specdec.attention.caches.fp8_latent import FP8_LATENTS
from specdec.attention.caches.int8_keys import INT8_KEYS
from specdec.attention.caches.quant_cache import KV_CACHE_DTYPES
from specdec.config import GraphMode

if TYPE_CHECKING:
    from specdec.attention.backend import Backend

KINDS = ("full", "window", "chunk")
KV_DTYPES = ("auto", *KV_CACHE_DTYPES, INT8_KEYS, FP8_LATENTS)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)


class Feature(Enum):
    """What models or settings can need, and a backend can do or can't.  Where several are missing, the first one is said.

    shown: its name in the table of capabilities.
    refusal: what is wrong with a backend without it, as the end of a sentence that starts with the backend's name.
    setting: the setting with which it isn't needed; None: models need it.
    """

    HEADS = "heads", "reads latents (MLA), which these models have none of"
    SPLIT_HEADS = (
        "different key and value widths", "does not read values that are not as wide as their keys, got values of {values}",
    )  # fmt: skip
    DIFFERENTIAL = "differential attention", "does not read differential attention, got values of {values}"
    INT8_QUERIES = (  # queries in int8 times keys in int8
        "int8 queries", "multiplies queries in the models' own dtype, got int8_queries=True", "int8_queries=False",
    )  # fmt: skip
    LATENTS = "MLA", "does not read MLA's latent cache"
    SPARSE = "sparse MLA", "does not read latents that an indexer selected"
    SCORED_LATENTS = (
        "MLA with scoring", "reads MLA's latent cache without softcap, sinks or ALiBi, which these models use",
    )  # fmt: skip
    SOFTCAP = "softcap", "has no softcap, which these models use"
    SINKS = "sinks", "has no attention sinks, which these models use"
    ALIBI = "ALiBi", "has no ALiBi, which these models use"
    ENCODER = "encoder and cross attention", "has no encoder attention or cross attention, which these models use"
    DETERMINISTIC = (  # a query's result in one order of sums, whatever is computed beside it
        "deterministic", "adds up a query's keys in an order that depends on the batch, got deterministic=True",
        "deterministic=False",
    )  # fmt: skip
    TREES = "draft trees", "answers chains only", "topk=1"  # that branch
    STEP_GRAPHS = "step", "can't be captured with cuda_graphs='step'", "cuda_graphs=False"
    ROUND_GRAPHS = "round", "can't be captured with cuda_graphs='round'", "cuda_graphs=False"
    CONTEXT_PARALLEL = "decode context parallelism", "reads whole sequences only", "decode_context_parallel_size=1"
    SHARED_PREFIXES = "shared prefixes", "does not share prefixes", "prefix_caching=False"

    def __init__(self, shown: str, refusal: str, setting: str | None = None) -> None:
        self.shown, self.refusal, self.setting = shown, refusal, setting


GRAPHS: dict[GraphMode, frozenset[Feature]] = {  # what each setting of cuda_graphs needs
    False: frozenset(),
    "step": frozenset({Feature.STEP_GRAPHS}),
    "round": frozenset({Feature.ROUND_GRAPHS}),
}
SCORINGS = frozenset({Feature.SOFTCAP, Feature.SINKS, Feature.ALIBI})
USUAL = frozenset(  # what every backend of ordinary heads does today
    {
        Feature.HEADS, Feature.SOFTCAP, Feature.SINKS, Feature.TREES, Feature.STEP_GRAPHS, Feature.ROUND_GRAPHS,
        Feature.SHARED_PREFIXES,
    }
)  # fmt: skip


class Requirements(NamedTuple):
    """What a backend requires of the machine.

    tested: the hardware on which this backend's own tests have passed.
    package, min_version: the package that must be installed, and its lowest version.
    architectures: the major numbers of the GPU's compute capability that work; empty: any.
    devices: device types.
    """

    tested: str
    package: str | None = None
    min_version: tuple[int, int] = (0, 0)
    architectures: tuple[int, ...] = ()
    devices: tuple[str, ...] = ("cuda",)


class HeadDims(NamedTuple):
    """The head dims that an attention backend takes: `low` to `high`, in multiples of `multiple`."""

    low: int
    high: int
    multiple: int

    def hold(self, dim: int) -> bool:
        """Whether the head dim is one of them."""
        return self.low <= dim <= self.high and dim % self.multiple == 0

    def __str__(self) -> str:
        return f"{self.low} to {self.high}, multiples of {self.multiple}"


class PageSizes(NamedTuple):
    """The page sizes that an attention backend takes, by one of three rules; none: any.

    only: these alone.  multiple: its multiples.
    unread: any but these, because at these sizes it also reads the unwritten slots of a page, which may hold NaN.
    """

    only: tuple[int, ...] = ()
    multiple: int = 1
    unread: tuple[int, ...] = ()

    def fault(self, size: int) -> tuple[str, int] | None:
        """How it reads pages instead, and the nearest size that it can use; None: it can use this one."""
        if size in self.unread:
            return f"reads pages of {listed(self.unread)} tokens whole, unwritten slots included", 64
        if self.only and size not in self.only:
            return f"reads pages of {listed(self.only)} tokens", self.only[0]
        if size % self.multiple:
            return f"reads pages of a multiple of {self.multiple} tokens", -(-size // self.multiple) * self.multiple
        return None

    def __str__(self) -> str:
        if self.only:
            return listed(self.only)
        if self.unread:
            return f"any but {listed(self.unread)}"
        return "any" if self.multiple == 1 else f"multiples of {self.multiple}"


@dataclass(frozen=True)
class Capability:
    """One attention backend and its limits.

    prefix_by: what reads the prefix, as shown in the table of capabilities.
    make: the backend, whose modules it imports.  Its argument: whether it reads only where it measured faster
        (BackendChoice.by_rule).
    dtypes: the dtypes in which it computes.
    head_dims, fp8_head_dims: the head dims that it takes, and with keys and values in fp8; None: any, and the same.
    kinds: the kinds of layers that its own kernel reads.  specdec's Triton kernels read the others.
    tree_kinds: the same, where a draft tree's nodes stand after the keys.
    shares: whether its own kernel reads a prefix that several rows share.
    kv_cache_dtypes: the settings of kv_cache_dtype that it takes.
    split_kv_cache_dtypes: those where values are not as wide as their keys.
    fp8_from: the lowest compute capability for float8, in KV or latents; None: any on which it runs.
    latents: the rank and the rotated dim of the latents that it takes; None: any.
    features: what it does.  Without HEADS, specdec's Triton kernels read the heads of a draft head.
    """

    name: str
    prefix_by: str
    machine: Requirements
    make: Callable[[bool], Backend]
    dtypes: tuple[torch.dtype, ...] = HALVES
    head_dims: HeadDims | None = None
    fp8_head_dims: HeadDims | None = None
    pages: PageSizes = PageSizes()
    kinds: tuple[str, ...] = KINDS
    tree_kinds: tuple[str, ...] = KINDS
    shares: bool = True
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    split_kv_cache_dtypes: tuple[str, ...] = ("auto",)
    fp8_from: tuple[int, int] | None = None
    latents: tuple[int, int] | None = None
    features: frozenset[Feature] = USUAL


def short(dtype: torch.dtype) -> str:
    """The dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def listed(numbers: tuple[object, ...]) -> str:
    """Numbers, or names, as text: 1, 2 or 3."""
    return str(numbers[0]) if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
