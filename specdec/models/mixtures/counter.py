"""Counts on the device which experts the tokens of rounds really chose, for whoever asks which bytes a round must read.

A mixture tells its `watch` whom its tokens chose.  Without a counter that is None: nothing is launched, and no byte is held.
Counts are exact inside CUDA graphs, too: all that they take are tensors of fixed shapes.  This file knows no phase of a round.

Shapes: T tokens, K experts of a token (top_k), E experts, X = E + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.mixtures.live import live_now


def mixtures_of(model: nn.Module) -> list[nn.Module]:
    """A model's mixtures, in order: our own, and modules of transformers that hold all experts of a layer, which the function
    registered with it (transformers_backend/experts.py) computes.
    """
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts) or _stacks(module)]


def experts_of(mixture: nn.Module) -> int:
    """E: how many experts this rank holds, or a part of how many."""
    return mixture.gate_up_proj.count if isinstance(mixture, MixtureOfExperts) else len(_stacks(mixture)[0])


def stored_experts(mixture: nn.Module) -> list[Tensor]:
    """All tensors of which each expert has an equal part, as this rank stores them: matrices, scales, biases."""
    if not isinstance(mixture, MixtureOfExperts):
        return _stacks(mixture)
    biases = [bias for bias in (mixture.gate_up_bias_EG, mixture.down_bias_EH) if bias is not None]
    return [*mixture.gate_up_proj.parameters(), *mixture.down_proj.parameters(), *biases]


def expert_bytes(mixture: nn.Module) -> float:
    """Bytes of one expert, as this rank stores it; 0 where the rank has none."""
    return sum(part.nbytes for part in stored_experts(mixture)) / max(1, experts_of(mixture))


def _stacks(module: nn.Module) -> list[Tensor]:
    """The matrices of all experts, and their biases, in a module of transformers; none where it is no mixture."""
    if not hasattr(module, "is_concatenated"):  # which its mixtures are told
        return []
    own: list[Tensor] = list(module.parameters(recurse=False))
    counts = {len(part) for part in own if part.dim() == 3}  # one number, of experts
    return [part for part in own if counts and (part.dim() == 3 or (part.dim() == 2 and len(part) in counts))]


class ExpertCounter:
    """Of each mixture of a model: in how many passes some token of a running row chose each expert.

    mixtures: see `mixtures_of`.
    counts: for each of them, int32 [X]: passes by expert, and at last all passes.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mixtures = mixtures_of(model)
        self.counts = [
            torch.zeros(experts_of(mixture) + 1, dtype=torch.int32, device=next(mixture.parameters()).device)
            for mixture in self.mixtures
        ]
        self._counts = False

    def attach(self, watches: bool) -> None:
        """From now on counts what the mixtures choose, or no longer."""
        for mixture, counts_X in zip(self.mixtures, self.counts):
            mixture.watch = partial(self._count, counts_X) if watches else None  # type: ignore[assignment]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, the tokens of passes count that anybody needs (live.py); outside none do."""
        before, self._counts = self._counts, True
        try:
            yield
        finally:
            self._counts = before

    def take(self) -> dict[nn.Module, int]:
        """Distinct experts of each mixture, added up over all passes since the last call.  Mixtures that no pass ran are not in
        it: their module's code does not say whom it chooses.
        """
        taken = [counts_X.tolist() for counts_X in self.counts]
        for counts_X in self.counts:
            counts_X.zero_()
        return {mixture: sum(counts[:-1]) for mixture, counts in zip(self.mixtures, taken) if counts[-1]}

    def _count(self, counts_X: Tensor, topk_ids_TK: Tensor) -> None:
        if not self._counts:
            return
        live, padding = live_now(), len(counts_X) - 1
        if live is not None:
            topk_ids_TK = torch.where(live.tokens(len(topk_ids_TK))[:, None], topk_ids_TK, padding)
        chosen_X = torch.zeros_like(counts_X).index_fill_(0, topk_ids_TK.flatten(), 1)
        chosen_X[padding:].fill_(1)  # an assignment would copy from the host, which no capture takes
        counts_X += chosen_X
