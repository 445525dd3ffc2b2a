"""Runs chunks of prompts through both models: eagerly, or as a CUDA graph where launching takes longer than computing.

A small chunk's kernels end before the host has launched the next ones.  So chunks that cost at most `max_captured` are padded
to a bucket and captured: the first chunk of a bucket runs eagerly without padding, the second eagerly with padding, and the
third is captured, as long as there are fewer than MAX_GRAPHS.

This module knows both models' workers; it knows no request and decides about no page.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.batch.emitted import FirstTokens
from specdec.batch.grammars.masks import BitMasks
from specdec.batch.ragged import ChunkShape, RaggedPrompts, ScoredTokens, flat_chunk, scored_places
from specdec.batch.state import BatchState
from specdec.batch.transfer import to_device
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.grammars import GrammarRows
from specdec.runner.workers import Workers
from specdec.steps import Needs, RunChunk

MAX_GRAPHS = 64  # each graph takes memory; chunks of further shapes run eagerly
EAGER_USES = 2  # of a bucket, before it is captured
MAX_BUCKET_STEP = 128  # tokens between two buckets, at most: matrix products compute whole tiles of rows


class ChunkKey(NamedTuple):
    """What a captured chunk depends on besides its values."""

    shape: ChunkShape
    needs: Needs
    drafted: bool


class PromptRunner:
    """Runs chunks.  A chunk's results are written into the rows of the batch; the first tokens of its prompts are returned.

    max_captured: a threshold for a chunk's cost (see RunChunk), above which the chunk runs eagerly.
    """

    def __init__(self, workers: Workers, capture: bool, max_captured: int, grammars: GrammarRows) -> None:
        self.workers, self.max_captured, self.grammars = workers, max_captured, grammars
        self.graphs = GraphSet(capture)
        self._passes: Counter[ChunkKey] = Counter()  # eager passes; the second one compiles what a capture needs
        self._inputs: dict[ChunkShape, Tensor] = {}

    @property
    def num_first_uses(self) -> int:
        """How many chunks ran eagerly only because their shapes were new.  They are captured at their next use but one."""
        return sum(min(passes, EAGER_USES) for passes in self._passes.values())

    def run(self, chunk: RunChunk) -> FirstTokens:
        """Runs the chunk."""
        exact = self.shape_of(chunk)
        if any(part.scored for part in chunk.parts):
            return self._eager(chunk, exact)
        bucket = bucket_of(exact)
        # A backend that reads lengths on the host needs those of each chunk, so it can't replay another chunk's graph.
        reads_lengths = not self.workers.verifier.backend.reads_no_lengths
        if not self.graphs.enabled or reads_lengths or max(chunk.cost, bucket.tokens) > self.max_captured:
            return self._eager(chunk, exact)
        key = ChunkKey(bucket, chunk.needs, chunk.drafted)
        passes = self._passes[key]
        if key in self.graphs or (passes >= EAGER_USES and chunk.may_capture and len(self.graphs) < MAX_GRAPHS):
            return self.replay(chunk, key)
        # The first pass is without padding, too: an fp8 cache takes its scales from what it stores first.
        first = self._eager(chunk, bucket if passes == 1 else exact)
        self._passes[key] += 1  # counted only now, because a pass that fails may have compiled nothing
        return first

    def shape_of(self, chunk: RunChunk) -> ChunkShape:
        """Its exact shape."""
        return ChunkShape.of(chunk.parts, self.workers.keeps_states)

    def _eager(self, chunk: RunChunk, shape: ChunkShape) -> FirstTokens:
        scored, places = None, scored_places(chunk.parts)
        if places:
            scored = ScoredTokens(to_device(places, self.workers.state.lens_B.device), chunk.tops)
        key = ChunkKey(shape, chunk.needs, chunk.drafted)
        return self._pass(self.to_device(chunk, shape), key, self._masks(chunk, shape), scored)

    def rehearse(self, chunk: RunChunk, padded: bool = False) -> None:
        """Runs the chunk's first pass as a rehearsal (ops/compiling/rehearsal.py) does.  padded: or its second one."""
        exact = self.shape_of(chunk)
        self._eager(chunk, bucket_of(exact) if padded else exact)

    def replay(self, chunk: RunChunk, key: ChunkKey) -> FirstTokens:
        """Runs the chunk as the graph of that key, which is captured if there is none yet.  The chunk must fit its bucket."""
        flat = self.to_device(chunk, key.shape)
        static = self._inputs.setdefault(key.shape, flat)
        if static is not flat:
            static.copy_(flat)
        masks = self._masks(chunk, key.shape)
        return self.graphs.run(key, lambda: self._pass(static, key, masks), [], warm_ups=0)

    def to_device(self, chunk: RunChunk, shape: ChunkShape) -> Tensor:
        """The chunk's flat tensor, padded to that shape."""
        device = self.workers.state.lens_B.device
        flat = flat_chunk(chunk.parts, shape, self.workers.state.rows - 1, pinned=device.type == "cuda")
        return flat.to(device, non_blocking=True)

    def _masks(self, chunk: RunChunk, shape: ChunkShape) -> BitMasks | None:
        return self.grammars.of_chunk(shape.parts, chunk.parts) if chunk.needs.grammar else None

    def _pass(self, flat: Tensor, key: ChunkKey, masks: BitMasks | None, scored: ScoredTokens | None = None) -> FirstTokens:
        """One pass over the chunk `flat`.  Eager calls, captures and replays all run this code."""
        verifier, state = self.workers.verifier, self.workers.state
        prompts = RaggedPrompts.from_flat(flat, key.shape, *prompt_pages(state), encoder_texts=state.encoder_texts)
        sampling = state.sampling_of(prompts.rows_B, key.needs)._replace(masks=masks)
        first, features_TF = verifier.prefill(prompts, sampling, key.needs, key.drafted, scored)
        start_prompts(self.workers, prompts, first, features_TF if key.drafted else None, key.needs)
        return first


def prompt_pages(state: BatchState) -> list[PageTable]:
    """Of each group of layers, the pages that chunks read and write."""
    return [state.of_group(group).prompt_pages for group in range(state.page_table_BGW.shape[1])]


def start_prompts(
    workers: Workers, prompts: RaggedPrompts, first: FirstTokens, features_TF: Tensor | None, needs: Needs
) -> None:
    """Writes into the batch what the target's pass over a chunk has found, and has the drafter read the prompts too.

    features_TF: the target's, of all tokens; None: the drafter does not read these prompts.  needs: the chunk's.
    """
    state, bonus_B = workers.state, first.tokens_B.clamp(min=0)
    if features_TF is not None:
        workers.need_drafter().prefill(state, needs, prompts, bonus_B, features_TF)
    state.start_rows(prompts.rows_B, prompts.lens_B, prompts.final_B, bonus_B)
    if needs.history:
        first_id = workers.verifier.model.vocabulary.first
        state.record(bonus_B[:, None], prompts.final_B.long(), first_id, prompts.rows_B)
    if needs.waits:
        state.waiting.begin_texts(prompts.rows_B, bonus_B, prompts.final_B)


def bucket_of(exact: ChunkShape) -> ChunkShape:
    """The padded shape whose graph serves this one: tokens are rounded up in steps of 16 to 128, about an eighth of them."""
    tokens = exact.tokens
    step = min(MAX_BUCKET_STEP, max(16, 1 << max(0, (tokens - 1).bit_length() - 3)))
    padded = -(-tokens // step) * step
    return ChunkShape(padded, 1 << (exact.parts - 1).bit_length(), padded, False, None, exact.states)
