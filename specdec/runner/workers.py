"""Both models' workers and the batch that they share: all that a runner needs to execute steps.  It knows no step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.batch.state import BatchState
from specdec.draft.drafter import CachedBySlot, Drafter
from specdec.verify.verifier import TargetVerifier


@dataclass
class Workers:
    """verifier: runs the target.  drafter: None where there is plain decoding only.  state: all rows, then one of padding."""

    verifier: TargetVerifier
    drafter: Drafter | None
    state: BatchState

    @property
    def caches(self) -> Sequence[CachedBySlot]:
        """What both models keep by slot."""
        return (self.verifier.cache, *(self.drafter.caches if self.drafter else ()))

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
