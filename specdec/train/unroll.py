"""Unrolls an EAGLE-3 head over several draft steps and computes its loss: the "training-time test" of EAGLE-3.

The paper (arXiv 2503.01840, section 3.2) trains a head on its own outputs, because drafting feeds them back too.  A head reads
pairs: pair i holds the embedding of token i + 1 and the target's features at token i.  Step 0 reads the true features.  In step
j, pair i reads the head's own output for pair i - 1 in step j - 1 instead, and attends to what it would see when drafting: the
true pairs up to i - j, then its own outputs of steps 1 to j.

This file knows the head's forward pass and the loss.  It knows neither files nor optimizers, nor where the text comes from.

Shapes: B rows, T tokens of a row, P pairs of a row, N = B * P, F target feature size, H hidden size, V draft vocabulary,
Q query heads, K key/value heads, X = Q + 2K, D head dimension, J steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.eager.dense import DenseAttention, per_row
from specdec.attention.inputs import LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.draft.eagle.head import Eagle3Head
from specdec.models.target import Target, TargetOutput


class DraftSteps:
    """The attention (AttentionFn) of a one-layer head that is unrolled; each call is one step.

    It keeps the keys and values of all steps so far.  batch: rows that are unrolled at once, B.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        assert layer == 0 and rows_R is None and scoring is PLAIN, "only heads of one plain attention layer can be unrolled"
        q, k, v = (per_row(x, self.batch) for x in inputs.dense())
        self.steps.append((k, v))
        keys, values = (torch.cat([step[i] for step in self.steps], dim=2) for i in (0, 1))
        mask = step_mask(q.shape[2], len(self.steps) - 1, q.device)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def step_mask(length: int, step: int, device: torch.device) -> Tensor:
    """Which keys each pair reads in a step, [P, (step + 1) * P] bool, for rows of length P; the keys of step 0 come first.

    In step j, pair i reads pairs 0 to i - j of step 0, and pair i - j + m of each step m = 1 to j.
    """
    i = torch.arange(length, device=device)[:, None]
    p = torch.arange(length, device=device)
    blocks = [p <= i - step] + [p == i - step + m for m in range(1, step + 1)]
    return torch.cat(blocks, dim=1)


@torch.no_grad()
def target_pass(model: Target, ids_BT: Tensor, aux_layers: tuple[int, ...]) -> TargetOutput:
    """The target's forward pass over whole rows: hidden states [B * T, H] after the final norm, and features [B * T, F]."""
    B, T = ids_BT.shape
    positions = torch.arange(T, device=ids_BT.device).repeat(B)
    attn = DenseAttention(model.config.layer_kinds, B, sources=model.config.kv_source)
    return model(ids_BT.flatten(), positions, attn, aux_layers)


def draft_steps(head: Eagle3Head, features_BPF: Tensor, next_ids_BP: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Yields the head's output [B, P, H] of each step.

    In step j, pairs 0 to j - 1 have no output of the step before to read; what they yield means nothing.
    features_BPF: the target's true features at tokens 0 .. P - 1.  next_ids_BP: the ids of tokens 1 .. P.
    """
    B, P = next_ids_BP.shape
    positions = torch.arange(P, device=next_ids_BP.device).repeat(B)
    attn = DraftSteps(B)
    hidden = head.fuse(features_BPF.flatten(0, 1))
    for _ in range(num_steps):
        hidden_BPH = head(next_ids_BP.flatten(), hidden, positions, attn).view(B, P, -1)
        yield hidden_BPH
        hidden = F.pad(hidden_BPH[:, :-1], (0, 0, 1, 0)).flatten(0, 1)


def head_loss(
    model: Target, head: Eagle3Head, rows_BT: Tensor, draft_ids_V: Tensor, num_steps: int, decay: float
) -> tuple[Tensor, Tensor]:
    """The pair (loss, share_J) of some rows of text.

    loss: cross-entropy in nats between the head's distribution and the target's over the draft vocabulary, the mean over pairs,
    summed over steps with weight decay**j.
    share_J: for each step, the share of pairs for which the head's most likely token is the row's next token.

    rows_BT: token ids; columns after the end of a text hold -1.  draft_ids_V: ids of the draft vocabulary, ascending.
    A pair counts if the token that it predicts exists in the draft vocabulary.
    """
    ids_BT = rows_BT.clamp(min=0)
    B, T = ids_BT.shape
    out = target_pass(model, ids_BT, head.config.aux_layers)
    assert out.aux_TA is not None
    # Pair i predicts token i + 2.  The target's distribution of that token comes from its hidden state at token i + 1.
    P = T - 2
    hidden_BPH = out.hidden_TH.view(B, T, -1)[:, 1 : P + 1]
    teacher_BPV = F.linear(hidden_BPH, model.lm_head.rows(draft_ids_V)).float().softmax(-1)
    goal_BP = rows_BT[:, 2:]
    place_BP = torch.searchsorted(draft_ids_V, goal_BP.clamp(min=0)).clamp(max=len(draft_ids_V) - 1)
    known_BP = draft_ids_V[place_BP] == goal_BP
    loss, correct = out.hidden_TH.new_zeros(()), []
    for step, hidden_BPH in enumerate(draft_steps(head, out.aux_TA.view(B, T, -1)[:, :P], ids_BT[:, 1 : P + 1], num_steps)):
        logits_BPV = head.logits(hidden_BPH).float()
        counted_BP = known_BP & (torch.arange(P, device=ids_BT.device) >= step)
        entropy_BP = -(teacher_BPV * logits_BPV.log_softmax(-1)).sum(-1)
        total = counted_BP.sum().clamp(min=1)
        loss = loss + decay**step * (entropy_BP * counted_BP).sum() / total
        correct.append(((logits_BPV.argmax(-1) == place_BP) & counted_BP).sum() / total)
    return loss, torch.stack(correct)
