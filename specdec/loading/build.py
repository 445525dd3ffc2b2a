"""Builds an engine from loaded models and resolved settings: makes the KV pool, caches and workers, sets budgets."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from specdec.attention.attend import make_backend
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.context_parallel.tables import ContextParallel
from specdec.attention.kinds import FULL
from specdec.attention.latent.limits import LIMITS
from specdec.attention.shared import SharedPrefix
from specdec.batch.state import BatchState
from specdec.batch.trees.states import StateRows
from specdec.draft.drafter import DrafterContext, DraftModel
from specdec.engine.chunks import ChunkBudget
from specdec.engine.launches.mixing import Mixing
from specdec.engine.loop import Engine
from specdec.engine.pages.sharing import RowSharing
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.grammar.library import Grammars
from specdec.limits import MAX_PAUSE
from specdec.loading import devices
from specdec.loading.memory import PoolPlan, StatePlan, audit_bytes, pool_bytes, pool_plan
from specdec.loading.resolve import EngineSettings
from specdec.models.config import ModelConfig
from specdec.models.kv import cache_layout, make_cache
from specdec.models.linear import use_numerics
from specdec.models.recurrent.pool import StatePool
from specdec.models.target import Target
from specdec.ops.compiling.rehearsal import compiles_ahead
from specdec.ops.cuda_graph import on_device
from specdec.parallel.group import Group
from specdec.prompts.tokenizer import Tokenizer
from specdec.runner.runner import DeviceRunner
from specdec.runner.workers import Workers
from specdec.startup import STARTUP
from specdec.verify.hybrid import HybridVerifier
from specdec.verify.verifier import TargetVerifier


def build_engine(model: Target, head: DraftModel | None, settings: EngineSettings) -> Engine[DeviceRunner]:
    """Makes the KV pool, caches, workers, runner and scheduler around loaded models.

    head: None for plain decoding only.  ValueError if the memory holds no KV pages, or topk is above the draft vocabulary.
    """
    plan = plan_pool(model, head, settings)
    runner = build_runner(model, head, settings, plan)
    device, graphs = settings.device.type, settings.cuda_graphs
    admission = plan.admission(settings, settings.options.max_batch_size if model.config.encoder else 0)
    scheduler = Scheduler(
        admission,
        ChunkBudget(*settings.chunk_costs, doubling_context(model.config), admission.max_chunk_tokens),
        speculation(head, settings),
        settings.options.max_batch_size,
        pads_rows=bool(graphs),
        sharing=None if runner.shared is None else RowSharing(settings.page_tokens, devices.MIN_SAVED[device]),
        mixing=mixing(model, head, settings, runner.workers.verifier.backend, devices.MIXED_COST[device]),
    )
    return Engine(scheduler, runner, devices.DEPTH[device])


def speculation(head: DraftModel | None, settings: EngineSettings) -> Speculation:
    """What decides about rounds.  ValueError if the drafter can't grow what was asked for."""
    if head is None:
        return Speculation(())
    spec = settings.spec
    assert spec is not None
    seconds = devices.CAPTURE_SECONDS if settings.cuda_graphs else 0.0
    longest = head.trained_length if settings.options.beyond_trained == "stop" else None
    return Speculation(head.shapes(spec, asked=settings.asked_shapes), seconds, longest, spec.is_auto, settings.first_accepted)


def mixing(
    model: Target, head: DraftModel | None, settings: EngineSettings, backend: Backend, least: int | None
) -> Mixing | None:  # fmt: skip
    """How chunks and rounds share passes; None: they take turns.  least: of Mixing; None: nobody's share any.

    They share none where a pass can't be captured as one graph, where rows must not depend on what is computed with them, where
    several ranks or an encoder take part, and where layers read latents or a choice of keys, or keep states by row.  Nor do
    trees, whose many nodes leave little to be gained, and rounds of SpecConfig("auto"), which are timed.
    """
    config = model.config
    is_captured = settings.cuda_graphs and backend.reads_no_lengths and settings.target_backend == "native"
    is_alone = model.group.size == 1 and config.encoder is None and not settings.numerics.is_invariant
    unlike = any(each.keeps_latents or each.recurrent for each in _configs(model, head))
    reads_heads = not unlike and config.max_read is None
    is_chain = head is None or all(shape.is_chain and not shape.is_auto for shape in settings.given_shapes)
    return Mixing(least) if least and is_captured and is_alone and reads_heads and is_chain else None


