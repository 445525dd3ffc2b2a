"""What one round does on the device: draft -> build tree -> verify -> accept -> commit -> extend, and which of it is captured.

Knows both models' workers and the batch as tensors; no request, page or host-side length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.batch.packed import PackedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import GraphMode, SpecConfig
from specdec.ops.cuda_graph import GraphSet
from specdec.runner.phase_clock import PhaseClock
from specdec.verify.verifier import SamplingMode, TargetVerifier, VerifyResult


class Drafter(Protocol):
    """What a round needs of a draft; `DraftWorker` is the real one, tests bring others."""

    def draft(self, state: BatchState, spec: SpecConfig) -> DraftTree: ...
    def extend(
        self, state: BatchState, base_lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, features_BEF: Tensor
    ) -> None: ...
    def prefill(self, state: BatchState, prompts: PackedPrompts, features_TF: Tensor) -> None: ...


class Round(NamedTuple):
    """emitted_BX: int64, the accepted count of each row and then its tokens.  drafted, depths: size of the tree."""

    emitted_BX: Tensor
    drafted: int
    depths: int


class RoundRunner:
    """Runs rounds, eagerly or by replay; one path serves both.

    While `clock` measures, phases run one by one, in "round" mode too (as graphs of their own).
    """

    def __init__(self, mode: GraphMode, device: torch.device) -> None:
        self.mode = mode
        self.round_graphs = GraphSet(mode == "round")
        self.phase_graphs = GraphSet(bool(mode))
        self.clock = PhaseClock(device)

    @property
    def pads_rows(self) -> bool:
        """Whether batches are padded to buckets, for which graphs are captured."""
        return bool(self.mode)

    def plain(self, verifier: TargetVerifier, state: BatchState, mode: SamplingMode) -> Round:
        """One step of autoregressive decoding: a tree of the root alone, which needs no draft and no features."""

        def decode() -> Round:
            tree = DraftTree.chain(state.bonus_B[:, None])
            return _round(verifier.verify(state, tree, mode, with_features=False), tree)

        with self.clock.phase("decode"):
            return self.phase_graphs.run(("decode", state.shape, mode), decode, [state.lens_B, state.bonus_B])

    def paused(self, verifier: TargetVerifier, state: BatchState, mode: SamplingMode) -> Round:
        """One step of autoregressive decoding that keeps what the draft will need to `catch_up`."""

        def decode() -> Round:
            tree = DraftTree.chain(state.bonus_B[:, None])
            result = verifier.verify(state, tree, mode)
            assert result.features_BEF is not None
            state.keep_pending(result.tokens_BE[:, 0], result.features_BEF[:, 0])
            return _round(result, tree)

        with self.clock.phase("decode"):
            changed = [state.lens_B, state.bonus_B, state.pending_B]
            return self.phase_graphs.run(("paused", state.shape, mode), decode, changed)

    def catch_up(self, drafter: Drafter, state: BatchState) -> None:
        """Shows the draft all tokens of a pause at once; rows that entered since it began have nothing to see."""

        def extend() -> None:
            has_some_B1 = state.pending_B[:, None] > 0
            before = [tensor.clone() for tensor in _first_level(state)]
            base_lens_B = state.lens_B - state.pending_B.int()
            last_B = (state.pending_B - 1).clamp(min=0)
            drafter.extend(state, base_lens_B, state.pending_tokens_BP, last_B, state.pending_features_BPF)
            for tensor, old in zip(_first_level(state), before, strict=True):
                tensor.copy_(torch.where(has_some_B1, tensor, old))
            state.pending_B.zero_()

        with self.clock.phase("extend"):
            self.phase_graphs.run(("catch up", state.shape), extend, [state.pending_B, *_first_level(state)])

    def speculative(
        self, verifier: TargetVerifier, drafter: Drafter, state: BatchState, spec: SpecConfig, mode: SamplingMode
    ) -> Round:
        """One round.  Lengths, bonus tokens and first levels in `state` move on."""
        if self.mode != "round" or self.clock.enabled:
            return self._phases(verifier, drafter, state, spec, mode, self.phase_graphs.run)
        changed = [state.lens_B, state.bonus_B, *_first_level(state)]

        def whole() -> Round:
            return self._phases(verifier, drafter, state, spec, mode, lambda key, phase, changed: phase())

        return self.round_graphs.run(("round", state.shape, spec, mode), whole, changed)

    def _phases(
        self,
        verifier: TargetVerifier,
        drafter: Drafter,
        state: BatchState,
        spec: SpecConfig,
        mode: SamplingMode,
        run: Callable[..., Any],
    ) -> Round:
        key = (state.shape, spec)
        with self.clock.phase("draft"):
            tree = run(("draft", *key), lambda: drafter.draft(state, spec), [])

        def verify() -> tuple[VerifyResult, Round]:
            result = verifier.verify(state, tree, mode)
            return result, _round(result, tree)

        with self.clock.phase("verify"):
            result, done = run(("verify", *key, mode), verify, [state.lens_B, state.bonus_B])

        def extend() -> None:
            drafter.extend(state, result.base_lens_B, result.tokens_BE, result.accepted_B, result.features_BEF)

        with self.clock.phase("extend"):
            run(("extend", *key, mode), extend, _first_level(state))
        return done


def _first_level(state: BatchState) -> list[Tensor]:
    return [state.level1_tokens_BK, state.level1_logp_BK, state.level1_hidden_BH]


def _round(result: VerifyResult, tree: DraftTree) -> Round:
    emitted_BX = torch.cat((result.accepted_B[:, None], result.tokens_BE), dim=1)
    return Round(emitted_BX, tree.num_nodes - 1, tree.max_depth)
