"""Sequences whose pages are scattered over one cache: their page table, and numbers in the slots that may be read.

Shapes: B sequences, W pages of each, X slots.
"""

import torch
from torch import Tensor


class Scattered:
    """Sequences of `lens` tokens and room for `extra` more each, over pages in random order.  Page 0 is the dummy.

    table_BW: int32.  lens_B: int32.  spare: pages of each table beyond what the longest sequence needs.  idle_is_dummy: whether
    entries that no token needs name page 0, or a page of their own.
    """

    def __init__(
        self, lens: list[int], page_size: int, *, extra: int = 0, spare: int = 0, idle_is_dummy: bool = False, seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.lens, self.page_size, self.extra, self.device = lens, page_size, extra, device
        self.generator = torch.Generator().manual_seed(seed)
        width = max(self._pages(n) for n in lens) + spare
        pages = torch.randperm(len(lens) * width, generator=self.generator).view(len(lens), width) + 1
        self.num_pages = len(lens) * width + 1
        for row, n in zip(pages, lens, strict=True):
            if idle_is_dummy:
                row[self._pages(n) :] = 0
        self.table_BW = pages.int().to(device)
        self.lens_B = torch.tensor(lens, dtype=torch.int32, device=device)

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers that are the same in every dtype, but for rounding."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.device, dtype)

    def slots(self, row: int, start: int, end: int) -> Tensor:
        """[end - start] int64, by the definition of a page table."""
        at = torch.arange(start, end, device=self.device)
        return self.table_BW[row, at // self.page_size].long() * self.page_size + at % self.page_size

    def fresh_slots(self) -> Tensor:
        """[B, extra] int64: right after each sequence's end."""
        return torch.stack([self.slots(row, n, n + self.extra) for row, n in enumerate(self.lens)])

    def fill(self, *shape: int, dtype: torch.dtype = torch.float32, elsewhere: float = torch.nan) -> Tensor:
        """[X, *shape]: random where a token has its slot, the extra ones too; `elsewhere` where nobody may read."""
        buffer = torch.full((self.num_slots, *shape), elsewhere, dtype=dtype, device=self.device)
        for row, n in enumerate(self.lens):
            buffer[self.slots(row, 0, n + self.extra)] = self.randn(n + self.extra, *shape, dtype=dtype)
        return buffer

    def _pages(self, length: int) -> int:
        return -(-(length + self.extra) // self.page_size)
