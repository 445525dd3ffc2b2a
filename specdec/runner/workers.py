"""Both models' workers and the batch that they share: all that a runner needs to execute steps.  It knows no step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec.attention.caches.kv_cache import KVCache
from specdec.batch.packed import PackedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.steps import Needs
from specdec.verify.verifier import TargetVerifier


class Drafter(Protocol):
    """What rounds and prompts need of a drafter.  `DraftWorker` implements it, and so do the drafters of tests.

    draft: grows a tree for each row from the row's first level.
    extend: runs over the accepted tokens with the target's features, and leaves the next first level in `state`.
    prefill: runs over a chunk of prompts with the target's features.
    needs: how the target will choose the rows' tokens.
    """

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree: ...
    def extend(
        self, state: BatchState, needs: Needs, base_lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, features_BEF: Tensor
    ) -> None: ...
    def prefill(
        self, state: BatchState, needs: Needs, prompts: PackedPrompts, first_B: Tensor, features_TF: Tensor
    ) -> None: ...


@dataclass
class Workers:
    """verifier: runs the target.  drafter: None where there is plain decoding only.  state: all rows, then one of padding.

    caches: those of both models.
    """

    verifier: TargetVerifier
    drafter: Drafter | None
    state: BatchState
    caches: tuple[KVCache, ...]

    def need_drafter(self) -> Drafter:
        """The drafter, for steps that only occur with one."""
        assert self.drafter is not None, "this step needs a drafter"
        return self.drafter
