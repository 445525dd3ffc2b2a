"""The text of every sequence on the device, by slot: the entry at position i is the token after position i.

Keys of an EAGLE head depend on the next token in the same way, so pages of the prefix cache hold the right entries for every
text that may borrow them.

Shapes: B sequences, E tokens of each, T tokens, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.ops.index import use_index_kernels

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

    def append(self, pages: PageTable, lens_B: Tensor, tokens_BE: Tensor) -> None:
        """Writes the tokens (int64) after the first lens_B (int32) of each sequence; what is padding comes after its end."""
        if use_index_kernels(tokens_BE):
            from specdec.draft.ngram.store_triton import launch_write

            return launch_write(pages, lens_B, tokens_BE, self.tokens_N)
        self.write(pages.next_tokens(lens_B, tokens_BE.shape[1]).slots.flatten(), tokens_BE.flatten())

    def copy_pages(self, sources_N: Tensor, targets_N: Tensor, page_size: int, group: int) -> None:
        """Copies whole pages, as `KVCache.copy_pages`.  Other groups' pages hold no tokens."""
        if group == 0:
            pages = self.tokens_N.view(-1, page_size)
            pages.index_copy_(0, targets_N, pages.index_select(0, sources_N))
