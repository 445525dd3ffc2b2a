"""Where the end of a text stood before, and how the text went on there.  Pure tensor code; on a GPU a kernel finds the places.

Knows token ids and positions, no drafter.

Shapes: B sequences, W the most entries of one, M matches, S tokens of a continuation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.ops.index import arange, use_index_kernels

MAX_MATCH = 8  # tokens that are compared at most; places with longer common endings count as equally good
SHIFT = 32  # a match's length stands above its nearness in one number, so that one search finds the best match
FAR = 2**30  # more than any distance


class PagedTexts(NamedTuple):
    """The texts of all sequences.

    tokens_N: int32 ids by slot.  pages: of each sequence.  lens_B: int32, how many entries each sequence has.
    span: how many entries from the end may be read; None: all.
    """

    tokens_N: Tensor
    pages: PageTable
    lens_B: Tensor
    span: int | None

    def at(self, positions_BP: Tensor) -> Tensor:
        """[B, P] int64: the entries at these positions (int64)."""
        return self.tokens_N[self.pages.slots_at(positions_BP)].long()


class Matches(NamedTuple):
    """The places where each text's end stood before: the longest common endings first, and the nearer ones of equally long.

    ends_BM: int64, the position of the place's last entry.  lengths_BM: int64, how many entries equal the text's last ones.
    found_BM: bool, False where a text has fewer places than M.
    """

    ends_BM: Tensor
    lengths_BM: Tensor
    found_BM: Tensor


def find_matches(text: PagedTexts, back_B: Tensor, count: int) -> Matches:
    """The best `count` places (M) of each text.  A place whose last entry is another token has length 0, and counts too.

    back_B: int64, how far before the text's end the place is to which others are near; with 0 later places are nearer.
    """
    return matches_of(best_keys(text, back_B, count), in_step(text, back_B))


def best_keys(text: PagedTexts, back_B: Tensor, count: int) -> Tensor:
    """[B, M] int64: the keys of the best places, see `match_keys`."""
    if use_index_kernels(text.lens_B):
        from specdec.draft.ngram.lookup_triton import launch_match_keys

        keys_BX = launch_match_keys(text, back_B, count)
    else:
        keys_BX = match_keys(text, back_B)
    return keys_BX.topk(count, dim=1).values


def in_step(text: PagedTexts, back_B: Tensor) -> Tensor:
    """[B] int64: the position so far before each text's end."""
    return text.lens_B.long() - 1 - back_B


def nearness(apart_BX: Tensor) -> Tensor:
    """int64: the larger the nearer; of two places as near, the one after counts as nearer.  apart_BX: int64."""
    return FAR - 2 * apart_BX.abs() + (apart_BX > 0)


def matches_of(best_BM: Tensor, at_B: Tensor) -> Matches:
    """What keys stand for.  at_B: int64, the place to which others are near."""
    twice_BM = FAR - (best_BM & (2**SHIFT - 1))  # undoes `nearness`
    apart_BM = torch.where(twice_BM % 2 > 0, (twice_BM + 1) // 2, -(twice_BM // 2))
    found_BM = best_BM >= 0
    return Matches(torch.where(found_BM, at_B[:, None] + apart_BM, -1), best_BM >> SHIFT, found_BM)


def match_keys(text: PagedTexts, back_B: Tensor) -> Tensor:
    """[B, W] int64: for the place that ends at each position, length << SHIFT | nearness; -1 where there is no place."""
    W, device = text.pages.capacity, text.lens_B.device
    positions_W, lens_B1, first_B1 = arange(W, device), text.lens_B.long()[:, None], first_entries(text)
    entries_BW = text.at(positions_W.expand(lens_B1.shape[0], W))
    is_place_BW = (positions_W >= first_B1) & (positions_W < lens_B1 - 1)
    equal_BW, length_BW = is_place_BW, torch.zeros_like(entries_BW)
    for back in range(MAX_MATCH):
        last_B1 = entries_BW.gather(1, (lens_B1 - 1 - back).clamp(min=0))
        before_BW = positions_W - back
        entry_BW = entries_BW.gather(1, before_BW.clamp(min=0).expand_as(entries_BW))
        equal_BW = equal_BW & (before_BW >= first_B1) & (entry_BW == last_B1)
        length_BW = length_BW + equal_BW
    near_BW = nearness(positions_W - in_step(text, back_B)[:, None])
    return torch.where(is_place_BW, length_BW << SHIFT | near_BW, -1)


def first_entries(text: PagedTexts) -> Tensor:
    """[B, 1] int64: the first entry of each text that may be read."""
    lens_B1 = text.lens_B.long()[:, None]
    return torch.zeros_like(lens_B1) if text.span is None else (lens_B1 - text.span).clamp(min=0)


def match_lengths(text: PagedTexts, ends_B: Tensor) -> Tensor:
    """[B] int64: how many entries up to one place of each text (int64) equal the text's last ones."""
    back_Q = arange(MAX_MATCH, ends_B.device)
    here_BQ, last_BQ = (at_B[:, None] - back_Q for at_B in (ends_B, text.lens_B.long() - 1))
    is_equal_BQ = text.at(here_BQ.clamp(min=0)) == text.at(last_BQ.clamp(min=0))
    return (is_equal_BQ & (here_BQ >= first_entries(text))).long().cumprod(-1).sum(-1)


def continuations(text: PagedTexts, matches: Matches, steps: int) -> Tensor:
    """[B, M, S] int64: the tokens after each place.

    A continuation that reaches the text's end goes on from the place again, as a text that repeats itself does.  A text
    without any place gives its last token, and a match that was not found gives what the first one gives.
    """
    ends_BM = torch.where(matches.found_BM, matches.ends_BM, matches.ends_BM[:, :1])
    last_B1 = (text.lens_B.long() - 1).clamp(min=0)[:, None]
    ends_BM = torch.where(matches.found_BM[:, :1], ends_BM, last_B1 - 1)
    period_BM1 = (last_B1 - ends_BM).clamp(min=1)[..., None]
    positions_BMS = ends_BM[..., None] + 1 + arange(steps, text.lens_B.device) % period_BM1
    positions_BX = positions_BMS.clamp(min=0).minimum(last_B1[..., None]).flatten(1)
    return text.at(positions_BX).view(positions_BMS.shape)