def plan_pool(model: Target, head: DraftModel | None, settings: EngineSettings) -> PoolPlan:
    """The KV pool for both models: as large as the rank with the least memory has room for.  All ranks must ask."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    memory = pool_bytes(settings.device, settings.options.kv_cache_memory, audit_bytes(model.config, settings, weights))
    memory = model.group.all_reduce_min(memory, settings.device)
    if head is None:
        return pool_plan([model.config], settings, memory)
    needs, options = head.needs, settings.options
    if options.kv_cache_memory == "auto":  # tables are there already; predictions take theirs when the first one comes
        memory -= head.source_bytes(options.max_batch_size + 1, settings.max_seq_len) - head.source_bytes(0, 0)
    return pool_plan(
        [model.config, *needs.models], settings, memory, needs.slot_bytes, needs.page_values * settings.dtype.itemsize
    )


def build_runner(model: Target, head: DraftModel | None, settings: EngineSettings, plan: PoolPlan) -> DeviceRunner:
    """Makes the KV pool, caches, workers and runner of one rank around its models.  ValueError: see `build_engine`."""
    use_numerics(model, settings.numerics)
    model.group.use_one_order(settings.numerics.is_invariant)
    workers = _workers(model, head, settings, plan)
    STARTUP.lap("KV pool")
    # Layers that read their own choice of keys have none in common, and reading together changes the order of sums.  With
    # context parallelism, each row reads its own.
    is_sharded = settings.options.decode_context_parallel_size > 1
    may_share = model.config.max_read is None and not settings.numerics.is_invariant and not is_sharded
    reads_together = settings.options.prefix_caching and may_share
    queries = devices.MAX_QUERIES_A_KEY // model.config.heads_a_key
    shared = SharedPrefix.empty(workers.state.pages.table, queries) if reads_together and queries else None
    # Ranks may hold unequal runs of the vocabulary, but must capture the same chunks.
    max_captured = int(model.group.all_reduce_min(max_captured_cost(model, head), settings.device))
    shapes = head.shapes(settings.spec, asked=settings.asked_shapes) if head and settings.spec else ()
    spec = shapes[0] if len(shapes) == 1 else None
    needed = head.needs.configs if head else ()
    purpose = repr((model.config, type(head).__name__, needed, settings)) if can_rehearse(model, settings) else None
    return DeviceRunner(workers, settings.cuda_graphs, max_captured, shared, purpose, spec)


def can_rehearse(model: Target, settings: EngineSettings) -> bool:
    """Whether passes may be rehearsed (ops/compiling/rehearsal.py): on one GPU, through code that is all our own and torch's.

    An fp8 cache takes its scales from the first values that it stores, and a rehearsal has none.
    """
    ours = settings.attention_backend.name == "triton" and settings.target_backend == "native"
    keeps_scales = settings.options.kv_cache_dtype.startswith("fp8")
    return settings.device.type == "cuda" and ours and model.group.size == 1 and not keeps_scales and compiles_ahead()


def _workers(model: Target, head: DraftModel | None, settings: EngineSettings, plan: PoolPlan) -> Workers:
    backend = make_backend(settings.attention_backend, settings.numerics)
    contexts = contexts_of(settings, plan, model.group)
    longest = settings.longest_encoder_input(model.config)
    cache = _cache(model, model.config, plan, settings, contexts)
    encoder_cache = _encoder_cache(model.config, settings) if longest else None
    rows = settings.options.max_batch_size + 1  # the last row is always padding
    given = model, cache, backend, head.needs.features if head else None
    if plan.states is None or model.config.recurrent is None:
        verifier = TargetVerifier(*given, encoder_cache, contexts)
    else:
        assert encoder_cache is None and not contexts, "recurrent layers have neither"
        verifier = HybridVerifier(*given, *_states(model.config, settings, plan.states, rows))
    # The drafter's numbers don't reach the text, so it runs what is fastest.
    draft_backend = make_backend(settings.attention_backend) if settings.numerics.is_invariant else backend
    drafter = head.worker(_drafter_context(head, cache, draft_backend, settings, plan, rows)) if head else None
    sizes = {"page_size": settings.page_tokens, "groups": len(plan.groups), "encoder_size": longest}
    return Workers(verifier, drafter, BatchState.empty(rows, settings.pages_per_sequence, **sizes, device=settings.device))


def _states(config: ModelConfig, settings: EngineSettings, plan: StatePlan, rows: int) -> tuple[StatePool, StateRows]:
    """The memory of a target's recurrent layers, and what the rows know of it."""
    assert config.recurrent is not None
    sizes = plan.numbers, plan.with_nodes, plan.nodes
    pool = StatePool(config.recurrent, config.recurrent_layers, *sizes, settings.dtype, settings.device)
    return pool, StateRows.empty(rows, plan.nodes, settings.device)


