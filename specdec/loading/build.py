"""Builds an engine from loaded models and resolved settings: sizes the KV pool, makes caches and workers, sets budgets.

The numbers that depend on the kind of device are here, so that neither the scheduler nor the runner has to know the device.
"""

from __future__ import annotations

import gc
import math
import os

import torch
from torch import nn

from specdec.attention.attend import make_backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.latent.mla import EXPAND_ABOVE
from specdec.batch.state import BatchState
from specdec.draft.eagle import DraftHead
from specdec.draft.worker import DraftWorker
from specdec.engine.chunks import ChunkBudget
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission, ring_of
from specdec.engine.pages.pool import PagePool
from specdec.engine.pages.sharing import RowSharing
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.limits import MAX_PAUSE
from specdec.loading.resolve import EngineSettings
from specdec.models.config import ModelConfig
from specdec.models.kv import heads_a_key, keeps_latents, kv_token_bytes, make_cache
from specdec.models.target import Target
from specdec.ops.cuda_graph import on_device
from specdec.runner.runner import DeviceRunner, shared_room
from specdec.runner.workers import Drafter, Workers
from specdec.startup import STARTUP
from specdec.verify.verifier import TargetVerifier

POOL_SHARE = 0.85  # share of the GPU memory that is free after the weights; the rest is for activations and graphs
HOST_POOL_SHARE = 0.4  # share of the host's memory, where weights and everything else must fit too
# Limits of a pool with prefix caching.  KEPT_TOKENS bounds its tokens, so that lists of pages stay quick and slot numbers stay
# far below 2**31.  HOST_KEPT_BATCHES bounds it on a CPU, in full batches of longest sequences; the operating system provides
# that memory only as it is written.
KEPT_TOKENS, HOST_KEPT_BATCHES = 2**24, 16
DEPTH = {"cuda": 1, "cpu": 0}  # launches that may be unread; on a CPU the host computes them itself and can't run ahead
CAPTURE_SECONDS = 0.2  # how long the capture of a round's graph takes on a slow host, warm-up included
# A threshold for the keys that a round need not read again if rows read common pages together, (rows - 1) * tokens.  Below it
# rows read alone, because reading together costs one or two more launches in each layer.  Measured: benchmarks/README.md,
# shared prefixes.  On a CPU reading together gains nothing, because one dense product over all rows' keys serves all rows.
LEAST_SAVED = {"cuda": 20_000.0, "cpu": math.inf}
MOST_PACKED = 64  # a threshold for queries x heads of a row that read each key; above it reading together gains nothing
# The first three fields of ChunkBudget, by kind of device.  On a CPU they also bound the size of a chunk's mask.  Measured:
# benchmarks/README.md, prompts in chunks.
CHUNK_COST = {"cuda": (2048, 3072, 8192), "cpu": (256, 1024, 1024)}
# Both decide whether a chunk is captured: the seconds that a slow host needs to launch a layer, and how many products of two
# numbers a GPU computes in a second.
LAUNCH_SECONDS_A_LAYER, PRODUCTS_A_SECOND = 1.2e-3, 3e14
ATTENTION_EFFICIENCY = 0.55  # operations per second in attention over long contexts / those in a layer's matrix products


def build_engine(model: Target, head: DraftHead | None, settings: EngineSettings) -> Engine[DeviceRunner]:
    """Makes the KV pool, caches, workers, runner and scheduler around loaded models.

    head: None for plain decoding only.  ValueError if the memory holds no KV pages, or topk is above the draft vocabulary.
    """
    kinds = model.config.layer_kinds + (head.config.model.layer_kinds if head else ())
    ring = ring_of((kind.span for kind in kinds), settings.lookahead, settings.options.page_size, settings.pages_per_sequence)
    ring = None if settings.options.prefix_caching else ring  # the pages of a ring are overwritten, so they can't be kept
    pool = PagePool(_pool_pages(model, head, settings, ring), settings.options.page_size, ring)
    workers = _workers(model, head, settings, pool)
    STARTUP.lap("KV pool")
    spec, device, graphs = settings.spec if head else None, settings.device.type, settings.cuda_graphs
    heads = heads_a_key(model.config)
    shared = shared_room(workers.state, MOST_PACKED, heads) if settings.options.prefix_caching else None
    runner = DeviceRunner(workers, graphs, most_captured_cost(model, head), shared)
    sources = settings.options.max_batch_size if model.config.encoder else 0
    admission = Admission(pool, settings.lookahead, settings.options.prefix_caching, sources)
    scheduler = Scheduler(
        admission,
        chunk_budget(model.config, settings, admission.max_chunk_tokens),
        Speculation(spec, CAPTURE_SECONDS if graphs else 0.0),
        settings.options.max_batch_size,
        pads_rows=bool(graphs),
        sharing=None if shared is None else RowSharing(settings.options.page_size, LEAST_SAVED[device]),
    )
    return Engine(scheduler, runner, DEPTH[device])


def _workers(model: Target, head: DraftHead | None, settings: EngineSettings, pool: PagePool) -> Workers:
    backend = make_backend(settings.attention_backend)
    aux_layers = head.config.aux_layers if head else ()
    cache, longest = _cache(model, model.config, pool, settings), settings.longest_source(model.config)
    sources = _source_cache(model, settings) if longest else None
    verifier = TargetVerifier(model, cache, backend, aux_layers, sources)
    drafter: Drafter | None = None
    spec = settings.spec if head else None
    if head is not None:
        assert spec is not None
        most = head.config.draft_vocab_size
        if spec.topk > most:
            raise ValueError(
                f"topk must be at most the draft vocabulary, {most}, got {spec.topk}; nearest setting: topk={most}"
            )
        drafter = DraftWorker(head, _cache(head, head.config.model, pool, settings), backend, spec.topk)
    state = BatchState.empty(
        settings.options.max_batch_size + 1,  # the last row is always padding
        settings.pages_per_sequence,
        spec.topk if spec else 0,
        head.config.model.hidden_size if head else 0,
        page_size=settings.options.page_size,
        source_size=longest,
        max_pause=MAX_PAUSE if spec and spec.is_auto else 0,
        features=head.config.feature_size if head else 0,
        device=settings.device,
        dtype=settings.dtype,
    )
    return Workers(verifier, drafter, state)


