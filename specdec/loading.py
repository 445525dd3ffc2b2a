"""From names and settings to a ready engine: resolves devices, loads both models, sizes the KV pool.

Everything that can be wrong with a combination of settings is said here, before the first token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from specdec.attention.attend import make_backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.quant_cache import KV_CACHE_DTYPES
from specdec.attention.capabilities import AttentionNeeds, BackendChoice, architecture_of, choose_backend
from specdec.batch.state import BatchState
from specdec.checks import require_int
from specdec.config import GraphMode, SpecConfig
from specdec.draft.eagle import DraftHead
from specdec.draft.load import load_head
from specdec.draft.worker import DraftWorker
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import ring_of
from specdec.engine.pages.pool import PagePool
from specdec.limits import MAX_PAUSE
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.config import ModelConfig
from specdec.models.kv import heads_a_key, keeps_latents, kv_token_bytes, make_cache
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.startup import STARTUP
from specdec.verify.verifier import TargetVerifier

POOL_SHARE = 0.85  # of the GPU memory that is free behind the weights: the rest is for activations and graphs
HOST_POOL_SHARE = 0.4  # of the host's memory: weights and everything else live there too
# With prefix caching: the most tokens that are kept (page lists stay quick, slots far below 2**31), and on a CPU the most
# batches of longest sequences, whose memory is only taken as it fills.
KEPT_TOKENS, HOST_KEPT_BATCHES = 2**24, 16


@dataclass(frozen=True)
class EngineSettings:
    """How an engine runs.  max_seq_len: prompt and output of one request together, in tokens.

    kv_cache_dtype: "auto" (the models' own dtype), "fp8" or "int8".  backend: who computes the target, "native" modules or
    "transformers"; backend_reason: why it does.  prefix_caching: keep pages for prompts that begin as earlier ones did.
    """

    spec: SpecConfig | None
    max_batch_size: int
    max_seq_len: int
    page_size: int
    attention: BackendChoice
    cuda_graphs: GraphMode
    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: str = "auto"
    backend: str = "native"
    backend_reason: str = "asked for by name"
    prefix_caching: bool = False

    @property
    def lookahead(self) -> int:
        return self.spec.lookahead if self.spec else 2

    @property
    def pages_per_sequence(self) -> int:
        return -(-(self.max_seq_len + self.lookahead) // self.page_size)


def resolve_device(device: str | torch.device) -> torch.device:
    """`auto`: the GPU if there is one.  ValueError if the device asked for is not there."""
    if str(device) == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device must be 'auto' or a torch device, got {device!r}; nearest setting that works: 'auto'"
        ) from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, got {device!r}; nearest setting that works: 'auto'")
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r} asks for a GPU, but torch sees none; nearest: device='cpu'")
        if (resolved.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device={str(device)!r}: torch sees {torch.cuda.device_count()} GPUs; nearest: device='cuda:0'")
        return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
    return resolved


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's dtype on a GPU, float32 on a CPU."""
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype}; nearest setting that works: 'auto'")
        return dtype
    if dtype == "auto":
        return DTYPES.get(config.dtype or "", torch.bfloat16) if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype must be 'auto' or one of {', '.join(DTYPES)}, got {dtype!r}; nearest setting that works: 'auto'"
        )
    return DTYPES[dtype]


def resolve_max_seq_len(max_seq_len: int | None, config: ModelConfig) -> int:
    """None: all the model was made for."""
    limit = config.max_position
    if max_seq_len is None:
        return limit
    require_int("max_seq_len", max_seq_len, 2)
    if max_seq_len > limit:
        raise ValueError(
            f"max_seq_len must be at most {limit}, its {config.max_position_why}; got {max_seq_len}; nearest setting: {limit}"
        )
    return max_seq_len


def load_pair(
    target: str | Path, draft: str | Path | None, spec: SpecConfig, device: str | torch.device, dtype: str | torch.dtype,
    max_batch_size: int, max_seq_len: int | None, page_size: int, attention: str, cuda_graphs: GraphMode,
    kv_cache_dtype: str = "auto", backend: str = "auto", prefix_caching: bool = False,
) -> tuple[Target, DraftHead | None, EngineSettings, Path]:  # fmt: skip
    """Both models on their device, the settings they run with, and the target's folder (for its tokenizer)."""
    require_int("max_batch_size", max_batch_size, 1, 4096)
    require_int("page_size", page_size, 1, 4096)
    if not isinstance(spec, SpecConfig):
        raise TypeError(f"spec must be a SpecConfig, got {spec!r} of type {type(spec).__name__}")
    if kv_cache_dtype not in ("auto", *KV_CACHE_DTYPES):
        raise ValueError(
            f"kv_cache_dtype must be 'auto', 'fp8' or 'int8', got {kv_cache_dtype!r}; nearest setting that works: 'auto'"
        )
    if not isinstance(prefix_caching, bool):
        raise TypeError(f"prefix_caching must be a bool, got {prefix_caching!r}; nearest setting that works: False")
    if cuda_graphs is not False and cuda_graphs not in ("round", "step"):
        raise ValueError(f"cuda_graphs must be 'round', 'step' or False, got {cuda_graphs!r}; nearest setting: 'round'")
    STARTUP.lap("imports")
    where = resolve_device(device)
    folder, draft_folder = resolve_folder(target, "target"), None if draft is None else resolve_folder(draft, "draft")
    chosen = choose_target(folder, backend)
    config = chosen.config
    number = resolve_dtype(dtype, config, where)
    settings = EngineSettings(
        spec if draft is not None else None, max_batch_size, resolve_max_seq_len(max_seq_len, config), page_size,
        BackendChoice(attention, ""), cuda_graphs if where.type == "cuda" else False, where, number, kv_cache_dtype,
        chosen.backend, chosen.reason, prefix_caching,
    )  # fmt: skip
    settings = replace(settings, attention=choose_backend(attention, attention_needs(settings, config)))  # before the weights
    max_positions = settings.max_seq_len + settings.lookahead
    model = load_chosen(chosen, folder, max_positions, where, number, bool(settings.cuda_graphs))
    STARTUP.lap("target")
    head = None if draft_folder is None else load_head(draft_folder, model, max_positions, where, number)
    if head is not None:
        needs = attention_needs(settings, config, head.config.model)
        settings = replace(settings, attention=choose_backend(attention, needs))
    STARTUP.lap("draft")
    return model, head, settings, folder


