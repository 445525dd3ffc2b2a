"""Runs a round and a chunk of prompts in one pass over the target, so that its weights are read once: draft, one pass over
nodes and prompts, accept and commit, extend, and the drafter's pass over the prompts.

The whole is one CUDA graph, because the host may take longer to launch it than the device to compute it.  Buckets, padding and
captures are as in prompts.py: the third pass of a bucket is captured, as long as there are fewer than MAX_GRAPHS.

This module knows both models' workers; it knows no request and decides about no page.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from specdec.batch.emitted import FirstTokens, RoundResult
from specdec.batch.ragged import ChunkShape, RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.prompts import EAGER_USES, PromptRunner, prompt_pages, start_prompts
from specdec.runner.workers import Workers
from specdec.steps import Needs, RunMixed

MAX_GRAPHS = 64  # each graph takes memory; passes of further shapes run eagerly
SMALLEST, LARGEST_STEP = 64, 256  # tokens between two buckets
LEAST_PARTS = 4  # an empty part costs next to nothing, and a graph for each number of parts would


class MixedKey(NamedTuple):
    """What a captured pass depends on besides its values.  rows: see BatchState.shape.  spec: None for a plain round."""

    rows: tuple[int, bool]
    spec: SpecConfig | None
    needs: Needs
    shape: ChunkShape
    chunk_needs: Needs
    drafted: bool


class MixedResult(NamedTuple):
    """around: what the round emitted.  first: what the chunk did."""

    around: RoundResult
    first: FirstTokens


class MixedRunner:
    """Runs such passes.  The results are written into the rows of the batch.

    prompts: whose inputs are laid out alike.
    """

    def __init__(self, workers: Workers, capture: bool, prompts: PromptRunner) -> None:
        self.workers, self.prompts = workers, prompts
        self.graphs = GraphSet(capture and workers.verifier.backend.reads_no_lengths)
        self.always_pads = False  # for tests without graphs
        self._passes: Counter[MixedKey] = Counter()  # eager ones; the second one compiles what a capture needs
        self._inputs: dict[ChunkShape, Tensor] = {}

    @property
    def num_first_uses(self) -> int:
        """How many passes ran eagerly only because their shapes were new."""
        return sum(min(passes, EAGER_USES) for passes in self._passes.values())

    def run(self, state: BatchState, step: RunMixed) -> MixedResult:
        """Runs the pass.  state: the round's rows, of the whole batch."""
        key = self._key(state, step)
        passes = self._passes[key]
        if not self.graphs.enabled:
            return self._eager(state, step, key, self.always_pads)
        if key in self.graphs or (passes >= EAGER_USES and len(self.graphs) < MAX_GRAPHS):
            return self._replay(state, step, key)
        result = self._eager(state, step, key, padded=passes == 1)
        self._passes[key] += 1  # only now, because a pass that fails may have compiled nothing
        return result

    def rehearse(self, state: BatchState, step: RunMixed) -> None:
        """Runs the first passes of a bucket as a rehearsal (ops/compiling/rehearsal.py) does."""
        for padded in (False, True):
            self._eager(state, step, self._key(state, step), padded)

    def _key(self, state: BatchState, step: RunMixed) -> MixedKey:
        around, beside = step.round, step.chunk
        shape = bucket_of(ChunkShape.of(beside.parts), around.nodes)
        return MixedKey(state.shape, around.spec, around.needs, shape, beside.needs, beside.drafted)

    def _eager(self, state: BatchState, step: RunMixed, key: MixedKey, padded: bool) -> MixedResult:
        key = key if padded else key._replace(shape=ChunkShape.of(step.chunk.parts))
        return self._pass(state, self.prompts.to_device(step.chunk, key.shape), key)

    def _replay(self, state: BatchState, step: RunMixed, key: MixedKey) -> MixedResult:
        flat = self.prompts.to_device(step.chunk, key.shape)
        static = self._inputs.setdefault(key.shape, flat)
        if static is not flat:
            static.copy_(flat)
        return self.graphs.run(key, lambda: self._pass(state, static, key), [], warm_ups=0)

    def _pass(self, state: BatchState, flat: Tensor, key: MixedKey) -> MixedResult:
        """One pass over the round's rows and the chunk `flat`.  Eager calls, captures and replays all run this code."""
        workers, whole = self.workers, self.workers.state
        verifier, spec, needs = workers.verifier, key.spec, key.needs
        prompts = RaggedPrompts.from_flat(flat, key.shape, *prompt_pages(whole))
        if spec is None:
            tree = DraftTree.chain(state.bonus_B[:, None])
        else:
            tree = workers.need_drafter().draft(state, spec, needs)
        read, logits_BV, features_TF = verifier.read_mixed(state, tree, prompts, spec is not None or key.drafted)
        result = verifier.accept(state, tree, needs, read, with_features=spec is not None)
        if spec is not None:
            workers.need_drafter().extend(state, needs, result.new)
        sampling = whole.sampling_of(prompts.rows_B, key.chunk_needs)
        first = verifier.first_tokens(logits_BV, prompts, sampling, key.chunk_needs)
        start_prompts(workers, prompts, first, features_TF if key.drafted else None, key.chunk_needs)
        return MixedResult(result, first)


def bucket_of(exact: ChunkShape, nodes: int) -> ChunkShape:
    """The padded shape whose graph serves this chunk beside so many nodes, which are rounded up together in steps of 64 to 256
    tokens.
    """
    total = nodes + exact.tokens
    step = min(LARGEST_STEP, max(SMALLEST, 1 << max(0, (total - 1).bit_length() - 2)))
    tokens = -(-total // step) * step - nodes
    parts = max(LEAST_PARTS, 1 << (exact.parts - 1).bit_length())
    return ChunkShape(tokens, parts, tokens, uniform=False, cached=None)
