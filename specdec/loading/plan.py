"""What memory a pair takes on a GPU, from configs and headers of files alone: no weight is read, and no GPU is needed.

Of several ranks that share the models, it counts the fullest one.  Weights, keys and values are counted exactly, but for 4
bytes a column of matrices in act order.  What passes and graphs take besides is estimated by rules that were measured
(benchmarks/caches/README.md).  This file knows models' configs, tensors' shapes and engine options.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.batch.grammars.waits import WaitRows
from specdec.batch.tables import TokenTables
from specdec.config import SpecConfig
from specdec.draft.kind import Draft
from specdec.loading.devices import CHUNK_COST
from specdec.loading.load import CheckedPair, check_pair, expert_sharing, require_lossless, warn_of_slow_weights
from specdec.loading.memory import audit_bytes, kv_page_bytes, layer_groups, pass_bytes, plan_states, source_bytes
from specdec.loading.rank_share import heads_of_tensor, share_of_tensor
from specdec.loading.resolve import EngineSettings, check_packing, check_recurrent, experts_line
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import DTYPES
from specdec.models.checkpoints.mtp_names import mtp_prefixes
from specdec.models.config import ModelConfig
from specdec.models.kv import token_bytes_by_kind
from specdec.models.recurrent.sizes import SHARED_OF_MANY_NODES
from specdec.models.schemes.size import Held, all_of_it, matrix_size, quantised_and_dense, quantised_matrices
from specdec.models.schemes.slow import FIRST
from specdec.models.schemes.source import WeightFormat
from specdec.models.sharding import share_of
from specdec.ops.products.formats.lossless import ALIGN_K, ALIGN_N, lossless_bytes
from specdec.options import EngineOptions
from specdec.parallel.shard import Shard

CONTEXT_BYTES = 800 << 20  # of CUDA itself, its libraries and our compiled kernels
MAX_BATCH = 4096  # the most that max_batch_size takes
# What is no matrix of a Linear, or is read by head.
NOT_LOSSLESS = re.compile(
    r"\.experts\.|(\b(mlp|block_sparse_moe|feed_forward|mixer)\.gate|router(\.gate|\.layer|\.proj)?|expert_gate|\bkv_b_proj)\.weight$"
)
# What is kept in float32 in a model of any dtype; of some families the router, too.
FLOAT32, ROUTER = (
    re.compile(r"\.(sinks|attention_sink_bias|per_expert_scale|e_score_correction_bias|expert_bias|A_log|dt_bias|D)$"),
    re.compile(r"\.(mlp\.(gate|router)|router\.proj)\.(weight|bias)$"),
)
NORM = re.compile(r"norm\w*\.weight$")
NOT_KEPT = "rotary_emb.inv_freq", ".router.scale"  # follows from the config; multiplied into another weight
GATED_NORM = ".linear_attn.norm.weight"  # of a family whose other norms are zero-centred
HEAD_NORMS = "norm", "layernorm"  # what checkpoints call norms of queries and of keys, after a letter
# What lies together in one matrix: parts of a projection, and the experts of a layer.
TOGETHER = (
    (re.compile(r"\.experts\.\d+\."), ".experts."),
    (re.compile(r"\b((gate|up)_proj|w[13])$"), "gate_up"),
    (re.compile(r"\b(q_b_proj|indexer\.wq_b)$"), "q_b"),
    (re.compile(r"\b(in_proj_(qkvz?|z)|[qkvg]_proj|q_a_proj|kv_a_proj_with_mqa|indexer\.wk)$"), "in"),
)


class CountedModels(NamedTuple):
    """What is to be counted of a target, and of its drafter if there is one."""

    configs: tuple[ModelConfig, ...]
    weights: tuple[int, ...]  # the bytes of each
    features: int = 0  # how many numbers of each token the drafter reads of the target
    page_bytes: int = 0  # what the drafter keeps of each page besides keys and values
    scratch: int = 0  # values of the largest quantised matrix, which is dequantised for prompts; 0: there is none
    lossless: int = 0  # the bytes of matrices that are kept once more, of both
    called: str = ""  # what the drafter is
    slot_bytes: int = 0  # what the drafter keeps of each token besides
    source_bytes: Callable[[int, int], int] = lambda rows, positions: 0  # see DraftModel.source_bytes


class MemoryPlan(NamedTuple):
    """Bytes by what takes them."""

    context: int
    batch: int
    target_weights: str  # in words, how they are kept
    parts: dict[str, int]
    kv_token: tuple[int, ...]  # of one token, target and drafter
    kv_kinds: dict[str, int]  # of one token, in the target's layers of each kind
    memory: int  # what there is
    longest: int  # the longest context at this batch size that fits; 0: none does
    widest: int  # the largest batch at this context that fits; 0: none does
    ranks: int = 1  # that share the models, each on a GPU; bytes are those of the fullest one
    experts: str = ""  # what a rank holds of a mixture's experts, and why
    refusal: str = ""  # why no GPU runs it, whatever its memory
    passed_over: int = 0  # bytes of the files that images need, and no text
    drafter: str = ""  # what drafts, of what has weights
    draft_weights: str = ""  # in words, how these are kept

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.memory


NOTHING_YET = 0, 0, 0  # memory, longest and widest of a plan, before a memory is asked about


def capability_here() -> tuple[int, int]:
    """Of the GPU here; without one, of the kind that is likeliest meant."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else FIRST