def attention_needs(settings: EngineSettings, *configs: ModelConfig) -> AttentionNeeds:
    """What these models, target first, ask of attention under these settings."""
    spec, target = settings.spec, configs[0]
    return AttentionNeeds(
        settings.device,
        settings.dtype,
        architecture_of(settings.device),
        head_dims=tuple(dict.fromkeys(c.head_dim for c in configs if not keeps_latents(c))),
        kinds=tuple(dict.fromkeys(kind for c in configs for kind in c.layer_kinds)),
        softcap=any(c.softcap is not None for c in configs),
        sinks=any(c.has_sinks for c in configs),
        kv_dtype=settings.kv_cache_dtype,
        mla=keeps_latents(target),
        page_size=settings.page_size,
        tree=spec is not None and spec.topk > 1,
        graphs=settings.cuda_graphs,
        shared_prefixes=settings.prefix_caching,
        rows=settings.max_batch_size,
        tokens=settings.max_seq_len,
        kv_heads=target.num_kv_heads,
        packed=(spec.num_draft_tokens if spec else 1) * heads_a_key(target),
    )


def build_engine(model: Target, head: DraftHead | None, settings: EngineSettings) -> Engine:
    """KV pool, caches and workers around loaded models."""
    kinds = model.config.layer_kinds + (head.config.model.layer_kinds if head else ())
    ring = ring_of((kind.span for kind in kinds), settings.lookahead, settings.page_size, settings.pages_per_sequence)
    ring = None if settings.prefix_caching else ring  # what a ring overwrites can't be kept for others
    pool = PagePool(_pool_pages(model, head, settings, ring), settings.page_size, ring)
    backend = make_backend(settings.attention)
    aux_layers = head.config.aux_layers if head else ()
    verifier = TargetVerifier(model, _cache(model, model.config, pool, settings), backend, settings.page_size, aux_layers)
    drafter, spec = None, settings.spec if head else None
    if head is not None:
        assert spec is not None
        most = head.config.draft_vocab_size
        if spec.topk > most:
            raise ValueError(
                f"topk must be at most the draft vocabulary, {most}, got {spec.topk}; nearest setting: topk={most}"
            )
        drafter = DraftWorker(head, _cache(head, head.config.model, pool, settings), backend, spec.topk, settings.page_size)
    state = BatchState.empty(
        settings.max_batch_size,
        settings.pages_per_sequence,
        spec.topk if spec else 0,
        head.config.model.hidden_size if head else 0,
        max_pause=MAX_PAUSE if spec and spec.is_auto else 0,
        features=head.config.feature_size if head else 0,
        device=settings.device,
        dtype=settings.dtype,
    )
    STARTUP.lap("KV pool")
    graphs, prefixes = settings.cuda_graphs, settings.prefix_caching
    return Engine(verifier, drafter, spec, state, pool, settings.lookahead, graphs, prefixes)


def kv_bytes_per_page(model: Target, head: DraftHead | None, settings: EngineSettings) -> int:
    """Bytes of one page of KV over both models."""
    configs = [model.config] + ([head.config.model] if head else [])
    return settings.page_size * sum(kv_token_bytes(config, settings.kv_cache_dtype, settings.dtype) for config in configs)


def _pool_pages(model: Target, head: DraftHead | None, settings: EngineSettings, ring: int | None) -> int:
    """Pages for a full batch of longest sequences, or what memory holds; requests then wait for pages.

    With prefix caching more, where memory holds them, so that pages outlive their requests: on a GPU up to KEPT_TOKENS, on a
    CPU up to HOST_KEPT_BATCHES such batches too.
    """
    wanted = settings.max_batch_size * (ring or settings.pages_per_sequence) + 1
    if settings.prefix_caching:
        most = KEPT_TOKENS // settings.page_size
        kept = most if settings.device.type == "cuda" else min(most, HOST_KEPT_BATCHES * (wanted - 1) + 1)
        wanted = max(wanted, kept)
    fits = int(_pool_bytes(settings.device) // kv_bytes_per_page(model, head, settings))
    if fits < 2:
        raise ValueError(f"no memory is left on {settings.device} for KV pages; use a smaller model or dtype")
    return min(wanted, fits)


def _pool_bytes(device: torch.device) -> float:
    """Memory that KV may take: a share of what the GPU has free, or of all the host has."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps of an engine that is gone counts as taken
        return torch.cuda.mem_get_info(device)[0] * POOL_SHARE
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_POOL_SHARE


def _cache(model: nn.Module, config: ModelConfig, pool: PagePool, settings: EngineSettings) -> KVCache:
    """config: the model's."""
    slots = pool.num_pages * settings.page_size
    return make_cache(model, config, slots, settings.kv_cache_dtype, settings.dtype, settings.device)
