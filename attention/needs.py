"""What a pair of models and its settings need of attention, and what the device and its packages are.

This module knows no backend; attention/capabilities.py says which backend meets which needs.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from specdec.attention.flash.rule import MEASURED
from specdec.attention.kinds import FULL, LayerKind
from specdec.config import GraphMode


@dataclass(frozen=True)
class AttentionNeeds:
    """What a pair of models and its settings need of attention.

    architecture: the GPU's compute capability; None on a CPU.
    gpu: the kind of GPU, as gpu_kind names it.
    head_dims, kinds: of all layers of both models.  A layer of latent attention has no head dim here.
    alibi, encoder: whether layers have ALiBi's slopes, and whether the target has an encoder, which its decoder's layers read.
    value_dims: the width of the values that are not as wide as the keys that they go with; empty: there are none.
    differential: whether these values are those of differential attention.
    kv_cache_dtype, int8_queries: as in EngineOptions.
    mla, latent_rank, rope_dim, sparse: whether the target's layers keep latents, the latents' rank and rotated dim, and whether
        an indexer chooses those that a query reads.
    divided: whether several ranks divide each sequence's keys and values among them.
    tree: whether draft trees branch.
    graphs: the setting cuda_graphs.
    deterministic: whether a query's result must not depend on what is computed beside it.
    rows: the most sequences in a batch.
    tokens: the most tokens of one sequence.
    kv_heads: the target's number of kv heads.
    packed: the target's queries of one sequence in one verify pass, times the query heads that share a kv head.
    """

    device: torch.device
    dtype: torch.dtype
    architecture: tuple[int, int] | None = None
    gpu: str = ""
    head_dims: tuple[int, ...] = (128,)
    value_dims: tuple[int, ...] = ()
    differential: bool = False
    kinds: tuple[LayerKind, ...] = (FULL,)
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    encoder: bool = False
    kv_cache_dtype: str = "auto"
    int8_queries: bool = False
    mla: bool = False
    latent_rank: int = 512
    rope_dim: int = 64
    sparse: bool = False
    page_size: int = 16
    divided: bool = False
    tree: bool = True
    graphs: GraphMode = False
    shared_prefixes: bool = False
    deterministic: bool = False
    rows: int = 1
    tokens: int = 0
    kv_heads: int = 1
    packed: int = 1


def architecture_of(device: torch.device) -> tuple[int, int] | None:
    """The GPU's compute capability (major, minor); None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@cache
def gpu_kind(device: torch.device) -> str:
    """The kind of GPU by which measured rules are kept: "H100" or "H200"; the empty string for any other device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
    return next((kind for kind in MEASURED if kind in re.split(r"\W+", name)), "")


def installed(package: str) -> str | None:
    """The version of an installed package, or None.

    Nothing is imported: flash-attn 2 and 4 share a module name, so only the package's metadata tells them apart.
    """
    try:
        return version(package)
    except PackageNotFoundError:  # some builds of torch bring triton under another name
        return "0.0" if package == "triton" and importlib.util.find_spec(package) else None
