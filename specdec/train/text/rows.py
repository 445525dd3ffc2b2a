"""Packs the tokens of documents into rows of one length, which a training step reads.

This file knows neither models nor tokenizer files: a tokenizer is a callable from text to token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

SIDE_ENDS = 0.7  # share of a run after which batches hold main text only


class TokenRows:
    """The tokens of documents, one document after another, cut into rows of `width` tokens.

    Each epoch puts the documents in another random order, and so has other rows.  rows: full rows of an epoch; the tokens after
    the last full row are left out.  ValueError if there is not one full row.
    """

    def __init__(self, documents: Sequence[str], encode: Callable[[str], list[int]], width: int, device: str = "cpu") -> None:
        pieces = [torch.tensor(encode(document), dtype=torch.int64, device="cpu") for document in documents]
        self.lengths = torch.tensor([len(piece) for piece in pieces], dtype=torch.int64, device="cpu")
        self.tokens = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")
        self.width, self.device, self.rows = width, device, len(self.tokens) // width
        if not self.rows:
            raise ValueError(f"text: expected at least {width} tokens (one row), got {len(self.tokens)}")
        self._epoch, self._cached = -1, torch.empty(0, dtype=torch.int64, device="cpu")

    def in_order(self) -> torch.Tensor:
        """All full rows [rows, width] int64, with documents in the order of the files."""
        return self.tokens[: self.rows * self.width].view(self.rows, self.width).to(self.device)

    def epoch(self, number: int, seed: int) -> torch.Tensor:
        """All full rows [rows, width] of epoch `number`.  They depend on (number, seed) alone, so a resumed run can read on."""
        if number != self._epoch:
            generator = torch.Generator("cpu").manual_seed(seed * 100003 + number)
            order = torch.randperm(len(self.lengths), generator=generator, dtype=torch.int64, device="cpu")
            starts = (self.lengths.cumsum(0) - self.lengths)[order]
            lengths = self.lengths[order]
            shift = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
            shuffled = self.tokens[torch.arange(len(self.tokens), dtype=torch.int64, device="cpu") + shift]
            rows = shuffled[: self.rows * self.width].view(self.rows, self.width)
            self._epoch, self._cached = number, rows.to(self.device)
        return self._cached

    def take(self, start: int, count: int, seed: int) -> torch.Tensor:
        """Rows start .. start + count - 1, [count, width], of the endless sequence of epochs."""
        parts = []
        while count:
            rows = self.epoch(start // self.rows, seed)[start % self.rows :][:count]
            parts.append(rows)
            start, count = start + len(rows), count - len(rows)
        return torch.cat(parts)


def mixed_batches(
    main: TokenRows, side: TokenRows | None, batch: int, steps: int, share: float, seed: int
) -> Callable[[int], torch.Tensor]:
    """A function from a 0-based step to its rows [batch, width].

    At first the given share of the rows comes from `side`.  The share falls linearly and is 0 from SIDE_ENDS of the run on.
    The rows of a step follow from its number alone, so a resumed run reads on where it stopped.
    """
    fall = [max(0.0, 1.0 - step / (SIDE_ENDS * steps)) if side else 0.0 for step in range(steps)]
    counts = [round(batch * share * left) for left in fall]
    before = [0, *accumulate(counts)]

    def rows_of(step: int) -> torch.Tensor:
        rows = main.take(step * batch - before[step], batch - counts[step], seed)
        if side is None or not counts[step]:
            return rows
        return torch.cat([rows, side.take(before[step], counts[step], seed)])

    return rows_of
