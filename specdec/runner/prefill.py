"""Prompts through both models: eagerly, or by replaying a graph where launching would take longer than computing.

A short prompt's kernels are over before the host has launched the next ones, so packs of few tokens are captured, padded to
buckets, once a bucket came often enough to be worth it.  Knows both models' workers; no request and no page.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from specdec.batch.packed import PackedPrompts
from specdec.batch.state import BatchState
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.rounds import Drafter
from specdec.verify.verifier import SamplingMode, TargetVerifier

MAX_CAPTURED_TOKENS = 256  # of a bucket; beyond, a GPU computes for longer than a host launches
EAGER_USES = 1  # of a bucket before it is captured, which takes as long as a few eager passes

Bucket = tuple[int, int]  # tokens, rows
Key = tuple[Bucket, SamplingMode, bool]  # and whether the draft sees the prompts too


class PrefillRunner:
    """Runs packed prompts; the first tokens come back, bonus tokens and the draft's first levels stand in `state`."""

    def __init__(self, capture: bool) -> None:
        self.graphs = GraphSet(capture)
        self._uses: Counter[Key] = Counter()
        self._static: dict[Bucket, tuple[BatchState, PackedPrompts]] = {}

    def run(
        self, verifier: TargetVerifier, drafter: Drafter | None, state: BatchState, prompts: PackedPrompts, mode: SamplingMode
    ) -> Tensor:
        """First tokens [B].  state: the prompts' rows, in their order."""
        bucket = _bucket(prompts)
        if not (self.graphs.enabled and verifier.backend.reads_no_lengths and bucket[0] <= MAX_CAPTURED_TOKENS):
            return _prefill(verifier, drafter, state, prompts, mode)
        key = bucket, mode, drafter is not None
        self._uses[key] += 1
        if self._uses[key] <= EAGER_USES:  # unpadded too: from the first keys and values it stores, fp8 KV takes its scales
            return _prefill(verifier, drafter, state, prompts, mode)
        return self._replay(key, verifier, drafter, state, prompts)

    def _replay(
        self, key: Key, verifier: TargetVerifier, drafter: Drafter | None, state: BatchState, prompts: PackedPrompts
    ) -> Tensor:
        bucket, mode, _ = key
        if bucket not in self._static:
            tokens, rows = bucket
            like = state.padding(rows)
            self._static[bucket] = like, PackedPrompts.padding(tokens, like.page_table_BW, prompts.page_size)
        static, padded = self._static[bucket]
        B = state.rows
        for target, source in zip(static.tensors(), state.tensors(), strict=True):
            target[:B].copy_(source)
        padded.fill(prompts)
        self.graphs.run(key, lambda: _prefill(verifier, drafter, static, padded, mode), [])
        for target, source in zip(state.tensors(), static.tensors(), strict=True):
            target.copy_(source[:B])
        return state.bonus_B


def _prefill(
    verifier: TargetVerifier, drafter: Drafter | None, state: BatchState, prompts: PackedPrompts, mode: SamplingMode
) -> Tensor:
    first_B, features_TF = verifier.prefill(prompts, state.sampling, mode, drafter is not None)
    state.bonus_B.copy_(first_B)
    if drafter is not None:
        drafter.prefill(state, prompts, features_TF)
    return state.bonus_B


def _bucket(prompts: PackedPrompts) -> Bucket:
    """Powers of two.  One token more than there is: rows of padding end in a token of padding."""
    tokens, rows = prompts.ids_T.shape[0], prompts.last_B.shape[0]
    return max(16, 1 << tokens.bit_length()), 1 << (rows - 1).bit_length()