def plan_memories(
    target: str | Path,
    draft: Draft,
    spec: SpecConfig | None,
    options: EngineOptions,
    memories: Sequence[int],
    capability: Callable[[], tuple[int, int]] = capability_here,
) -> list[MemoryPlan]:
    """What this pair takes with these options on the GPU of each rank, and what of it fits on GPUs of so many bytes each.

    spec: None is the drafter's default.  options: max_seq_len and max_batch_size are context and batch; dtype "auto" is the
    checkpoint's own.  capability: of the GPUs.  ValueError as when the pair is loaded.
    """
    if isinstance(options.kv_cache_memory, float):
        raise ValueError(
            f"kv_cache_memory must be 'auto' or bytes where no memory is taken, got {options.kv_cache_memory}; nearest setting "
            f"that works: kv_cache_memory={int(options.kv_cache_memory * memories[0])}"
        )
    here = replace(options, device="cpu", attention="auto", prefix_caching=False, state_cache="auto", pack_weights=False)
    pair = check_pair(target, draft, spec, here)
    config, settings = pair.chosen.config, pair.settings
    settings = _on_a_gpu(pair) if options.dtype == "auto" else settings
    warn_of_slow_weights(pair, settings.dtype, capability)
    settings = settings.with_options(pack_weights=options.pack_weights)
    if options.pack_weights:
        check_packing(settings)
    models = _models(pair, settings)
    if options.pack_weights:
        require_lossless(models.lossless)

    def at(context: int, batch: int) -> dict[str, int]:
        return parts_of(models, replace(settings.with_options(max_batch_size=batch), max_seq_len=context))

    context, batch = settings.max_seq_len, options.max_batch_size
    plan = MemoryPlan(
        context,
        batch,
        str(config.quantization or f"{settings.dtype}".removeprefix("torch.")),
        at(context, batch),
        tuple(sum(kv_page_bytes([c], settings, layer_groups([c], settings))) // settings.page_size for c in models.configs),
        token_bytes_by_kind(models.configs[0], options.kv_cache_dtype, settings.dtype),
        *NOTHING_YET,
        ranks=options.tensor_parallel_size,
        experts=experts_line(config, settings),
        refusal=_refusal(config, settings),
        passed_over=pair.checkpoint.passed_over_bytes,
        **_of_drafter(pair, models),
    )

    def holds(length: int) -> bool:
        """Whether the pool holds a request of that length."""
        one = replace(settings.with_options(max_batch_size=1), max_seq_len=length)
        return not isinstance(options.kv_cache_memory, int) or kv_bytes(models, one) <= options.kv_cache_memory

    def on(memory: int) -> MemoryPlan:
        longest = largest(lambda n: sum(at(n, batch).values()) <= memory and holds(n), config.max_position)
        widest = largest(lambda n: sum(at(context, n).values()) <= memory, MAX_BATCH)
        return plan._replace(memory=memory, longest=longest, widest=widest)

    return [on(memory) for memory in memories]


def _of_drafter(pair: CheckedPair, models: CountedModels) -> dict[str, Any]:
    """What a plan says of a drafter with weights."""
    return {"drafter": models.called, "draft_weights": pair.drafter.stored_as if pair.drafter else ""}


def _refusal(config: ModelConfig, settings: EngineSettings) -> str:
    """What loading says on any GPU, of what a CPU runs."""
    try:
        if config.recurrent is not None:
            check_recurrent(settings, config.recurrent, SHARED_OF_MANY_NODES)
    except ValueError as error:
        return str(error)
    return ""


def _on_a_gpu(pair: CheckedPair) -> EngineSettings:
    """The settings of a pair that runs in the checkpoint's own dtype."""
    settings = replace(pair.settings, dtype=DTYPES.get(pair.chosen.config.dtype or "", torch.bfloat16))
    return replace(settings, experts=expert_sharing(settings, pair.chosen, pair.checkpoint))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where every smaller one does too; 0 if 1 does not."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def parts_of(models: CountedModels, settings: EngineSettings) -> dict[str, int]:
    """Bytes by what takes them, for a full batch of longest sequences, or with keys and values of kv_cache_memory."""
    options, dtype = settings.options, settings.dtype.itemsize
    kv = options.kv_cache_memory if isinstance(options.kv_cache_memory, int) else kv_bytes(models, settings)
    target, queries = models.configs[0], options.max_batch_size * settings.most_nodes
    sources = models.source_bytes(options.max_batch_size + 1, settings.max_seq_len)
    chunk = min(CHUNK_COST["cuda"][2], options.max_batch_size * settings.max_seq_len)
    return {
        "weights of the target": models.weights[0],
        **({f"weights of the {models.called}": models.weights[1]} if len(models.weights) > 1 else {}),
        **({"lossless copies of weights": models.lossless} if options.pack_weights else {}),
        "keys and values": kv,
        **({"texts that drafts come of": sources} if sources else {}),
        **({"states of recurrent layers": states.bytes} if (states := plan_states(models.configs, settings)) else {}),
        "a round": pass_bytes(target, queries, queries, models.features, dtype),
        "a chunk of prompts": pass_bytes(target, chunk, options.max_batch_size, models.features, dtype)
        + models.scratch * dtype,
        "rules of requests for single tokens": rules_bytes(target.vocab_size, options),
        **({"passes of the audit": size} if (size := audit_bytes(target, settings, models.weights[0])) else {}),
        "CUDA itself": CONTEXT_BYTES,
    }


def rules_bytes(vocab_size: int, options: EngineOptions) -> int:
    """Of the tables that the first request with such rules, or with a grammar that begins later, makes for all rows."""
    own = -(-vocab_size // options.tensor_parallel_size)
    row = [*TokenTables.neutral(1, own, "meta").tensors(), *WaitRows.empty(1, vocab_size, "meta").tensors()]
    return (options.max_batch_size + 1) * sum(tensor.nbytes for tensor in row)


def kv_bytes(models: CountedModels, settings: EngineSettings) -> int:
    """Of the pool for a full batch of longest sequences, and of an encoder's texts."""
    groups = layer_groups(models.configs, settings)
    pages = [settings.options.max_batch_size * (group.ring or settings.pages_per_sequence) + 1 for group in groups]
    kv = sum(count * size for count, size in zip(pages, kv_page_bytes(models.configs, settings, groups), strict=True))
    kv += models.slot_bytes * settings.page_tokens * pages[0]
    return kv + models.page_bytes * pages[0] + source_bytes(models.configs[0], settings)


def _models(pair: CheckedPair, settings: EngineSettings) -> CountedModels:
    own, drafter, ranks = pair.checkpoint, pair.drafter, settings.options.tensor_parallel_size
    configs = tuple(share_of(config, Shard(0, ranks)) for config in pair.configs)
    config, mtp = configs[0], mtp_prefixes(pair.chosen.config)
    without = {name for name in own.names() if name.startswith(mtp)} | ({"lm_head.weight"} if config.tie_embeddings else set())
    held = share_of_tensor(config)
    weights, scratch = tensor_bytes(own, config, settings.dtype, without), scratch_values(own, without, held)
    packs = settings.options.pack_weights
    lossless = lossless_bytes_of(own, without, held, config.tie_embeddings) if packs else 0
    if drafter is None:
        return CountedModels(configs, (weights,), scratch=scratch, lossless=lossless)
    model = drafter.model
    if drafter.checkpoint is None:  # one without files reads no weights
        counted = CountedModels(configs, (weights,), scratch=scratch, lossless=lossless)
        return counted._replace(slot_bytes=model.needs.slot_bytes, source_bytes=model.source_bytes)
    without, layers = drafter.unkept(own), share_of(drafter.model.needs.configs[0], Shard(0, ranks))
    drafted = tensor_bytes(drafter.checkpoint, layers, settings.dtype, without)
    drafted += drafter.added_values * settings.dtype.itemsize
    lossless += lossless_bytes_of(drafter.checkpoint, without, share_of_tensor(layers)) if packs else 0
    values = drafter.model.needs.page_values * settings.dtype.itemsize
    scratch = max(scratch, scratch_values(drafter.checkpoint, without, share_of_tensor(layers)))
    both, features = (weights, drafted), drafter.model.feature_size
    given = configs, both, features, values, scratch, lossless, drafter.called
    return CountedModels(*given, model.needs.slot_bytes, model.source_bytes)


def tensor_bytes(checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, without: set[str]) -> int:
    """The bytes of a rank's share of a checkpoint's tensors in that dtype, but for those that the model does not keep.

    config: of the layers that they are of, the first rank's share.  A file has one norm for all query heads, and one for all
    key heads; the model keeps a copy for each head (HeadsRMSNorm).
    """
    names = [name for name in checkpoint.names() if name not in without and not name.endswith(NOT_KEPT)]
    formats, others = quantised_and_dense(checkpoint, names)
    own = [name for name in others if not _is_spare_bias(name, formats, config)]
    held = share_of_tensor(config)
    quantised = sum(matrix_size(format, checkpoint, name, held).bytes for name, format in formats.items())
    norms = {f"{heads}_{name}" for heads in "qk" for name in HEAD_NORMS} if config.qk_norm else set()
    float32 = config.experts is not None and config.experts.kept_float32

    def size(name: str) -> int:
        is_above_one = config.zero_centred_norms and NORM.search(name) and not name.endswith(GATED_NORM)
        is_float32 = FLOAT32.search(name) or (float32 and ROUTER.search(name)) or is_above_one
        numbers = math.prod(held(name, checkpoint.shape(name)))
        norm, heads = name.removesuffix(".weight").rpartition(".")[2], heads_of_tensor(config, name)
        copies = 1 if norm not in norms else heads.num_heads if norm.startswith("q") else heads.num_kv_heads
        return numbers * copies * (4 if is_float32 else dtype.itemsize)

    return quantised + sum(map(size, own))


def lossless_bytes_of(checkpoint: Checkpoint, without: set[str], held: Held, tied: bool = False) -> int:
    """The bytes of lossless copies of a checkpoint's matrices in 12 bits, but for their rare outliers, which no header tells.

    held: see `matrix_size`.  tied: whether the embedding table is the output layer's matrix too.
    """
    names = [name for name in checkpoint.names() if name not in without and name.endswith(".weight")]
    formats = quantised_matrices(checkpoint, names)
    total = 0
    for name in names:
        matrix, shape = name.removesuffix(".weight"), held(name, checkpoint.shape(name))
        is_table = "embed" in matrix.rpartition(".")[2] and not tied
        is_matrix = len(shape) == 2 and matrix not in formats and not is_table and not NOT_LOSSLESS.search(name)
        if is_matrix and shape[0] % ALIGN_N == 0 and shape[1] % ALIGN_K == 0:
            total += lossless_bytes(*shape)
    return total


def _is_spare_bias(name: str, formats: dict[str, WeightFormat], config: ModelConfig) -> bool:
    """Whether it is a bias that a format writes as zeros, of a matrix that has none in the model."""
    matrix, _, ending = name.rpartition(".")
    if ending != "bias" or matrix not in formats or "bias" not in formats[matrix].may_end:
        return False
    part = matrix.rpartition(".")[2]
    if part == "o_proj":
        return not config.o_bias
    return not (config.mlp_bias if part in ("gate_proj", "up_proj", "down_proj") else config.qkv_bias)


def scratch_values(checkpoint: Checkpoint, without: set[str], held: Held = all_of_it) -> int:
    """How many values the largest matrix has that is dequantised for many rows, all its parts together; 0: there is none."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, format in quantised_matrices(checkpoint, [name for name in checkpoint.names() if name not in without]).items():
        whole = name
        for part, together in TOGETHER:
            whole = part.sub(together, whole)
        size = matrix_size(format, checkpoint, name, held)
        sizes[whole] += size.values if size.is_dequantised else 0
    return max(sizes.values(), default=0)
