"""The text of every sequence on the device, by slot: the entry at position i is the token after position i.

Keys of an EAGLE head depend on the next token in the same way, so pages of the prefix cache hold the right entries for every
text that may borrow them.  Knows slots, no sequences.

Shapes: T tokens, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

ENTRY_BYTES = torch.int32.itemsize


class TokenStore:
    """Token ids of the first group's slots.  Entries that nobody wrote are 0, which is an id too."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.tokens_N = torch.zeros(slots, dtype=torch.int32, device=device)

    @property
    def bytes(self) -> int:
        return self.tokens_N.nbytes

    def write(self, slots_T: Tensor, tokens_T: Tensor) -> None:
        """Both are int64."""
        self.tokens_N.index_copy_(0, slots_T, tokens_T.int())

    def copy_pages(self, sources_N: Tensor, targets_N: Tensor, page_size: int, group: int) -> None:
        """Copies whole pages, as `KVCache.copy_pages`.  Other groups' pages hold no tokens."""
        if group == 0:
            pages = self.tokens_N.view(-1, page_size)
            pages.index_copy_(0, targets_N, pages.index_select(0, sources_N))