# ---- chunks of prompts ----


def chunk_budget(config: ModelConfig, settings: EngineSettings, most: int | None) -> ChunkBudget:
    """What a chunk of prompts may cost.  config: the target's.  most: the most tokens of one prompt in one chunk."""
    asked = settings.options.prefill_chunk
    costs = CHUNK_COST[settings.device.type] if asked == "auto" else (asked, asked, asked)
    return ChunkBudget(*costs, doubling_context(config), most)


def doubling_context(config: ModelConfig) -> float:
    """The context length at which attention doubles a token's cost, because it then takes as long as the matrix products.

    A token's matrix products take two operations for each weight.  Attention takes four operations for each key, head and
    dimension in layers that read all keys.  Layers with a window cost the same at every position, so they don't count.
    """
    H, heads_D = config.hidden_size, config.num_heads * config.head_dim
    kv_D = config.num_kv_heads * config.head_dim
    products = 2.0 * config.num_layers * (H * (2 * heads_D + 2 * kv_D) + 3 * H * config.intermediate_size)
    full = sum(kind.span is None for kind in config.layer_kinds)
    return math.inf if not full else ATTENTION_EFFICIENCY * products / (4.0 * heads_D * full)


def free_memory(device: torch.device) -> None:
    """Gives back the memory of models, caches and graphs that nobody holds any more, so that another program can have it."""
    gc.collect()
    if device.type == "cuda":
        with on_device(device):
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # otherwise they stay for the life of the process
            torch.cuda.empty_cache()


def most_captured_cost(model: Target, head: DraftHead | None) -> int:
    """The largest cost of a chunk that is captured: up to it, a GPU computes the chunk faster than a slow host launches it.

    The time to launch a layer does not depend on the layer's size, while the time of its kernels grows with its weights.
    """
    layers = model.config.num_layers + (head.config.model.num_layers if head else 0)
    weights = sum(p.numel() for p in {*model.parameters(), *(head.parameters() if head else ())} if p.dim() > 1)
    most = int(layers * LAUNCH_SECONDS_A_LAYER * PRODUCTS_A_SECOND / max(1, weights))
    most = min(most, CHUNK_COST["cuda"][2])
    # Longer chunks of a model that keeps latents run different kernels, depending on how much of the prompt is in the cache.
    return min(most, EXPAND_ABOVE) if keeps_latents(model.config) else most


# ---- memory ----


def kv_bytes_per_page(model: Target, head: DraftHead | None, settings: EngineSettings) -> int:
    """The bytes of one page: keys and values of both models."""
    configs, options = [model.config] + ([head.config.model] if head else []), settings.options
    return options.page_size * sum(kv_token_bytes(config, options.kv_cache_dtype, settings.dtype) for config in configs)


def _pool_pages(model: Target, head: DraftHead | None, settings: EngineSettings, ring: int | None) -> int:
    """The number of pages for a full batch of longest sequences, or as many as the memory holds; then requests wait for pages.

    With prefix caching there are more pages, if the memory holds them, so that pages can outlive their requests: up to
    KEPT_TOKENS, and on a CPU at most HOST_KEPT_BATCHES full batches.  ValueError if the memory holds no page.
    """
    wanted = settings.options.max_batch_size * (ring or settings.pages_per_sequence) + 1
    if settings.options.prefix_caching:
        most = KEPT_TOKENS // settings.options.page_size
        kept = most if settings.device.type == "cuda" else min(most, HOST_KEPT_BATCHES * (wanted - 1) + 1)
        wanted = max(wanted, kept)
    fits = int((_pool_bytes(settings.device) - source_bytes(model, settings)) // kv_bytes_per_page(model, head, settings))
    if fits < 2:
        raise ValueError(f"no memory is left on {settings.device} for KV pages; use a smaller model or dtype")
    return min(wanted, fits)


def source_bytes(model: Target, settings: EngineSettings) -> int:
    """The bytes of the encoder's texts, one of the longest for each row of a batch; 0 without an encoder."""
    slots = settings.options.max_batch_size * settings.longest_source(model.config)
    return slots * kv_token_bytes(model.config, settings.options.kv_cache_dtype, settings.dtype)


def _pool_bytes(device: torch.device) -> float:
    """The bytes that KV may take: a share of the GPU's free memory, or of all memory of the host."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch keeps of an engine that is gone would count as taken
        return torch.cuda.mem_get_info(device)[0] * POOL_SHARE
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_POOL_SHARE


def _cache(model: nn.Module, config: ModelConfig, pool: PagePool, settings: EngineSettings) -> KVCache:
    """The KV cache of one of both models.  config: that model's."""
    slots = pool.num_pages * settings.options.page_size
    return make_cache(model, config, slots, settings.options.kv_cache_dtype, settings.dtype, settings.device)


def _source_cache(model: Target, settings: EngineSettings) -> KVCache:
    """The cache of the encoder's texts: a page for each row of a batch, as long as the longest text."""
    slots = settings.options.max_batch_size * settings.longest_source(model.config)
    return make_cache(model, model.config, slots, settings.options.kv_cache_dtype, settings.dtype, settings.device)
