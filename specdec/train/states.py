"""What the target makes of the rows of text that a head learns from: its last hidden states, and the features of the head.

A target's weights do not change while its head is trained, so the states of a row are the same in each epoch.  They are kept in
memory if all of them fit; else each step has the target read its rows again.  This file knows the target's forward pass, and
neither heads nor losses.

Shapes: N rows in all, B of a step, T tokens of a row, H hidden size, F target feature size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.eager.dense import DenseAttention
from specdec.models.target import Target
from specdec.screen.progress import Progress
from specdec.train.selftext import SelfText

ROWS = 64  # rows that the target reads at once where their states are kept


class TargetStates(NamedTuple):
    """Rows of text, and what the target made of them.

    rows_BT: int64 ids; columns after the end of a text hold -1.
    hidden_BTH: the hidden states after the final norm.
    features_BTF: outputs of the layers that the head reads; the hidden states for a head that reads none.
    begins_B: int64, the column after each row's prompt, which was not the target's to write; None: rows have no prompts.
    """

    rows_BT: Tensor
    hidden_BTH: Tensor
    features_BTF: Tensor
    begins_B: Tensor | None = None

    @property
    def ids_BT(self) -> Tensor:
        """The rows with ids of tokens in all columns."""
        return self.rows_BT.clamp(min=0)

    @property
    def goals_BT(self) -> Tensor:
        """The rows with -1 for tokens that the target did not write: what a head learns to draft."""
        if self.begins_B is None:
            return self.rows_BT
        at_T = torch.arange(self.rows_BT.shape[1], dtype=torch.int64, device=self.rows_BT.device)
        return torch.where(at_T >= self.begins_B[:, None], self.rows_BT, -1)


@torch.no_grad()
def read_rows(model: Target, rows_BT: Tensor, aux_layers: tuple[int, ...]) -> TargetStates:
    """One pass of the target over whole rows."""
    B, T = rows_BT.shape
    positions = torch.arange(T, dtype=torch.int64, device=rows_BT.device).repeat(B)
    attn = DenseAttention(model.config.layer_kinds, B, kv_layers=model.config.kv_source)
    out = model(rows_BT.clamp(min=0).flatten(), positions, attn, aux_layers)
    features = out.hidden_TH if out.aux_TA is None else out.aux_TA
    return TargetStates(rows_BT, out.hidden_TH.unflatten(0, (B, T)), features.unflatten(0, (B, T)))


class StateStore:
    """The states of all rows that a head learns from.

    text: on the target's device.  keep_bytes: how much memory the states may take.  If they take more, nothing is kept.
    show: told how many rows were read.  at_once: rows that one pass reads.
    """

    def __init__(
        self,
        model: Target,
        text: SelfText,
        aux_layers: tuple[int, ...],
        keep_bytes: int,
        show: Progress = lambda *_: None,
        at_once: int = ROWS,
    ) -> None:
        self.model, self.text, self.aux_layers = model, text, aux_layers
        self.kept: tuple[Tensor, Tensor] | None = None
        rows_NT = text.rows_NT
        first = read_rows(model, rows_NT[:1], aux_layers)
        parts = first.hidden_BTH, first.features_BTF
        if sum(part.nbytes for part in parts) * len(rows_NT) > keep_bytes:
            return
        hidden_NTH, features_NTF = (part.new_empty(len(rows_NT), *part.shape[1:]) for part in parts)
        self.kept = hidden_NTH, features_NTF
        for start in range(0, len(rows_NT), at_once):
            show("the target reads its texts", start, len(rows_NT))
            seen = read_rows(model, rows_NT[start : start + at_once], aux_layers)
            for whole, part in zip(self.kept, (seen.hidden_BTH, seen.features_BTF), strict=True):
                whole[start : start + at_once] = part

    @property
    def device(self) -> torch.device:
        return self.text.rows_NT.device

    def of(self, picks_B: Tensor) -> TargetStates:
        """The states of these rows, int64 numbers."""
        rows_BT, begins_B = self.text.rows_NT[picks_B], self.text.begins_N[picks_B]
        if self.kept is None:
            return read_rows(self.model, rows_BT, self.aux_layers)._replace(begins_B=begins_B)
        hidden_NTH, features_NTF = self.kept
        return TargetStates(rows_BT, hidden_NTH[picks_B], features_NTF[picks_B], begins_B)
