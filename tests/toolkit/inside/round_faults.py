"""Faults of a round, one for each part, which tests plant on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from specdec.attention.caches.kv_cache import KVCache
from specdec.batch.trees import tables
from specdec.verify import verifier


def positions_off_by_one(original: Callable[..., Any]) -> Callable[..., Any]:
    def tampered(pages: Any, lens_B: Any, tree: Any) -> Any:
        positions_T, slots_BN, suffix = original(pages, lens_B, tree)
        later_N = (torch.arange(tree.num_nodes) > 0).to(positions_T)
        return (positions_T.view(-1, tree.num_nodes) + later_N).flatten(), slots_BN, suffix

    return tampered


def nodes_that_miss_the_root(original: Callable[..., Any]) -> Callable[..., Any]:
    def tampered(suffix: Any, slots_BN: Any, mask_BNN: Any) -> Any:
        mask = mask_BNN.clone()
        mask[:, 1:, 0] = False
        return original(suffix, slots_BN, mask)

    return tampered


def trust_in_the_first_child(original: Callable[..., Any]) -> Callable[..., Any]:
    def tampered(tree: Any, tokens_BN: Any, state: Any) -> Any:
        trusting = tokens_BN.clone()
        if tree.num_nodes > 1:
            trusting[:, 0] = torch.where(state.lens_B % 8 == 0, tree.tokens_BN[:, 1], tokens_BN[:, 0])
        return original(tree, trusting, state)

    return tampered


def greed_for_the_second_best(original: Callable[..., Any]) -> Callable[..., Any]:
    """In plain decoding too, so that both texts are equal."""

    def tampered(logits_RV: Any, sampling: Any, positions_R: Any, *rest: Any) -> Any:
        chosen, second_R = original(logits_RV, sampling, positions_R, *rest), logits_RV.topk(2).indices[:, 1]
        return chosen._replace(tokens_R=torch.where(positions_R % 16 == 0, second_R, chosen.tokens_R))

    return tampered


FAULTS = {
    "position": (tables, "path_tables", positions_off_by_one),
    "mask": (tables, "fill_tree_suffix", nodes_that_miss_the_root),
    "stale keys": (KVCache, "move", lambda original: lambda *args: None),
    "acceptance": (verifier, "accept", trust_in_the_first_child),
    "both sides": (verifier, "choose_tokens", greed_for_the_second_best),
}


@contextmanager
def fault(name: str) -> Iterator[None]:
    owner, part, tamper = FAULTS[name]
    with patch.object(owner, part, tamper(getattr(owner, part))):
        yield