def _drafter_context(
    head: DraftModel, target_cache: KVCache, backend: Backend, settings: EngineSettings, plan: PoolPlan, rows: int
) -> DrafterContext:  # fmt: skip
    spec = settings.spec
    assert spec is not None
    # A round may begin a round's tokens later than the host knows.
    shapes = head.shapes(spec, asked=settings.asked_shapes)
    assert all(head.slots(each) + each.levels + 1 <= settings.lookahead for each in (spec, *shapes)), "it needs more look-ahead"
    return DrafterContext(
        spec=spec,
        shapes=shapes,
        backend=backend,
        caches=tuple(_cache(head, config, plan, settings) for config in head.needs.models),
        target_cache=target_cache,
        slots=plan.num_pages[0] * settings.page_tokens,
        page_size=settings.page_tokens,
        span=plan.groups[0].span,
        max_positions=settings.max_seq_len,
        rows=rows,
        max_pause=MAX_PAUSE if spec.is_auto else 0,
        device=settings.device,
        dtype=settings.dtype,
        states=plan.states and (plan.states.numbers, plan.states.with_nodes, plan.states.nodes),
    )


def contexts_of(settings: EngineSettings, plan: PoolPlan, ranks: Group) -> dict[int, ContextParallel]:
    """How these ranks share each sequence, by group of layers; empty if each keeps whole ones."""
    options = settings.options
    if options.decode_context_parallel_size == 1:
        return {}
    holders = ranks.neighbours(options.decode_context_parallel_size)
    interleave = options.context_interleave or settings.page_size
    sharding = KVSharding(holders.rank, holders.size, settings.page_size, interleave)
    scratches = enumerate(pages * settings.page_size for pages in plan.num_pages)
    has_all_heads = settings.target_backend != "native"
    kept = settings.scratch_room, has_all_heads
    return {number: ContextParallel(holders, sharding, scratch, *kept) for number, scratch in scratches}


def doubling_context(config: ModelConfig) -> float:
    """The context length at which attention doubles a token's cost, because it then takes as long as the matrix products.

    A token's matrix products take two operations for each weight.  Layers that cost the same at every position don't count.
    """
    H, layers = config.hidden_size, map(config.heads_of, range(config.num_layers))
    heads_D = sum((each.num_heads + each.num_kv_heads) * (each.head_dim + each.value_dim) for each in layers)
    products = 2.0 * H * (heads_D + 3 * config.num_layers * config.width_of_mlp)
    growing = config.key_operations
    return math.inf if not growing else devices.ATTENTION_EFFICIENCY * products / growing


def ends_of(tokenizer: Tokenizer, config: ModelConfig) -> tuple[int, ...]:
    """The tokens that end a text: those that the model's files name, and the one with which its chats end an answer.

    Warns where transformers' generate would end other texts, and of ends that a file names in vain.
    """
    turn = unnamed_turn(tokenizer, config)
    added = () if turn is None else (turn,)
    ends = (*config.eos_ids, *added)

    def words(ids: Iterable[int]) -> str:
        return ", ".join(f"{tokenizer.piece(token)!r} ({token})" for token in ids) or "none"

    if added:
        warnings.warn(
            f"the chat template ends an answer with {words(added)}, which the target's files do not name as an end "
            f"(eos_token_id, of generation_config.json where it has one: {words(config.eos_ids)}); texts end there too",
            stacklevel=2,
        )
    by_file = [*config.ends_by_file, ("the tokenizer's eos_token", () if tokenizer.eos is None else (tokenizer.eos,))]
    if in_vain := [f"{name} names {words(ids)}" for name, ids in by_file if {*ids} - {*ends}]:
        warnings.warn(
            f"{' and '.join(in_vain)} as an end of texts, which is none here: the ends are {words(ends)}, as in transformers' "
            "generate, which takes generation_config.json's, then config.json's; nearest thing that works: stop_token_ids, or "
            "all ends in generation_config.json's eos_token_id",
            stacklevel=2,
        )
    says_none = bool(config.ends_by_file) and not config.ends_by_file[0][1]
    if says_none and (more := [token for token in config.eos_ids if token != tokenizer.turn_end()]):
        warnings.warn(
            f"texts end with {words(more)}, as config.json says, though transformers' generate would write on: it reads "
            "generation_config.json alone where there is one, and that names no end",
            stacklevel=2,
        )
    return ends


