"""How fast a step could be: the bytes that it must read, and how fast this machine reads them.

At small batches the speed of decoding is bound by reading weights.  A step can't be faster than reading its bytes at the
machine's bandwidth, except where models are so small that a cache holds them.  This file knows no engine and measures no step.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from specdec.bench.budget import ChosenExperts, RoundBytes
from specdec.config import SpecConfig
from specdec.draft.drafter import DraftModel
from specdec.models.config import ModelConfig
from specdec.models.kv import kv_read_bytes
from specdec.models.linear import Linear
from specdec.models.mixtures.counter import expert_bytes, experts_of, mixtures_of, stored_experts
from specdec.models.mixtures.router import Router
from specdec.models.recurrent.sizes import RuleSizes
from specdec.models.target import Target
from specdec.ops.cuda_graph import on_device

READ_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  # far more than any cache holds
READ_REPEATS = {"cuda": 15, "cpu": 5}
READ_COLUMNS = 16384


def byte_limit(
    model: Target, head: DraftModel | None, spec: SpecConfig | None, batch: int, context: float, kv_cache_dtype: str = "auto",
    sharers: int = 1, chosen: Mapping[nn.Module, float] | None = None,
) -> RoundBytes:  # fmt: skip
    """Bytes of a round of `spec`, or of a plain step if it is None.

    context: committed tokens of each of `batch` sequences.  sharers: ranks that divide the target's keys and values of each.
    chosen: by mixture, how many experts the passes of a round read together; of mixtures that are not in it, all count.
    """
    nodes, chosen = batch * (spec.num_draft_tokens if spec else 1), chosen or {}
    experts = _experts(model, chosen, 1)
    target = _weights(model, nodes) + nodes * _row_bytes(model) + (experts.bytes if experts else 0)
    target_kv = int(batch * _kv_bytes(model, model.config, kv_cache_dtype, context / sharers)) + _state_bytes(
        model, batch, nodes
    )
    step = RoundBytes(target, target_kv, target_experts=experts)
    passes = 0 if spec is None or head is None else head.passes(spec)
    if spec is None or head is None or not passes:
        return step
    rows = batch * (spec.topk * (passes - 1) + passes + 1)  # of all passes: the tree's branches, then the extend's
    once, experts = head.once_bytes(batch * spec.topk), _experts(head, chosen, passes)
    draft = passes * (_weights(head, batch * spec.topk) - once) + once + rows * _row_bytes(head)
    draft += experts.bytes if experts else 0
    draft_kv = int(passes * batch * sum(_kv_bytes(head, config, kv_cache_dtype, context) for config in head.needs.models))
    if (borrowed := head.needs.borrowed) is not None:
        draft_kv += int(passes * batch * _kv_bytes(model, model.config, kv_cache_dtype, context / sharers, borrowed.layers))
    return replace(step, draft=draft, draft_kv=draft_kv, draft_passes=passes, draft_experts=experts)


def read_bandwidth(device: torch.device, size: int | None = None, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that this device reads: the fastest of a few sums over a large tensor, each the median of its repeats.

    size: bytes to read.  None takes more than any cache holds, but never more than half of a GPU's free memory.
    clock: what times a CPU.
    """
    size = READ_BYTES[device.type] if size is None else size
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 2)
    shape, generator = (max(1, size // 4 // READ_COLUMNS), READ_COLUMNS), torch.Generator(device)
    data_RC = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
    ways: tuple[Callable[[], Tensor], ...] = (data_RC.sum, lambda: data_RC.sum(1), lambda: data_RC.amax(1))
    timer = _cuda_seconds if device.type == "cuda" else partial(_host_seconds, clock)
    with on_device(device):
        return _bytes(data_RC) / min(timer(way, READ_REPEATS[device.type]) for way in ways)


def _cuda_seconds(work: Callable[[], Tensor], repeats: int) -> float:
    """Median seconds on the GPU, by events."""
    for _ in range(3):
        work()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs) / 1e3


def _host_seconds(clock: Callable[[], float], work: Callable[[], Tensor], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        start = clock()
        work()
        seconds.append(clock() - start)
    return median(seconds)


def _experts(model: nn.Module, chosen: Mapping[nn.Module, float], passes: int) -> ChosenExperts | None:
    """What `passes` passes read of a model's experts, shared ones aside; None where it has none."""
    mixtures = mixtures_of(model)
    if not mixtures:
        return None
    read = [chosen.get(mixture, passes * experts_of(mixture)) for mixture in mixtures]
    mean = sum(read) / passes / len(mixtures) if all(mixture in chosen for mixture in mixtures) else None
    size = sum(count * expert_bytes(mixture) for count, mixture in zip(read, mixtures))
    return ChosenExperts(round(size), experts_of(mixtures[0]), mean)


def _weights(module: Target | DraftModel, rows: int) -> int:
    """Bytes of all weights but experts that a pass of `rows` rows reads, shared ones once.

    An embedding table counts if it is the output layer too.
    """
    tensors: dict[int, Tensor] = {tensor.data_ptr(): tensor for tensor in module.parameters()}
    tensors |= {part.weight.data_ptr(): part.weight for part in module.modules() if isinstance(part, Router)}  # or a buffer
    # Recurrent layers, whose decays' weights are buffers.
    recurrent = (part for part in module.modules() if isinstance(getattr(part, "sizes", None), RuleSizes))
    tensors |= {buffer.data_ptr(): buffer for part in recurrent for buffer in part.buffers()}
    for mixture in mixtures_of(module):
        for tensor in stored_experts(mixture):
            tensors.pop(tensor.data_ptr(), None)
    matrices = [part for part in module.modules() if isinstance(part, Linear)]
    for table in _tables(module):
        if not any(matrix.holds(table) for matrix in matrices):
            tensors.pop(table.data_ptr(), None)
    once = {next(matrix.parameters()).data_ptr(): matrix for matrix in matrices}  # some read less than what is stored
    unread = sum(sum(map(_bytes, matrix.parameters())) - matrix.read_bytes(rows) for matrix in once.values())
    return sum(map(_bytes, tensors.values())) - unread


def _tables(module: Target | DraftModel) -> list[Tensor]:
    """All embedding tables: of tokens, and in some models of positions, or of tokens for each layer."""
    tables = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
    return list({table.data_ptr(): table for table in tables}.values())


def _row_bytes(module: Target | DraftModel) -> int:
    """Bytes of one row of each embedding table."""
    return sum(_bytes(table[0]) for table in _tables(module))


def _kv_bytes(
    module: nn.Module, config: ModelConfig, kv_cache_dtype: str, context: float, layers: Sequence[int] | None = None
) -> float:
    """Bytes of the keys and values of one sequence that layers read.  layers: as of `kv_read_bytes`."""
    return kv_read_bytes(config, kv_cache_dtype, next(module.parameters()).dtype, context, layers)


def _state_bytes(model: Target, batch: int, nodes: int) -> int:
    """Bytes of one read and one write of all states of recurrent layers, and of what the nodes of a round leave."""
    if (sizes := model.config.recurrent) is None:
        return 0
    dtype = next(model.parameters()).dtype
    layer = 2 * batch * sizes.state_bytes(dtype) + nodes * sizes.node_bytes(dtype)
    return len(model.config.recurrent_layers) * layer


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
