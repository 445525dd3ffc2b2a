"""What a runner executes with: both models' workers and the batch they share.  Knows no step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec.batch.packed import PackedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.verify.verifier import TargetVerifier


class Drafter(Protocol):
    """What rounds and prompts need of a drafter; `DraftWorker` is the real one, tests bring others."""

    def draft(self, state: BatchState, spec: SpecConfig) -> DraftTree: ...
    def extend(
        self, state: BatchState, base_lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, features_BEF: Tensor
    ) -> None: ...
    def prefill(self, state: BatchState, prompts: PackedPrompts, first_B: Tensor, features_TF: Tensor) -> None: ...


@dataclass
class Workers:
    """verifier: runs the target.  drafter: None where there is plain decoding only.  state: all rows, and one of padding."""

    verifier: TargetVerifier
    drafter: Drafter | None
    state: BatchState

    @property
    def page_size(self) -> int:
        return self.verifier.page_size

    def need_drafter(self) -> Drafter:
        assert self.drafter is not None, "this step needs a drafter"
        return self.drafter
