"""Unrolls an EAGLE-3 head over several draft steps and computes its loss: the "training-time test" of EAGLE-3.

The paper (arXiv 2503.01840, section 3.2) trains a head on its own outputs, because drafting feeds them back too.  A head reads
pairs: pair i holds the embedding of token i + 1 and the target's features at token i.  Step 0 reads the true features.  In step
j, pair i reads the head's own output for pair i - 1 in step j - 1 instead, and attends to what it would see when drafting: the
true pairs up to i - j, then its own outputs of steps 1 to j.

This file knows the head's forward pass and the loss.  It knows neither files nor optimizers, nor where the text comes from.

Shapes: B rows, T tokens of a row, P pairs of a row, F target feature size, H hidden size, V draft vocabulary, K key and value
heads, G query heads of each, D head dimension, J steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.eager.dense import per_row
from specdec.attention.inputs import LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.draft.eagle.head import Eagle3Head
from specdec.train.lesson.entropy import Teacher
from specdec.train.states import TargetStates


class DraftSteps:
    """The attention (AttentionFn) of a one-layer head that is unrolled; each call is one step.

    It keeps the keys and values of all steps so far.  In step j, pair i reads pairs 0 to i - j of step 0, and pair i - j + m of
    each step m = 1 to j.  So of each later step it reads one key, which is multiplied without a matrix of all pairs.

    batch: rows that are unrolled at once, B.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert layer == 0 and rows_R is None and scoring is PLAIN, "only heads of one plain attention layer can be unrolled"
        q, k, v = (per_row(x, self.batch) for x in inputs.dense())
        if not self.steps:
            self.steps.append((k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        self.steps.append((k, v))
        step, (k_BKPD, v_BKPD) = len(self.steps) - 1, self.steps[0]
        q_BKGPD = q.unflatten(1, (k.shape[1], -1)) / math.sqrt(q.shape[-1])
        i = torch.arange(q.shape[2], dtype=torch.int64, device=q.device)
        scores = (q_BKGPD @ k_BKPD[:, :, None].transpose(-1, -2)).masked_fill(i > i[:, None] - step, -torch.inf)
        later = [[_moved(x, step - m)[:, :, None] for x in self.steps[m]] for m in range(1, step + 1)]
        own = torch.stack([(q_BKGPD * k_BK1PD).sum(-1) for k_BK1PD, _ in later], dim=-1)
        weights = torch.cat((scores, own), dim=-1).softmax(-1)
        out = weights[..., : len(i)] @ v_BKPD[:, :, None]
        for m, (_, v_BK1PD) in enumerate(later):
            out = out + weights[..., len(i) + m, None] * v_BK1PD
        return out.flatten(1, 2).transpose(1, 2).flatten(0, 1)


def _moved(x_BKPD: Tensor, pairs: int) -> Tensor:
    """Each pair gets what belongs to the pair so many before it, and the first pairs get zeros."""
    return F.pad(x_BKPD[:, :, : x_BKPD.shape[2] - pairs], (0, 0, pairs, 0)) if pairs else x_BKPD


def draft_steps(head: Eagle3Head, features_BPF: Tensor, next_ids_BP: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Yields the head's output [B, P, H] of each step.

    In step j, pairs 0 to j - 1 have no output of the step before to read; what they yield means nothing.
    features_BPF: the target's true features at tokens 0 .. P - 1.  next_ids_BP: the ids of tokens 1 .. P.
    """
    B, P = next_ids_BP.shape
    positions = torch.arange(P, dtype=torch.int64, device=next_ids_BP.device).repeat(B)
    attn = DraftSteps(B)
    hidden = head.fuse(features_BPF.flatten(0, 1))
    for _ in range(num_steps):
        hidden_BPH = head(next_ids_BP.flatten(), hidden, positions, attn).view(B, P, -1)
        yield hidden_BPH
        hidden = F.pad(hidden_BPH[:, :-1], (0, 0, 1, 0)).flatten(0, 1)


def head_loss(
    head: Eagle3Head, seen: TargetStates, weight_VH: Tensor, draft_ids_V: Tensor, num_steps: int, decay: float
) -> tuple[Tensor, Tensor]:
    """The pair (loss, counts_2J) of some rows of text.

    loss: cross-entropy in nats between the head's distribution and the target's over the draft vocabulary, the mean over pairs,
    summed over steps with weight decay**j.
    counts_2J: int64, of chains that are drafted greedily where the target wrote on: how many have their first j + 1 tokens
    right, and how many had j right and were to draft one more (`accept_length`).

    draft_ids_V: ids of the draft vocabulary, ascending.  weight_VH: their rows of the target's language-model head.
    A pair counts if the target wrote the token that it predicts, and that token exists in the draft vocabulary.
    """
    ids_BT, P = seen.ids_BT, seen.rows_BT.shape[1] - 2
    # Pair i predicts token i + 2.  The target's distribution of that token comes from its hidden state at token i + 1.
    teacher = Teacher(F.linear(seen.hidden_BTH[:, 1 : P + 1], weight_VH))
    goal_BP = seen.goals_BT[:, 2:]
    place_BP = torch.searchsorted(draft_ids_V, goal_BP.clamp(min=0)).clamp(max=len(draft_ids_V) - 1)
    known_BP = draft_ids_V[place_BP] == goal_BP
    right_BP = torch.ones_like(known_BP)  # whether the chain that reaches a pair in this step has all tokens before it right
    loss, counts = torch.zeros((), dtype=torch.float32, device=ids_BT.device), []
    at_P = torch.arange(P, dtype=torch.int64, device=ids_BT.device)
    for step, hidden_BPH in enumerate(draft_steps(head, seen.features_BTF[:, :P], ids_BT[:, 1 : P + 1], num_steps)):
        entropy_BP, drafted_BP = teacher.entropy(head.logits(hidden_BPH))
        counted_BP = known_BP & (at_P >= step)
        total = counted_BP.sum().clamp(min=1)
        loss = loss + decay**step * (entropy_BP * counted_BP).sum() / total
        tried_BP = right_BP & (goal_BP >= 0) & (at_P >= step)
        right_BP = tried_BP & known_BP & (drafted_BP == place_BP)
        counts.append(torch.stack((right_BP.sum(), tried_BP.sum())))
        right_BP = F.pad(right_BP[:, :-1], (1, 0))
    return loss, torch.stack(counts, dim=1)


def accept_length(counts_2J: Tensor) -> tuple[float, list[float]]:
    """(tokens of a round of greedy chains, bonus included; the share of right drafts at each depth, of those reached)."""
    right_J, tried_J = counts_2J.double()
    shares_J = right_J / tried_J.clamp(min=1)
    return 1 + float(shares_J.cumprod(0).sum()), shares_J.tolist()
