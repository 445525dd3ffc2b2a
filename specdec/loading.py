"""From folders and options to a ready engine: loads both models, sizes the memory for keys and values, builds the workers.

What options mean on this machine and for these models is decided in resolve.py, before the weights are read.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from specdec.attention.attend import make_backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.batch.state import BatchState
from specdec.config import SpecConfig
from specdec.draft.eagle import DraftHead
from specdec.draft.load import load_head
from specdec.draft.worker import DraftWorker
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import ring_of
from specdec.engine.pages.pool import PagePool
from specdec.limits import MAX_PAUSE
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.config import ModelConfig
from specdec.models.kv import kv_token_bytes, make_cache
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.options import EngineOptions
from specdec.resolve import EngineSettings, choose_attention, resolve_settings
from specdec.startup import STARTUP
from specdec.threads import allowed_threads, threads_for, use_threads
from specdec.verify.verifier import TargetVerifier

POOL_SHARE = 0.85  # of the GPU memory that is free behind the weights: the rest is for activations and graphs
HOST_POOL_SHARE = 0.4  # of the host's memory: weights and everything else live there too
# With prefix caching: the most tokens that are kept (page lists stay quick, slots far below 2**31), and on a CPU the most
# batches of longest sequences, whose memory is only taken as it fills.
KEPT_TOKENS, HOST_KEPT_BATCHES = 2**24, 16


def load_pair(
    target: str | Path, draft: str | Path | None, spec: SpecConfig, options: EngineOptions
) -> tuple[Target, DraftHead | None, EngineSettings, Path]:
    """Both models on their device, the settings they run with, and the target's folder (for its tokenizer)."""
    if not isinstance(spec, SpecConfig):
        raise TypeError(f"spec must be a SpecConfig, got {spec!r} of type {type(spec).__name__}")
    STARTUP.lap("imports")
    folder, draft_folder = resolve_folder(target, "target"), None if draft is None else resolve_folder(draft, "draft")
    chosen = choose_target(folder, options.backend)
    settings = resolve_settings(options, spec if draft is not None else None, chosen.config, chosen.backend, chosen.reason)
    device, dtype = settings.device, settings.dtype
    max_positions = settings.max_seq_len + settings.lookahead
    model = load_chosen(chosen, folder, max_positions, device, dtype, bool(settings.cuda_graphs))
    set_threads(model, settings)
    STARTUP.lap("target")
    head = None if draft_folder is None else load_head(draft_folder, model, max_positions, device, dtype)
    if head is not None:
        choice = choose_attention(settings, chosen.config, head.config.model)
        settings = replace(settings, attention_backend=choice)
    STARTUP.lap("draft")
    return model, head, settings, folder


def set_threads(model: Target, settings: EngineSettings) -> None:
    """Tells torch how many CPU threads to use, for the whole process; does nothing for a decoder on a GPU."""
    if settings.device.type != "cpu":
        return
    threads = settings.options.threads
    if threads == "auto":
        weights = {weight.data_ptr(): weight.nbytes for weight in model.parameters()}  # tied ones are read once
        threads = threads_for(sum(weights.values()), model.config.num_layers, allowed_threads())
    use_threads(threads)


def build_engine(model: Target, head: DraftHead | None, settings: EngineSettings) -> Engine:
    """KV pool, caches and workers around loaded models."""
    options, spec = settings.options, settings.spec if head else None
    kinds = model.config.layer_kinds + (head.config.model.layer_kinds if head else ())
    ring = ring_of((kind.span for kind in kinds), settings.lookahead, options.page_size, settings.pages_per_sequence)
    ring = None if options.prefix_caching else ring  # what a ring overwrites can't be kept for others
    pool = PagePool(_pool_pages(model, head, settings, ring), options.page_size, ring)
    backend = make_backend(settings.attention_backend)
    aux_layers = head.config.aux_layers if head else ()
    verifier = TargetVerifier(model, _cache(model, model.config, pool, settings), backend, options.page_size, aux_layers)
    drafter = None
    if head is not None:
        assert spec is not None
        most = head.config.draft_vocab_size
        if spec.topk > most:
            raise ValueError(
                f"topk must be at most the draft vocabulary, {most}, got {spec.topk}; nearest setting: topk={most}"
            )
        drafter = DraftWorker(head, _cache(head, head.config.model, pool, settings), backend, spec.topk, options.page_size)
    state = BatchState.empty(
        options.max_batch_size,
        settings.pages_per_sequence,
        spec.topk if spec else 0,
        head.config.model.hidden_size if head else 0,
        max_pause=MAX_PAUSE if spec and spec.is_auto else 0,
        features=head.config.feature_size if head else 0,
        device=settings.device,
        dtype=settings.dtype,
    )
    STARTUP.lap("KV pool")
    graphs, prefixes = settings.cuda_graphs, options.prefix_caching
    return Engine(verifier, drafter, spec, state, pool, settings.lookahead, graphs, prefixes)


def kv_bytes_per_page(model: Target, head: DraftHead | None, settings: EngineSettings) -> int:
    """Bytes of one page of KV over both models."""
    configs, options = [model.config] + ([head.config.model] if head else []), settings.options
    return options.page_size * sum(kv_token_bytes(config, options.kv_cache_dtype, settings.dtype) for config in configs)


def _pool_pages(model: Target, head: DraftHead | None, settings: EngineSettings, ring: int | None) -> int:
    """Pages for a full batch of longest sequences, or what memory holds; requests then wait for pages.

    With prefix caching more, where memory holds them, so that pages outlive their requests: on a GPU up to KEPT_TOKENS, on a
    CPU up to HOST_KEPT_BATCHES such batches too.
    """
    options = settings.options
    wanted = options.max_batch_size * (ring or settings.pages_per_sequence) + 1
    if options.prefix_caching:
        most = KEPT_TOKENS // options.page_size
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
    slots = pool.num_pages * settings.options.page_size
    return make_cache(model, config, slots, settings.options.kv_cache_dtype, settings.dtype, settings.device)
