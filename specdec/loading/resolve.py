"""Resolves engine options for this machine and these models: every "auto" becomes a device, a dtype, a backend.

Every error about a combination of options is raised here, before the weights are read.  This module loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from specdec.attention.capabilities import BackendChoice, choose_backend
from specdec.attention.capability import GRAPHS, Feature
from specdec.attention.flash.rule import AttentionShape
from specdec.attention.invariant.plan import MAX_COLUMNS, column_parts
from specdec.attention.needs import AttentionNeeds, architecture_of, gpu_kind
from specdec.checks import require_int
from specdec.config import GraphMode, SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.loading.context import check_audit, check_context
from specdec.loading.devices import CHUNK_COST
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.config import ModelConfig
from specdec.models.mixtures.dividing import ExpertSharing, held_by_rank
from specdec.models.recurrent.sizes import MAX_STATE_NODES, MIN_STATE_WIDTH, SHARED_OF_MANY_NODES, RecurrentConfig
from specdec.ops.launch import has_gluon, shared_memory
from specdec.ops.products.numerics import FAST, INVARIANT, Numerics
from specdec.options import EngineOptions
from specdec.runner.prompts import MAX_BUCKET_STEP

PAGE_MULTIPLE = 256  # of a page as long as a sequence: what every kernel and library reads that takes pages of any length


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine runs: the options as they were given, and the settings that they were resolved to.

    first_accepted: the share of the drafter's first drafts that the target accepted when both were looked at; None: not known.
    experts: how ranks share the target's mixtures, and why; None: there is nothing to share.
    asked_shapes: those for which requests may ask besides `spec`, as rounds name them.
    """

    options: EngineOptions
    spec: SpecConfig | None  # None without a drafter
    device: torch.device
    dtype: torch.dtype
    max_seq_len: int
    cuda_graphs: GraphMode  # False without a GPU
    attention_backend: BackendChoice
    target_backend: str  # "native" if specdec's own modules compute the target, or "transformers"
    target_backend_reason: str
    draft_slots: int = 0  # how many slots after the tokens that are committed before a round the drafter writes in it
    threads: int | None = None  # of a CPU; None on a GPU, and before the target is loaded
    first_accepted: float | None = None
    experts: ExpertSharing | None = None
    asked_shapes: tuple[SpecConfig, ...] = ()

    @property
    def given_shapes(self) -> tuple[SpecConfig, ...]:
        """All that settings name, "auto" as it stands."""
        return (self.spec, *self.asked_shapes) if self.spec else ()

    @property
    def most_nodes(self) -> int:
        """Of a row in a round."""
        return max((shape.num_draft_tokens for given in self.given_shapes for shape in given.shapes), default=1)

    @property
    def lookahead(self) -> int:
        """Slots after the committed tokens that rounds in flight may write."""
        return max((max(each.lookahead, self.draft_slots + each.levels + 1) for each in self.given_shapes), default=2)

    def with_drafter(self, head: DraftModel | None) -> EngineSettings:
        """The same settings, with the shapes that it makes of theirs, and as much look-ahead as that drafter needs."""
        if head is None or self.spec is None:
            return self
        spec = head.resolved(self.spec)
        asked = head.asked_shapes(spec, cast(tuple[SpecConfig, ...] | None, self.options.shapes))
        return replace(self, spec=spec, asked_shapes=asked, draft_slots=max(map(head.slots, (spec, *asked))))

    def longest_encoder_input(self, target: ModelConfig) -> int:
        """The most tokens of a text that the target's encoder reads, no more than those of one request; 0 without one."""
        return 0 if target.encoder is None else min(target.encoder.max_tokens, self.max_seq_len)

    @property
    def page_size(self) -> int:
        """Tokens of a page on one rank.  "sequence": those of the longest sequence, look-ahead included, rounded up."""
        asked = self.options.page_size
        return asked if isinstance(asked, int) else -(-(self.max_seq_len + self.lookahead) // PAGE_MULTIPLE) * PAGE_MULTIPLE

    @property
    def page_tokens(self) -> int:
        """Tokens of a sequence that a page stands for: those that each rank holds of it, over all ranks that shard it."""
        return self.page_size * self.options.decode_context_parallel_size

    @property
    def pages_per_sequence(self) -> int:
        """Entries in the page table of the longest sequence, look-ahead included."""
        return -(-(self.max_seq_len + self.lookahead) // self.page_tokens)

    @property
    def chunk_costs(self) -> tuple[int, int, int]:
        """The first three fields of ChunkBudget."""
        asked = self.options.prefill_chunk
        return CHUNK_COST[self.device.type] if asked == "auto" else (asked, asked, asked)

    @property
    def scratch_room(self) -> int:
        """The most tokens of one pass, where these lie in a scratch because ranks shard sequences; else 0."""
        if self.options.decode_context_parallel_size == 1:
            return 0
        return max(max(self.chunk_costs) + MAX_BUCKET_STEP, (self.options.max_batch_size + 1) * self.most_nodes)

    @property
    def numerics(self) -> Numerics:
        """The policy that chooses how the target is computed."""
        return INVARIANT if self.options.deterministic else FAST

    def with_options(self, **changes: Any) -> EngineSettings:
        """The same settings with other options, such as max_batch_size or page_size, that need no new resolution."""
        return replace(self, options=replace(self.options, **changes))

    def by_option(self) -> dict[str, Any]:
        """Each option's name and the value that is used, as plain data.  An "auto" that is still there is decided elsewhere."""
        resolved = {
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_seq_len": self.max_seq_len,
            "page_size": self.page_size,
            "cuda_graphs": self.cuda_graphs,
            "attention": self.attention_backend.name,
            "backend": self.target_backend,
        }
        resolved |= {} if self.experts is None else {"expert_parallel": self.experts.name}
        given = {item.name: getattr(self.options, item.name) for item in fields(EngineOptions)}
        return given | resolved | ({} if self.threads is None else {"threads": self.threads})


def resolve_settings(
    options: EngineOptions,
    spec: SpecConfig | None,
    target: ModelConfig,
    target_backend: str = "native",
    target_backend_reason: str = "asked for by name",
) -> EngineSettings:
    """The settings that these options mean with that target.  spec: None without a drafter.

    The attention backend is chosen for the target alone.  Once a draft head is loaded, `choose_attention` must choose again.

    ValueError if an option does not fit the device or the target.
    """
    check_threads(options, device := resolve_device(options.device))
    if target.encoder is not None and options.prefix_caching:
        raise ValueError(
            f"prefix_caching=True is for decoder-only targets: keys and values of a {target.family} decoder depend on what its "
            "encoder read; nearest setting that works: prefix_caching=False"
        )
    _check_states_are_found(options)
    check_context(options, target, target_backend)
    check_audit(options, target, drafts=spec is not None)
    if options.page_size == "sequence" and options.prefix_caching:
        raise ValueError(
            "prefix_caching=True keeps full pages, and one as long as the longest sequence is never full, got "
            "page_size='sequence'; nearest setting that works: page_size=16"
        )
    settings = EngineSettings(
        options=options,
        spec=spec,
        device=device,
        dtype=resolve_dtype(options.dtype, target, device),
        max_seq_len=resolve_max_seq_len(options.max_seq_len, target),
        cuda_graphs=options.cuda_graphs if device.type == "cuda" else False,
        attention_backend=BackendChoice(options.attention, ""),
        target_backend=target_backend,
        target_backend_reason=target_backend_reason,
    )
    if options.deterministic:
        check_deterministic(settings, target, architecture_of(device))
    if target.recurrent is not None and device.type == "cuda":
        check_recurrent(settings, target.recurrent, shared_memory(device))
    if options.pack_weights:
        check_packing_here(device, architecture_of(device), has_gluon())
        check_packing(settings)
    return replace(settings, attention_backend=choose_attention(settings, target))


def experts_line(target: ModelConfig, settings: EngineSettings) -> str:
    """What a rank holds of the target's experts, and why; empty where no ranks share any."""
    if target.experts is None or settings.experts is None:
        return ""
    return f"{held_by_rank(target.experts, settings.options.tensor_parallel_size)} ({settings.experts.reason})"


def check_states(settings: EngineSettings, *configs: ModelConfig) -> None:
    """ValueError if memory is asked for states that no model, target first, keeps, or if the drafter's states don't fit."""
    options, target = settings.options, configs[0]
    if options.state_cache != "auto" and not any(config.recurrent for config in configs):
        raise ValueError(
            f"state_cache is for models with recurrent layers, and {target.family} has none, got {options.state_cache!r}; "
            "nearest setting that works: state_cache='auto'"
        )
    for config in configs[1:]:
        if config.recurrent is not None and settings.device.type == "cuda":
            check_recurrent(settings, config.recurrent, shared_memory(settings.device), settings.draft_slots)


def _check_states_are_found(options: EngineOptions) -> None:
    """ValueError if memory is asked for states that no later prompt finds."""
    if options.state_cache != "auto" and not options.prefix_caching:
        raise ValueError(
            f"state_cache={options.state_cache!r} is for states that prefix caching keeps, got prefix_caching=False; nearest "
            "setting that works: prefix_caching=True"
        )


def check_threads(options: EngineOptions, device: torch.device) -> None:
    """ValueError if threads are asked for where none compute."""
    if device.type != "cpu" and options.threads != "auto":
        raise ValueError(
            f"threads={options.threads} is for a decoder on a CPU, but this one runs on {device}; nearest setting that works: "
            "threads='auto'"
        )


def check_deterministic(settings: EngineSettings, target: ModelConfig, architecture: tuple[int, int] | None) -> None:
    """ValueError if some part of the target can't be computed in one order of sums.  choose_attention checks the backend.

    architecture: of the device; None: a CPU.
    """
    options = settings.options

    def refuse(problem: str, nearest: str = "deterministic=False") -> None:
        raise ValueError(f"deterministic=True {problem}; nearest setting that works: {nearest}")

    if architecture is None or architecture[0] != 9:
        got = settings.device if architecture is None else f"{settings.device} of {'.'.join(map(str, architecture))}"
        refuse(f"runs on GPUs of compute capability 9.x, whose products were found to be equal bit for bit, got {got}")
    if settings.target_backend != "native":
        refuse(f"can't fix the order of sums in transformers' code, got backend={settings.target_backend!r}")
    if target.quantization is not None:
        refuse(f"computes targets whose weights are unquantised, got {target.quantization}")
    if target.keeps_latents and not column_parts(target.latent_rank):
        refuse(
            f"reads latents of up to {MAX_COLUMNS} numbers, or of an even number up to {2 * MAX_COLUMNS}, "
            f"got {target.latent_rank}"
        )
    if target.recurrent is not None:
        refuse("computes attention alone, and this target has recurrent layers")
    if any(kind.alibi for kind in target.layer_kinds):
        refuse("computes attention without ALiBi, which this target has")
    if settings.dtype not in (torch.bfloat16, torch.float16):
        refuse(f"computes in bfloat16 or float16, got dtype={str(settings.dtype).removeprefix('torch.')!r}", "dtype='bfloat16'")
    if options.kv_cache_dtype != "auto":
        got = f"kv_cache_dtype={options.kv_cache_dtype!r}"
        refuse(f"keeps keys and values in the model's dtype, got {got}", "kv_cache_dtype='auto'")
    if (sharers := options.decode_context_parallel_size) > 1:
        name = "decode_context_parallel_size"
        refuse(f"keeps whole sequences on each rank, got {name}={sharers}", f"{name}=1")
    ranks = options.tensor_parallel_size
    if any(size % 8 for size in target.row_lengths(ranks)):
        fits = [n for n in range(ranks, 0, -1) if ranks % n == 0 and not any(size % 8 for size in target.row_lengths(n))]
        got = " and ".join(map(str, target.row_lengths(ranks)))
        nearest = f"tensor_parallel_size={fits[0]}" if fits else "deterministic=False"
        refuse(f"multiplies matrices whose rows are multiples of 8 numbers, got {got}", nearest)


def check_recurrent(
    settings: EngineSettings, sizes: RecurrentConfig, shared_bytes: int, nodes: int | None = None
) -> None:  # fmt: skip
    """ValueError if the kernels of recurrent layers, which only GPUs have, don't take these sizes.

    nodes: the most of one of the model's passes; None: of the trees that are verified.
    shared_bytes: of the memory that a program has on a GPU's chip.
    """
    widths = () if (rule := sizes.rule) is None else (("key", rule.key_width), ("value", rule.value_width))
    in_blocks = rule is not None and rule.in_blocks
    fitting = f"a multiple of {MIN_STATE_WIDTH} wide" if in_blocks else f"a power of two wide, from {MIN_STATE_WIDTH} on"
    for name, width in widths:
        if width % MIN_STATE_WIDTH or (not in_blocks and width & (width - 1)):
            raise ValueError(
                f"recurrent layers of this rule run on a GPU if heads are {fitting}, got {name} heads of {width}; "
                "nearest setting that works: device='cpu'"
            )
    if settings.dtype == torch.float64 and settings.cuda_graphs:
        raise ValueError(
            "recurrent layers have no kernels in float64, so no graph can hold them, got "
            f"cuda_graphs={settings.cuda_graphs!r}; nearest setting that works: cuda_graphs=False"
        )
    if nodes is None:
        nodes = settings.most_nodes
    most = MAX_STATE_NODES if shared_bytes >= SHARED_OF_MANY_NODES else MAX_STATE_NODES // 2
    if nodes > most:
        raise ValueError(
            f"num_draft_tokens must be at most {most} for a model with recurrent layers on this GPU, got {nodes}; "
            f"nearest setting that works: {most}"
        )


def check_packing(settings: EngineSettings) -> None:
    """ValueError if no product would read lossless 12-bit weights, whatever the device."""
    got = "deterministic=True" if settings.options.deterministic else ""
    if settings.target_backend != "native":
        got = f"backend={settings.target_backend!r} ({settings.target_backend_reason})"
    if got:
        raise ValueError(
            "pack_weights=True is for specdec's own modules, with tiles chosen by the number of tokens, "
            f"got {got}; nearest setting that works: pack_weights=False"
        )
    if settings.dtype != torch.bfloat16:
        got, nearest = f"dtype={str(settings.dtype).removeprefix('torch.')!r}", "dtype='bfloat16'"
        raise ValueError(f"pack_weights=True packs weights in bfloat16, got {got}; nearest setting that works: {nearest}")


def check_packing_here(device: torch.device, architecture: tuple[int, int] | None, gluon: bool) -> None:
    """ValueError on a device without the kernels that read lossless 12-bit weights.  gluon: whether Triton has it."""
    if architecture == (9, 0) and gluon:
        return
    got = device if architecture is None else f"{device} of {'.'.join(map(str, architecture))}"
    if architecture == (9, 0):
        got = f"{device} without Triton's Gluon"
    raise ValueError(
        f"pack_weights=True needs an NVIDIA GPU of compute capability 9.0, for which its kernels are written, got {got}; "
        "nearest setting that works: pack_weights=False"
    )


def resolve_device(device: str | torch.device) -> torch.device:
    """The device; "auto" is the current GPU if there is one, else the CPU.  ValueError if the device is not there."""
    if str(device) == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    resolved = torch.device(device)
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r} asks for a GPU, but torch sees none; nearest: device='cpu'")
        if (resolved.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device={str(device)!r}: torch sees {torch.cuda.device_count()} GPUs; nearest: device='cuda:0'")
        return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
    return resolved


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype; "auto" is the checkpoint's own on a GPU (bfloat16 if it names none) and float32 on a CPU."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return DTYPES.get(config.dtype or "", torch.bfloat16) if device.type == "cuda" else torch.float32
    return DTYPES[dtype]


def resolve_max_seq_len(max_seq_len: int | None, config: ModelConfig) -> int:
    """The most tokens of one request; None: as many as the model was made for.  ValueError if more are asked for."""
    limit = config.max_position
    if max_seq_len is None:
        return limit
    require_int("max_seq_len", max_seq_len, 2)
    if max_seq_len > limit:
        raise ValueError(
            f"max_seq_len must be at most {limit}, its {config.max_position_why}; got {max_seq_len}; nearest setting: {limit}"
        )
    return max_seq_len


def choose_attention(settings: EngineSettings, *configs: ModelConfig) -> BackendChoice:
    """The attention backend for these models, target first.  ValueError if the backend asked for can't do what they need."""
    return choose_backend(settings.options.attention, attention_needs(settings, *configs))


def attention_needs(settings: EngineSettings, *configs: ModelConfig) -> AttentionNeeds:
    """What these models, target first, need of an attention backend under these settings."""
    target, options = configs[0], settings.options
    asked = {
        Feature.DIFFERENTIAL: any(c.differential for c in configs),
        Feature.INT8_QUERIES: options.int8_queries,
        Feature.SPARSE: target.max_read is not None,
        Feature.SOFTCAP: any(c.softcap is not None for c in configs),
        Feature.SINKS: any(c.has_sinks or any(heads.has_sinks for heads in c.all_heads) for c in configs),
        Feature.ALIBI: any(kind.alibi for c in configs for kind in c.layer_kinds),
        Feature.ENCODER: target.encoder is not None,
        Feature.DETERMINISTIC: options.deterministic,
        Feature.TREES: not all(shape.is_chain for shape in settings.given_shapes),
        Feature.CONTEXT_PARALLEL: options.decode_context_parallel_size > 1,
        Feature.SHARED_PREFIXES: options.prefix_caching,
    }
    seqlen_q_packgqa = settings.most_nodes * target.heads_a_key
    return AttentionNeeds(
        settings.device,
        settings.dtype,
        architecture_of(settings.device),
        gpu_kind(settings.device),
        head_dims=tuple(dict.fromkeys(head_dim for c in configs for head_dim in c.head_dims)),
        value_dims=tuple(dict.fromkeys(width for c in configs for width in c.split_widths)),
        kinds=tuple(dict.fromkeys(kind for c in configs for kind in c.key_kinds)),
        latents=(target.latent_rank, target.head_dim) if target.keeps_latents else None,
        draft_latents=tuple((c.latent_rank, c.head_dim) for c in configs[1:] if c.keeps_latents),
        kv_cache_dtype=options.kv_cache_dtype,
        page_size=settings.page_size,
        features=GRAPHS[settings.cuda_graphs].union(feature for feature, is_asked in asked.items() if is_asked),
        largest=AttentionShape(options.max_batch_size, target.num_kv_heads, seqlen_q_packgqa, settings.max_seq_len),
    )
