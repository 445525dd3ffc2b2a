"""The loss of a head that drafts a block of tokens in one pass: from some positions of each row it drafts what follows them.

All drafts of a block are made at once and none reads another, so there is nothing to unroll.  The head learns the target's own
distribution of each drafted token, given the row's true text up to it; later tokens of a block count less.  A DSpark head is
moreover told the true token before each drafted one, learns the share of both distributions that overlaps, which is the
probability that a draft is accepted (Leviathan et al. 2023), and learns to estimate that share.  A DFlash2 head is told the
same token, and learns the target's distribution a second time, with its choice among its candidates.

This file knows the heads' passes over a whole text, and neither files nor optimizers.

Shapes: B rows, T tokens of a row, A anchors of a row (positions of its last known token), S drafted tokens of each anchor,
H hidden size, V draft vocabulary, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.draft.block.dflash2.head import DFlash2Head
from specdec.draft.block.head import BlockHead
from specdec.train.states import TargetStates

ENTROPY, OVERLAP, ESTIMATE = 0.1, 0.9, 1.0  # weights of a DSpark head's three losses, as DeepSpec trains them


class Anchors(NamedTuple):
    """chosen_BA: int64, the places in each row from which it is drafted.  exists_BA: bool; a short row has fewer."""

    chosen_BA: Tensor
    exists_BA: Tensor


class DraftedBlocks(NamedTuple):
    """What a head drafts from the anchors of some rows, and what it should have drafted.

    logits_BASV: the head's.  teacher_BASV: the target's distribution over the draft vocabulary.
    place_BAS: the rows' own tokens, as places in the draft vocabulary; without meaning where they do not count.
    counted_BAS: bool, whether the target wrote a token there, and it lies in the draft vocabulary.
    exists_BAS: bool, whether the target wrote a token there.
    estimate_BAS: logits of the probability that a token is accepted; None for heads without an estimate.
    chosen_BASV: of a DFlash2 head, its scores of candidates, and -inf for other tokens; None for other kinds.
    """

    logits_BASV: Tensor
    teacher_BASV: Tensor
    place_BAS: Tensor
    counted_BAS: Tensor
    exists_BAS: Tensor
    estimate_BAS: Tensor | None
    chosen_BASV: Tensor | None = None


def block_loss(
    head: BlockHead,
    seen: TargetStates,
    weight_VH: Tensor,
    draft_ids_V: Tensor,
    steps: int,
    decay: float,
    places: Anchors,
) -> tuple[Tensor, Tensor]:
    """The pair (loss, counts_2S) of some rows of text.

    loss: in nats for each drafted token, the mean over those that count, summed over places in the block with weight decay**i.
    counts_2S: as of `unroll.head_loss`; heads that read their drafts are told the rows' tokens, which right chains hold too.

    draft_ids_V: ids of the draft vocabulary, ascending.  weight_VH: their rows of the target's language-model head.
    steps: S.  places: of `choose_anchors`.
    """
    part = _drafted(head, seen, places.chosen_BA, steps, draft_ids_V, weight_VH)
    counted_BAS = part.counted_BAS & places.exists_BA[..., None]
    drafted_BASV = part.logits_BASV if part.chosen_BASV is None else part.chosen_BASV
    right_BAS = ((drafted_BASV.argmax(-1) == part.place_BAS) & counted_BAS).cumprod(-1).bool()
    tried_BAS = part.exists_BAS & places.exists_BA[..., None] & F.pad(right_BAS[..., :-1], (1, 0), value=True)
    totals_S = counted_BAS.sum((0, 1)).clamp(min=1)
    weights_S = decay ** torch.arange(steps, dtype=torch.float32, device=totals_S.device)
    losses_S = torch.where(counted_BAS, _losses(part), 0.0).sum((0, 1))
    return (weights_S * losses_S / totals_S).sum(), torch.stack((right_BAS.sum((0, 1)), tried_BAS.sum((0, 1))))


def choose_anchors(goals_BT: Tensor, anchors: int, generator: torch.Generator) -> Anchors:
    """Random anchors of each row, ascending; all possible ones of a row if it has fewer.

    goals_BT: of TargetStates, on the CPU as the generator is.  Of a row of n tokens these are n - 2, from 1 on, since an anchor
    has a token before it and one after it that the target wrote.
    """
    B, T = goals_BT.shape
    drawn_BT = torch.rand(B, T, generator=generator, dtype=torch.float32, device="cpu")
    possible_BT = torch.zeros_like(goals_BT, dtype=torch.bool)
    possible_BT[:, 1:-1] = goals_BT[:, 2:] >= 0
    drawn_BT = torch.where(possible_BT, drawn_BT, -1.0)
    drawn_BA, chosen_BA = drawn_BT.topk(min(anchors, T - 2), dim=1)
    chosen_BA, order_BA = chosen_BA.clamp(min=1).sort(dim=1)
    return Anchors(chosen_BA, (drawn_BA >= 0).gather(1, order_BA))


def _drafted(
    head: BlockHead, seen: TargetStates, anchors_BA: Tensor, steps: int, draft_ids_V: Tensor, weight_VH: Tensor
) -> DraftedBlocks:
    """What the head drafts from the anchors."""
    (B, T), ids_BT, device = seen.rows_BT.shape, seen.ids_BT, seen.rows_BT.device
    hidden_BASH = head.drafts(seen.features_BTF, ids_BT, anchors_BA, steps)
    at_BAS = anchors_BA[..., None] + torch.arange(1, steps + 1, dtype=torch.int64, device=device)
    row_B11 = torch.arange(B, dtype=torch.int64, device=device)[:, None, None]
    goal_BAS = torch.where(at_BAS < T, seen.goals_BT[row_B11, at_BAS.clamp(max=T - 1)], -1)
    before_BAS = (at_BAS - 1).clamp(max=T - 1)
    place_BAS = torch.searchsorted(draft_ids_V, goal_BAS.clamp(min=0)).clamp(max=len(draft_ids_V) - 1)
    counted_BAS = draft_ids_V[place_BAS] == goal_BAS
    teacher_BASV = F.linear(seen.hidden_BTH[row_B11, before_BAS], weight_VH).float().softmax(-1)
    tokens_BAS = ids_BT[row_B11, before_BAS]
    estimate_BAS = head.estimates(hidden_BASH, tokens_BAS)
    if head.reads_drafts:  # a token after one that can't be drafted is never reached
        counted_BAS = counted_BAS.cumprod(-1).bool()
    logits_BASV, chosen_BASV = head.walk(hidden_BASH, tokens_BAS).float(), None
    if isinstance(head, DFlash2Head):
        logits_BASV, chosen_BASV = head.logits(hidden_BASH).float(), logits_BASV
    estimate_BAS = None if estimate_BAS is None else estimate_BAS.float()
    return DraftedBlocks(logits_BASV, teacher_BASV, place_BAS, counted_BAS, goal_BAS >= 0, estimate_BAS, chosen_BASV)


def _losses(part: DraftedBlocks) -> Tensor:
    """[B, A, S]: the loss of each drafted token."""
    entropy_BAS = -(part.teacher_BASV * part.logits_BASV.log_softmax(-1)).sum(-1)
    if part.chosen_BASV is not None:
        logq_BASV = part.chosen_BASV.log_softmax(-1)
        logq_BASV = torch.where(logq_BASV == -torch.inf, 0.0, logq_BASV)  # what the target gives to other tokens is not learnt
        entropy_BAS = entropy_BAS - (part.teacher_BASV * logq_BASV).sum(-1)
    if part.estimate_BAS is None:
        return entropy_BAS
    overlap_BAS = torch.minimum(part.logits_BASV.softmax(-1), part.teacher_BASV).sum(-1)
    estimate_BAS = F.binary_cross_entropy_with_logits(part.estimate_BAS, overlap_BAS.detach(), reduction="none")
    return ENTROPY * entropy_BAS + OVERLAP * (1 - overlap_BAS) + ESTIMATE * estimate_BAS