def unnamed_turn(tokenizer: Tokenizer, config: ModelConfig) -> int | None:
    """The token with which chats end an answer, if the model's files do not name it as an end; else None."""
    turn = tokenizer.turn_end()
    return None if turn is None or turn in config.eos_ids or turn >= config.vocab_size else turn


def grammars_of(tokenizer: Tokenizer, config: ModelConfig, eos_ids: Sequence[int]) -> Grammars:
    """What compiles schemas, expressions and grammars for this target.  Nothing is loaded before the first one."""
    return Grammars(tokenizer.as_json, config.vocab_size, eos_ids)


def free_memory(device: torch.device) -> None:
    """Gives back the memory of models, caches and graphs that nobody holds any more, so that another program can have it."""
    gc.collect()
    if device.type == "cuda":
        with on_device(device):
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # otherwise they stay for the life of the process
            torch.cuda.empty_cache()


def max_captured_cost(model: Target, head: DraftModel | None) -> int:
    """The largest cost of a chunk that is captured: up to it, a GPU computes the chunk faster than a slow host launches it.

    The time to launch a layer does not depend on the layer's size, while the time of its kernels grows with the weights that a
    token is multiplied with: of a stack of experts, those that it chooses.
    """
    layers = sum(config.num_layers for config in (model.config, *(head.needs.configs if head else ())))
    experts = model.config.experts
    share = experts.router.top_k / experts.count if experts else 1.0
    every = {*model.parameters(), *(head.parameters() if head else ())}
    weights = sum(p.numel() * (share if p.dim() > 2 else 1.0) for p in every if p.dim() > 1)
    most = int(layers * devices.LAUNCH_SECONDS_A_LAYER * devices.PRODUCTS_A_SECOND / max(1, weights))
    most = min(most, devices.CHUNK_COST["cuda"][2])
    # Longer chunks of a model that keeps latents run different kernels, depending on how much of the prompt is in the cache.
    return min(most, LIMITS.expand_above) if any(config.keeps_latents for config in _configs(model, head)) else most


def _configs(model: Target, head: DraftModel | None) -> tuple[ModelConfig, ...]:
    """Of all parts that keep something of each token, the target first."""
    return (model.config, *(head.needs.models if head else ()))


def _cache(
    model: nn.Module,
    config: ModelConfig,
    plan: PoolPlan,
    settings: EngineSettings,
    contexts: Mapping[int, ContextParallel] | None = None,
) -> KVCache:
    """The KV cache of one of both models.  config: that model's.  contexts: of a sharded cache, by group of layers."""
    options, slots = settings.options, [pages * settings.page_tokens for pages in plan.num_pages]
    if contexts:
        slots = [context.scratch + context.room for context in contexts.values()]
    kept = options.kv_cache_dtype, settings.dtype, settings.device
    return make_cache(model, config, slots, *kept, plan.groups_of_layers(config), options.int8_queries)


def _encoder_cache(config: ModelConfig, settings: EngineSettings) -> KVCache:
    """The cache of the encoder's texts: a page for each row of a batch, as long as the longest text.  config: the target's."""
    options = settings.options
    kept = options.kv_cache_dtype, settings.dtype, settings.device
    layout = cache_layout(config, *kept, int8_queries=options.int8_queries)
    slots = options.max_batch_size * settings.longest_encoder_input(config)
    return KVCache(layout, (FULL,) * config.num_layers, slots, device=settings.device)
