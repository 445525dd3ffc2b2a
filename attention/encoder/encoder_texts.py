"""Texts of an encoder: what an encoder has read, as rows of a batch read them in cross attention.

An encoder's text is stored once, in one page of a cache of its own, and never changes.  Every query of a row reads all of it,
so what a row reads is one page number and a length.  This module knows no model and no request.

Shapes: B rows of a batch, R rows of a pass.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment, uniform_cu_seqlens


class EncoderTexts(NamedTuple):
    """The encoder's text of each row.

    page_B: int32, the page of the encoder's cache that holds it.
    lens_B: int32, its tokens; 0: the row has none, and reads nothing.
    page_size: tokens of the longest text.
    """

    page_B: Tensor
    lens_B: Tensor
    page_size: int

    def of_rows(self, rows_R: Tensor) -> EncoderTexts:
        """The texts of these rows (int64)."""
        return EncoderTexts(self.page_B.index_select(0, rows_R), self.lens_B.index_select(0, rows_R), self.page_size)

    def read_by(self, queries_per_row: int) -> Segment:
        """What equally many queries of each row read."""
        cu_seqlens_q = uniform_cu_seqlens(self.lens_B.shape[0], queries_per_row, self.lens_B.device)
        return self.read_by_rows_of(cu_seqlens_q, queries_per_row, ragged=False)

    def read_by_rows_of(self, cu_seqlens_q: Tensor, max_seqlen_q: int, *, ragged: bool) -> Segment:
        """What the queries of each row read.  max_seqlen_q: the most queries of a row.  ragged: rows may differ in number."""
        return Segment(PageTable(self.page_B[:, None], self.page_size), self.lens_B, cu_seqlens_q, max_seqlen_q, ragged=ragged)
