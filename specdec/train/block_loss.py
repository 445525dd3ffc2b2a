"""The loss of a head that drafts a block of tokens in one pass: from some positions of each row it drafts what follows them.

All drafts of a block are made at once and none reads another, so there is nothing to unroll.  The head learns the target's own
distribution of each drafted token, given the row's true text up to it; later tokens of a block count less.  A DSpark head is
moreover told the true token before each drafted one, learns the share of both distributions that overlaps, which is the
probability that a draft is accepted (Leviathan et al. 2023), and learns to estimate that share.

This file knows the heads' passes over a whole text, and neither files nor optimizers.

Shapes: B rows, T tokens of a row, A anchors of a row (positions of its last known token), S drafted tokens of each anchor,
H hidden size, V draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.draft.block.dflash import DFlashHead, DSparkHead
from specdec.draft.block.peagle import PEagleHead
from specdec.models.target import Target
from specdec.train.unroll import target_pass

ENTROPY, OVERLAP, ESTIMATE = 0.1, 0.9, 1.0  # weights of a DSpark head's three losses, as DeepSpec trains them


class Drafted(NamedTuple):
    """What a head drafts from the anchors of one row, and what it should have drafted.

    logits_ASV: the head's.  teacher_ASV: the target's distribution over the draft vocabulary.
    place_AS: the row's own tokens, as places in the draft vocabulary; without meaning where they do not count.
    counted_AS: bool, whether a token exists and lies in the draft vocabulary.
    estimate_AS: logits of the probability that a token is accepted; None for heads without an estimate.
    """

    logits_ASV: Tensor
    teacher_ASV: Tensor
    place_AS: Tensor
    counted_AS: Tensor
    estimate_AS: Tensor | None


def block_loss(
    model: Target,
    head: PEagleHead | DFlashHead,
    rows_BT: Tensor,
    draft_ids_V: Tensor,
    steps: int,
    decay: float,
    anchors: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """The pair (loss, share_S) of some rows of text.

    loss: in nats for each drafted token, the mean over those that count, summed over places in the block with weight decay**i.
    share_S: for each place, the share of blocks in which the head's most likely token is the row's own.

    rows_BT: token ids; columns after the end of a text hold -1.  draft_ids_V: ids of the draft vocabulary, ascending.
    steps: S.  anchors: A, or all possible ones of a row if it has fewer.  generator: on the CPU, which chooses the anchors.
    """
    B, T = rows_BT.shape
    out = target_pass(model, rows_BT.clamp(min=0), head.config.aux_layers)
    assert out.aux_TA is not None
    hidden_BTH, features_BTF = out.hidden_TH.view(B, T, -1), out.aux_TA.view(B, T, -1)
    weight_VH = model.lm_head.rows(draft_ids_V)
    parts = []
    for ids_T, hidden_TH, features_TF in zip(rows_BT, hidden_BTH, features_BTF, strict=True):
        possible = int((ids_T >= 0).sum()) - 2  # anchors 1 to n - 2 of n tokens have a token after them
        if possible > 0:
            chosen_A = torch.randperm(possible, generator=generator)[:anchors].sort().values.to(ids_T.device) + 1
            parts.append(_drafted(head, ids_T, hidden_TH, features_TF, chosen_A, steps, draft_ids_V, weight_VH))
    if not parts:  # rows of two tokens at most
        return sum((p.sum() * 0 for p in head.parameters() if p.requires_grad), features_BTF.new_zeros(())), torch.zeros(steps)
    counted_NS = torch.cat([part.counted_AS for part in parts])
    losses_NS = torch.cat([_losses(part) for part in parts])
    right_NS = torch.cat([part.logits_ASV.argmax(-1) == part.place_AS for part in parts]) & counted_NS
    totals_S = counted_NS.sum(0).clamp(min=1)
    weights_S = decay ** torch.arange(steps, device=losses_NS.device)
    return (weights_S * (losses_NS * counted_NS).sum(0) / totals_S).sum(), right_NS.sum(0) / totals_S


def _drafted(
    head: PEagleHead | DFlashHead,
    ids_T: Tensor,
    hidden_TH: Tensor,
    features_TF: Tensor,
    anchors_A: Tensor,
    steps: int,
    draft_ids_V: Tensor,
    weight_VH: Tensor,
) -> Drafted:
    """What the head drafts from the anchors of a row."""
    known_T, T = ids_T.clamp(min=0), len(ids_T)
    hidden_ASH = head.drafts(features_TF, known_T, anchors_A, steps)
    at_AS = anchors_A[:, None] + torch.arange(1, steps + 1, device=ids_T.device)
    goal_AS = torch.where(at_AS < T, ids_T[at_AS.clamp(max=T - 1)], -1)
    before_AS = (at_AS - 1).clamp(max=T - 1)
    place_AS = torch.searchsorted(draft_ids_V, goal_AS.clamp(min=0)).clamp(max=len(draft_ids_V) - 1)
    counted_AS = draft_ids_V[place_AS] == goal_AS
    teacher_ASV = F.linear(hidden_TH[before_AS], weight_VH).float().softmax(-1)
    if not isinstance(head, DSparkHead):
        return Drafted(head.logits(hidden_ASH).float(), teacher_ASV, place_AS, counted_AS, None)
    tokens_AS = known_T[before_AS]
    estimate_AS = None if head.confidence is None else head.confidences(hidden_ASH, head.markov.embed(tokens_AS)).float()
    reached_AS = counted_AS.cumprod(1).bool()  # a token after one that can't be drafted is never reached
    return Drafted(head.walk(hidden_ASH, tokens_AS).float(), teacher_ASV, place_AS, reached_AS, estimate_AS)


def _losses(part: Drafted) -> Tensor:
    """[A, S]: the loss of each drafted token."""
    entropy_AS = -(part.teacher_ASV * part.logits_ASV.log_softmax(-1)).sum(-1)
    if part.estimate_AS is None:
        return entropy_AS
    overlap_AS = torch.minimum(part.logits_ASV.softmax(-1), part.teacher_ASV).sum(-1)
    estimate_AS = F.binary_cross_entropy_with_logits(part.estimate_AS, overlap_AS.detach(), reduction="none")
    return ENTROPY * entropy_AS + OVERLAP * (1 - overlap_AS) + ESTIMATE * estimate_AS
