"""From names and settings to a ready engine: resolves devices, loads both models, sizes the KV pool.

Everything that can be wrong with a combination of settings is said here, before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdec.attention.caches.quant_cache import KV_CACHE_DTYPES
from specdec.attention.capabilities import AttentionNeeds, BackendChoice, architecture_of, choose_backend
from specdec.checks import require_int
from specdec.config import GraphMode, SpecConfig
from specdec.draft.eagle import DraftHead
from specdec.draft.load import load_head
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.config import ModelConfig
from specdec.models.kv import heads_a_key, keeps_latents
from specdec.models.registry import choose_target, load_chosen
from specdec.models.target import Target
from specdec.startup import STARTUP


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
