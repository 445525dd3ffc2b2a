"""Chunks of prompts through both models: eagerly, or by replaying a graph where launching would take longer than computing.

A small chunk's kernels are over before the host has launched the next ones, so chunks that cost at most `most_captured` are
captured, padded to a bucket: the first chunk of a bucket runs as it is, the second padded, and the third is captured.

Knows both models' workers; no request and no page.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from specdec.batch.packed import ChunkShape, PackedPrompts, flat_chunk
from specdec.batch.sampling import RowSampling
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.workers import Workers
from specdec.steps import RunChunk, SamplingMode

LARGEST_STEP = 128  # between buckets: products compute whole tiles of rows


class Work(NamedTuple):
    """What a captured chunk depends on besides its values."""

    shape: ChunkShape
    mode: SamplingMode
    drafted: bool


class PromptRunner:
    """Runs chunks.  What they compute for the batch is written into its rows; the first tokens come back.

    capture: whether there are CUDA graphs.  most_captured: the cost of a chunk (see RunChunk) above which it runs eagerly.
    """

    def __init__(self, workers: Workers, capture: bool, most_captured: int) -> None:
        self.workers, self.most_captured = workers, most_captured
        self.graphs = GraphSet(capture)
        self._uses: Counter[Work] = Counter()
        self._inputs: dict[ChunkShape, Tensor] = {}
        self._compiled: set[Work] = set()  # whose kernels ran at the bucket's size, so that a capture needs no warm-up

    def run(self, chunk: RunChunk) -> Tensor:
        """[parts] int64 or more: the first token of each prompt that ends, -1 where its logits are not finite; else junk."""
        exact = ChunkShape.of(chunk.parts)
        bucket = bucket_of(exact)
        reads_lengths = not self.workers.verifier.backend.reads_no_lengths  # then the host must know each chunk's own lengths
        if not self.graphs.enabled or reads_lengths or max(chunk.cost, bucket.tokens) > self.most_captured:
            return self._eager(chunk, exact)
        work = Work(bucket, chunk.mode, chunk.drafted)
        self._uses[work] += 1
        if self._uses[work] == 1:  # unpadded too: from the first keys and values it stores, fp8 KV takes its scales
            return self._eager(chunk, exact)
        if work not in self.graphs and not (chunk.may_capture and work in self._compiled):
            self._compiled.add(work)
            return self._eager(chunk, bucket)
        return self.replay(chunk, work)

    def _eager(self, chunk: RunChunk, shape: ChunkShape) -> Tensor:
        return self._pass(self._to_device(chunk, shape), Work(shape, chunk.mode, chunk.drafted))

    def replay(self, chunk: RunChunk, work: Work) -> Tensor:
        """The same by the graph for that work, whose bucket the chunk must fit."""
        flat = self._to_device(chunk, work.shape)
        static = self._inputs.setdefault(work.shape, flat)
        if static is not flat:
            static.copy_(flat)
        return self.graphs.run(work, lambda: self._pass(static, work), [], warm_ups=0)

    def _to_device(self, chunk: RunChunk, shape: ChunkShape) -> Tensor:
        device = self.workers.state.lens_B.device
        flat = flat_chunk(chunk.parts, shape, self.workers.state.rows - 1, pinned=device.type == "cuda")
        return flat.to(device, non_blocking=True)

    def _pass(self, flat: Tensor, work: Work) -> Tensor:
        """One path for eager, capture and replay."""
        verifier, state = self.workers.verifier, self.workers.state
        prompts = PackedPrompts.unpack(flat, work.shape, state.prompt_table_BW, self.workers.page_size)
        sampling = RowSampling(*(each.index_select(0, prompts.rows_B) for each in state.sampling))
        first_B, features_TF = verifier.prefill(prompts, sampling, work.mode, work.drafted)
        bonus_B = first_B.clamp(min=0)
        if work.drafted:
            self.workers.need_drafter().prefill(state, prompts, bonus_B, features_TF)
        state.start_rows(prompts.rows_B, prompts.lens_B, prompts.final_B, bonus_B)
        return first_B


def bucket_of(exact: ChunkShape) -> ChunkShape:
    """The padded shape whose graph serves this one: tokens in steps of an eighth of the next power of two, at most 128."""
    tokens = exact.tokens
    step = min(LARGEST_STEP, max(16, 1 << max(0, (tokens - 1).bit_length() - 3)))
    padded = -(-tokens // step) * step
    return ChunkShape(padded, 1 << (exact.parts - 1).bit_length(), padded, uniform=False, cached=None)
