"""How texts of a table went on after a row's last tokens: the longest match first, and among equally long ones the commonest.

Pure tensor code over a table and texts in pages; on a GPU it is one launch of lookup_triton.py.  It knows no tree.

Shapes: B sequences, Q tokens that are compared, W places that are looked at, V tokens by which their texts are compared,
M continuations, D tokens of each, R places for them, N tokens of a table, S scopes,
K looks of a search.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.draft.join.survival import ONCE, support_of
from specdec.draft.ngram.lookup import MAX_MATCH, PagedTexts
from specdec.draft.suffix.device_table import DeviceTable
from specdec.draft.suffix.host_table import NO_TOKEN
from specdec.ops.index import arange, use_index_kernels

CONTINUATIONS = 2  # M: the best one, and the best one that begins with another token
WINDOW = 32  # W: neighbours in the order of what precedes them, of which the matches are counted
VOTES = 4  # V
LOOKS = 64  # K
MISSING = -2  # before a text's first token; no table holds it


class Continuations(NamedTuple):
    """tokens_BMR: int64, -1 after the end of a text or D tokens, and all of it where there is no match.
    lengths_BM: int64, how many tokens before the continuation equal the row's last ones; 0: there is no match.
    support_BM: int64, how many of the places that are looked at go on alike, of those that match as long; see
        `survival.support_of`.
    """

    tokens_BMR: Tensor
    lengths_BM: Tensor
    support_BM: Tensor


def find_continuations(table: DeviceTable, text: PagedTexts, keys_B: Tensor, depth: int, out: Continuations) -> None:
    """Writes them to `out`, whose rows may lie apart.

    keys_B: int64, the scope that each row may read; 0: none.  depth: D, at most R.
    """
    if use_index_kernels(keys_B):
        from specdec.draft.suffix.lookup_triton import launch_continuations

        return launch_continuations(table, text, keys_B, depth, out)
    view = TableView(table)
    last_BQ = last_tokens(text)
    low_B, high_B = view.bounds(keys_B)
    first_B = view.first_not_before(last_BQ, low_B, high_B)
    ranks_BW = first_B[:, None] - WINDOW // 2 + arange(WINDOW, keys_B.device)
    is_place_BW = (ranks_BW >= low_B[:, None]) & (ranks_BW < high_B[:, None])
    places_BW = view.place(ranks_BW)
    lengths_BW = (view.before(places_BW) == last_BQ[:, None]).long().cumprod(-1).sum(-1) * is_place_BW
    steps_BWV = view.after(places_BW, VOTES)
    keys_BW = rated(lengths_BW, steps_BWV)
    best_B = keys_BW.argmax(1)
    other_BW = torch.where(steps_BWV[..., 0] == steps_BWV[..., 0].gather(1, best_B[:, None]), -1, keys_BW)
    chosen_BM = torch.stack((best_B, other_BW.argmax(1)), dim=1)
    is_found_BM = torch.stack((keys_BW, other_BW), dim=1).amax(-1) >= 0
    tokens_BMD = view.after(places_BW.gather(1, chosen_BM), depth)
    out.tokens_BMR.fill_(NO_TOKEN)
    out.tokens_BMR[..., :depth] = torch.where(is_found_BM[..., None], tokens_BMD, NO_TOKEN)
    out.lengths_BM.copy_(torch.where(is_found_BM, lengths_BW.gather(1, chosen_BM), 0))
    alike_BWW = (lengths_BW[:, :, None] == lengths_BW[:, None]) & is_place_BW[:, :, None] & is_place_BW[:, None]
    agree_BWW = alike_BWW & (steps_BWV[:, :, None, 0] == steps_BWV[:, None, :, 0])
    support_BW = support_of(agree_BWW.sum(-1), alike_BWW.sum(-1))
    out.support_BM.copy_(torch.where(is_found_BM, support_BW.gather(1, chosen_BM), ONCE))


def last_tokens(text: PagedTexts) -> Tensor:
    """[B, Q] int64: the last MAX_MATCH tokens of each text, the last one first; see MISSING."""
    lens_B1 = text.lens_B.long()[:, None]
    first_B1 = torch.zeros_like(lens_B1) if text.span is None else (lens_B1 - text.span).clamp(min=0)
    positions_BQ = lens_B1 - 1 - arange(MAX_MATCH, text.lens_B.device)
    return torch.where(positions_BQ >= first_B1, text.at(positions_BQ.clamp(min=0)), MISSING)


def rated(lengths_BW: Tensor, steps_BWV: Tensor) -> Tensor:
    """[B, W] int64: by the length of its match, then by how many others of that length go on alike, then the first ones first;
    -1 where nothing matches.  How they go on counts token by token, so that those which agree longer weigh more.
    """
    agree_BWWV = (steps_BWV[:, :, None] == steps_BWV[:, None]).cumprod(-1)
    equals_BWW = lengths_BW[:, :, None] == lengths_BW[:, None]
    votes_BW = (agree_BWWV * equals_BWW[..., None]).sum((-1, -2))
    keys_BW = (lengths_BW * (WINDOW * VOTES + 1) + votes_BW) * WINDOW + (WINDOW - 1 - arange(WINDOW, lengths_BW.device))
    return torch.where(lengths_BW > 0, keys_BW, -1)


class TableView:
    """The half of a table that is read, in one line of both halves."""

    def __init__(self, table: DeviceTable) -> None:
        self._table, self._half_1 = table, table.half_1.long()
        self._text_X, self._order_X = table.text_2N.flatten(), table.order_2N.flatten()
        self._start_1 = self._half_1 * table.capacity

    def bounds(self, keys_B: Tensor) -> tuple[Tensor, Tensor]:
        """The first rank of each row's scope, and the one after the last; int64.  Both are 0 without one."""
        table = self._table
        is_own_BS = (table.keys_2S[self._half_1] == keys_B[:, None]) & (keys_B != 0)[:, None]
        bounds_BS2 = table.bounds_2S2[self._half_1].long() * is_own_BS[..., None]
        low_B, high_B = bounds_BS2.sum(1).unbind(-1)
        return low_B, high_B

    def place(self, ranks_BX: Tensor) -> Tensor:
        """int64: the places of these ranks (int64, any number)."""
        return self._order_X[self._start_1 + ranks_BX.clamp(0, self._table.capacity - 1)].long()

    def before(self, places_BX: Tensor) -> Tensor:
        """[B, X, Q] int64: the tokens before these places, the nearest one first."""
        positions_BXQ = places_BX[..., None] - 1 - arange(MAX_MATCH, places_BX.device)
        return torch.where(positions_BXQ >= 0, self._at(positions_BXQ.clamp(min=0)), NO_TOKEN)

    def after(self, places_BX: Tensor, count: int) -> Tensor:
        """[B, X, count] int64: the tokens at these places and after them, up to the text's end."""
        positions_BXC = places_BX[..., None] + arange(count, places_BX.device)
        last = self._table.capacity - 1
        tokens_BXC = torch.where(positions_BXC <= last, self._at(positions_BXC.clamp(max=last)), NO_TOKEN)
        return torch.where((tokens_BXC >= 0).long().cumprod(-1) > 0, tokens_BXC, NO_TOKEN)

    def first_not_before(self, last_BQ: Tensor, low_B: Tensor, high_B: Tensor) -> Tensor:
        """[B] int64: the first rank within these bounds whose tokens do not come before `last_BQ` in the order.

        Each step looks at K ranks that divide what is left evenly: fewer steps than bisection has, and each takes launches.
        """
        looks_K, left = arange(LOOKS, low_B.device) + 1, self._table.capacity + 1
        if low_B.device.type == "cpu":  # where nothing is captured, and numbers can be looked at
            left = int((high_B - low_B).amax())
        while left > 0:
            ranks_BK = low_B[:, None] + looks_K * (high_B - low_B)[:, None] // (LOOKS + 1)
            is_look_BK = ranks_BK < high_B[:, None]
            is_before_BK = comes_before(self.before(self.place(ranks_BK)), last_BQ[:, None])
            low_B = torch.where(is_look_BK & is_before_BK, ranks_BK + 1, low_B[:, None]).amax(1)
            high_B = torch.where(is_look_BK & ~is_before_BK, ranks_BK, high_B[:, None]).amin(1)
            low_B, left = low_B.minimum(high_B), left // (LOOKS + 1)
        return low_B

    def _at(self, positions_X: Tensor) -> Tensor:
        return self._text_X[self._start_1 + positions_X].long()


def comes_before(tokens_XQ: Tensor, others_XQ: Tensor) -> Tensor:
    """[X] bool: whether the first of both stands before the other where they differ first."""
    is_alike_XQ = (tokens_XQ == others_XQ).long().cumprod(-1)
    are_alike_X = is_alike_XQ.sum(-1, keepdim=True).clamp(max=MAX_MATCH - 1)  # where they differ first, or the last one
    return ((tokens_XQ - others_XQ).gather(-1, are_alike_X) < 0)[..., 0]
