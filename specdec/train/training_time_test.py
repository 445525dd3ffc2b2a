"""EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): train the head on its own outputs, as it will be used.

Step 0 reads true target features; step j reads the head's own output of step j - 1 one position earlier, and attends to what
it would see when drafting: true pairs up to i - j, then its own steps 1 .. j.  Knows the head's forward and the loss; neither
files, optimizers nor where the text came from.

Shapes: B rows, T pairs per row, H hidden, V draft vocabulary, Q and K heads, D head dim, J steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.attention.eager.dense import DenseAttention, per_row
from specdec.attention.kinds import PLAIN, Scoring
from specdec.draft.eagle import Eagle3Head
from specdec.models.target import Target, TargetOutput
from specdec.ops.rope import HeadPrep


class DraftSteps:
    """An AttentionFn for one-layer heads that remembers the keys and values of the steps before."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(
        self, layer: int, qkv_NXD: Tensor, prep: HeadPrep, rows_R: Tensor | None = None, scoring: Scoring = PLAIN
    ) -> Tensor:
        assert layer == 0 and rows_R is None and scoring is PLAIN, "the training-time test knows heads of one plain layer"
        q_NQD, kv_N2KD = prep.apply_(qkv_NXD)
        q, k, v = (per_row(x, self.batch) for x in (q_NQD, kv_N2KD[:, 0], kv_N2KD[:, 1]))
        self.steps.append((k, v))
        keys, values = (torch.cat([step[i] for step in self.steps], dim=2) for i in (0, 1))
        mask = step_mask(q.shape[2], len(self.steps) - 1, q.device)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(q_NQD.shape)


def step_mask(length: int, step: int, device: torch.device) -> Tensor:
    """[T, (step + 1) * T] bool: at step j, pair i sees pairs up to i - j of step 0, and pair i - j + m of step m = 1 .. j."""
    i = torch.arange(length, device=device)[:, None]
    p = torch.arange(length, device=device)
    blocks = [p <= i - step] + [p == i - step + m for m in range(1, step + 1)]
    return torch.cat(blocks, dim=1)


@torch.no_grad()
def target_pass(model: Target, ids_BT: Tensor, aux_layers: tuple[int, ...]) -> TargetOutput:
    """The target over whole rows: hidden [B*T, H] after the final norm, and the captured features."""
    B, T = ids_BT.shape
    positions = torch.arange(T, device=ids_BT.device).repeat(B)
    return model(ids_BT.flatten(), positions, DenseAttention(model.config.layer_kinds, B), aux_layers)


def draft_steps(head: Eagle3Head, features_BPF: Tensor, next_ids_BP: Tensor, num_steps: int) -> Iterator[Tensor]:
    """The head's outputs [B, P, H] of every step.  Rows i < j of step j have no such past; what they hold is junk.

    features_BPF: true target features of pairs 0 .. P - 1.  next_ids_BP: each pair's token, one behind its feature's.
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
    """(loss, correct_J): cross entropy to the target's distribution over the draft vocabulary, summed over steps with
    weight decay**j; and the share of positions where the head's first choice at step j is the row's next token.

    rows_BT: token ids, -1 behind a row's end.  A position counts where the token to predict exists in the draft vocabulary.
    """
    ids_BT = rows_BT.clamp(min=0)
    B, T = ids_BT.shape
    out = target_pass(model, ids_BT, head.config.aux_layers)
    assert out.aux_TA is not None
    # Pair i: embedding of token i + 1, feature i; it predicts token i + 2, whose distribution the target holds at i + 1.
    P = T - 2
    hidden_BPH = out.hidden_TH.view(B, T, -1)[:, 1 : P + 1]
    teacher_BPV = F.linear(hidden_BPH, model.lm_head.weight[draft_ids_V]).float().softmax(-1)
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
