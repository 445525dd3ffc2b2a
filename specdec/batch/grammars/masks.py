"""Bans tokens by masks of one bit a token.

On a CPU and under autograd the definition here runs; on a GPU it is one launch of masks_triton.py.

Shapes: B sequences, N rows of logits of each, R = B * N, W a run of the vocabulary, G masked sequences, X words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels


class BitMasks(NamedTuple):
    """Masks of some of the sequences of a pass, one for each row of logits.

    words_GNX: int32; bit t % 32 of word t // 32 says whether token t is allowed.
    place_B: int32, which masks a sequence has; -1: none, all its tokens are allowed.
    """

    words_GNX: Tensor
    place_B: Tensor


def masks_of_text(matcher: Any, token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """int32 [places, X]: what a grammar allows at each place of a text.  matcher: at the text's beginning."""
    masks_IX = room_for_masks(len(token_ids), vocab_size)
    for _ in fill_by_part(masks_IX, matcher, token_ids, max(1, len(token_ids))):
        pass
    return masks_IX


def room_for_masks(places: int, vocab_size: int) -> Tensor:
    """int32 [places, X], not filled yet."""
    return torch.empty(places, -(-vocab_size // 32), dtype=torch.int32, device="cpu")


def fill_by_part(masks_IX: Tensor, matcher: Any, token_ids: Sequence[int], size: int) -> Iterator[None]:
    """Fills masks_IX with what `masks_of_text` gives.  After each `size` places the caller may do something else."""
    for place, token in enumerate(token_ids, 1):
        matcher.fill(masks_IX[place - 1 : place].numpy())
        matcher.take([token])
        if place % size == 0 or place == len(token_ids):
            yield


def masked_logits(logits_RW: Tensor, masks: BitMasks, first: int = 0) -> Tensor:
    """[R, W] float32: the logits, with -inf for banned tokens.  first: the lowest id of the run."""
    if use_kernels(logits_RW):
        from specdec.batch.grammars.masks_triton import launch_masked_logits

        return launch_masked_logits(logits_RW, masks, first)
    B, N, W = masks.place_B.shape[0], masks.words_GNX.shape[1], logits_RW.shape[1]
    ids_W = torch.arange(first, first + W, dtype=torch.int64, device=logits_RW.device)
    words_BNX = masks.words_GNX.index_select(0, masks.place_B.clamp(min=0))
    is_allowed_BNW = (words_BNX.index_select(2, ids_W >> 5) >> (ids_W & 31)) & 1 > 0
    is_free_B11 = (masks.place_B < 0)[:, None, None]
    banned_RW = ~(is_allowed_BNW | is_free_B11).view(B * N, W)
    return logits_RW.float().masked_fill(banned_RW, -torch.inf)
