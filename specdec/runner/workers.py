"""Both models' workers and the batch that they share: all that a runner needs to execute steps.  It knows no step.

Shapes: B rows of the batch, X numbers of a mixture's counter, M mixtures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec.batch.state import BatchState
from specdec.draft.drafter import CachedBySlot, Drafter
from specdec.models.mixtures.counter import ExpertCounter
from specdec.models.mixtures.live import live_rows
from specdec.verify.verifier import TargetVerifier


@dataclass
class Workers:
    """verifier: runs the target.  drafter: None where there is plain decoding only.  state: all rows, then one of padding.

    counters: of the experts that either model's rounds choose; none before somebody has asked.  counts_experts: whether they
    count now.  begun: what work of idle moments has begun and goes on with in the next one; None: nothing.
    """

    verifier: TargetVerifier
    drafter: Drafter | None
    state: BatchState
    counters: Sequence[ExpertCounter] = ()
    counts_experts: bool = False
    begun: Any = None

    @property
    def caches(self) -> Sequence[CachedBySlot]:
        """What both models keep by slot."""
        return (self.verifier.cache, *(self.drafter.caches if self.drafter else ()))

    @property
    def keeps_states(self) -> bool:
        """Whether either model has layers that keep states by row."""
        return self.verifier.keeps_states or (self.drafter is not None and self.drafter.keeps_states)

    def count_experts(self, counts: bool) -> None:
        """From now on rounds count the experts that they choose, or no longer."""
        if counts and not self.counters:
            heads = [] if self.drafter is None or self.drafter.head is None else [self.drafter.head]
            self.counters = [ExpertCounter(model) for model in (self.verifier.model, *heads)]
        for counter in self.counters:
            counter.attach(counts)
        self.counts_experts = counts

    def take_chosen(self) -> dict[nn.Module, int]:
        """What the counters have counted since the last call: see `ExpertCounter.take`.  Where ranks divide experts, it is that
        of the rank of whose experts most were chosen, since the others wait for it.  All ranks ask alike.
        """
        taken = {mixture: chosen for counter in self.counters for mixture, chosen in counter.take().items()}
        own_M = torch.tensor([*taken.values()], dtype=torch.float64, device=self.state.lens_B.device)
        most_M = self.verifier.model.group.all_gather(own_M).amax(0) if taken else own_M
        return {mixture: int(chosen) for mixture, chosen in zip(taken, most_M.tolist())}

    @property
    def expert_counts(self) -> list[Tensor]:
        """What rounds change as they count experts."""
        return [counts_X for counter in self.counters for counts_X in counter.counts] if self.counts_experts else []

    @contextmanager
    def choosing(self, active_B: Tensor, last_B: Tensor | None = None) -> Iterator[None]:
        """Inside, passes are over these rows, and none but their tokens choose experts: see `live_rows`.  What they choose is
        counted, if anything is.
        """
        with ExitStack() as stack:
            stack.enter_context(live_rows(active_B, last_B))
            for counter in self.counters if self.counts_experts else ():
                stack.enter_context(counter.counting())
            yield

    def copy_pages(self, sources_N: Tensor, targets_N: Tensor, group: int) -> None:
        """Copies whole pages of what both models keep, as `KVCache.copy_pages`; where ranks shard sequences, each its part."""
        contexts = self.verifier.contexts
        of_target = contexts[group].sharding.page_size if group in contexts else self.state.page_size
        self.verifier.cache.copy_pages(sources_N, targets_N, of_target, group)
        for cache in self.drafter.caches if self.drafter else ():
            cache.copy_pages(sources_N, targets_N, self.state.page_size, group)

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Makes each target row what its source row was before.  Both are int64, and no target occurs twice."""
        self.state.move_rows(sources_R, targets_R)
        self.verifier.move_rows(sources_R, targets_R)
        if self.drafter:
            self.drafter.move_rows(sources_R, targets_R)

    def stop_drafting(self, rows_R: Tensor) -> None:
        """Lets rows (int64) accept no draft tokens any more."""
        self.state.speculates_B.index_fill_(0, rows_R, 0)
        self.need_drafter().clear_rows(rows_R)

    def clear_rows(self, rows_R: Tensor) -> None:
        """Makes rows (int64) padding."""
        self.state.clear_rows(rows_R)
        if self.drafter:
            self.drafter.clear_rows(rows_R)

    def need_drafter(self) -> Drafter:
        """The drafter, for steps that only occur with one."""
        assert self.drafter is not None, "this step needs a drafter"
        return self.drafter
