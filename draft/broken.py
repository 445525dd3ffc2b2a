"""Parts of a head's files that may be broken: what stands in for them when a head is looked at (smoke.py), and what is wrong at
sight.

A table or a map that is not the one that a head was trained with leaves it useless, and nothing contradicts it: files of random
or empty embeddings have the right shapes.  Most heads begin their training with rows of their target, so the target's tell what
they were.  This module knows heads, and no texts.

Shapes: H hidden, V draft vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.draft.head import DraftHead
from specdec.draft.smoke import HeadLook, Misreading, TargetPass, variant
from specdec.models.layers import RMSNorm
from specdec.models.linear import Linear
from specdec.models.target import Target


class FilesLook(HeadLook):
    """Of heads with files of their own."""

    def repairs(self, head: DraftHead, target: Target, seen: TargetPass) -> Iterator[Misreading]:
        return replaced_parts(head, target, seen.chosen_P)

    def empty(self, head: DraftHead) -> str:
        return zeros_in(head)

    def doubt(self, head: DraftHead) -> str:
        return map_of_zeros(head)


def replaced_parts(head: Any, target: Target, chosen_P: Tensor) -> Iterator[Misreading]:
    """The head with the target's rows in place of its own, and with another vocabulary map.  chosen_P: the target's tokens."""
    spec = head.config
    if spec.model.hidden_size != target.config.hidden_size:
        return
    if spec.own_embeddings:
        other = variant(head, embed_tokens=target.embed_tokens)
        yield Misreading("the target's embeddings in place of its own (embed_tokens)", other)
    if spec.own_lm_head:
        rows_VH = target.lm_head.rows(_ids_of(head, target))
        rows = nn.Parameter(rows_VH.to(target.embed_tokens.weight.dtype), requires_grad=False)
        yield Misreading("the target's rows in place of its own lm_head", variant(head, lm_head=Linear.of(rows)))
    if spec.draft_ids is not None and spec.own_lm_head:
        state = ", which is all zeros," if head.d2t_V is None else ""
        other = variant(head)
        other.d2t_V = _map_by_rows(head, target, chosen_P.unique())
        yield Misreading(f"d2t{state} made anew by the likeness of lm_head's rows to the target's", other)


def map_of_zeros(head: DraftHead) -> str:
    """What a `d2t` of zeros means; empty: it has others.  It may be meant, where the first ids are the most frequent tokens."""
    if head.config.draft_ids is None or head.d2t_V is not None:
        return ""
    return f"its d2t is all zeros, so it drafts the first {head.config.draft_vocab_size} ids of the vocabulary alone"


def zeros_in(head: DraftHead) -> str:
    """Which weights are all zeros; empty: none is."""
    zeros = list(_zeros(head))
    return f"nothing but zeros stands in {', '.join(zeros[:3])}{' and others' if len(zeros) > 3 else ''}" if zeros else ""


def _zeros(head: DraftHead) -> Iterator[str]:
    """The names of matrices and norms that are all zeros."""
    for name, module in head.named_modules():
        if isinstance(module, RMSNorm) and not bool(module.weight.any()):
            yield name
        if not isinstance(module, Linear) or module.weight is None:
            continue
        for part, rows in module.parts.rows.items():
            if not bool(module.weight[rows].any()):
                yield f"{name.rpartition('.')[0]}.{part}".lstrip(".") if part else name


def _ids_of(head: DraftHead, target: Target) -> Tensor:
    """The target's id of each draft id, as the head was read."""
    ids_V = torch.arange(head.config.draft_vocab_size, dtype=torch.int64, device=target.embed_tokens.weight.device)
    return ids_V if head.d2t_V is None else ids_V + head.d2t_V


def _map_by_rows(head: DraftHead, target: Target, ids_R: Tensor) -> Tensor:
    """Offsets [V] that take to each of these ids the draft id whose row is most like the target's; the others lead nowhere."""
    own_VH = head.lm_head.rows(torch.arange(head.config.draft_vocab_size, dtype=torch.int64, device=ids_R.device))
    likeness_RV = F.normalize(target.lm_head.rows(ids_R).float(), dim=-1) @ F.normalize(own_VH.float(), dim=-1).T
    best_R, at_R = (x.tolist() for x in likeness_RV.max(-1))
    ids_V = torch.full((len(own_VH),), -1, dtype=torch.int64, device="cpu")
    for _, at, token in sorted(zip(best_R, at_R, ids_R.tolist(), strict=True)):  # of two tokens, the one that is more like it
        ids_V[at] = token
    return (ids_V - torch.arange(len(ids_V), dtype=torch.int64, device="cpu")).to(ids_R.device)
