"""The running batch as tensors: everything that a round computes from.  This module knows no request.

A row of the batch is one of three things, and `active_B` and `page_table_BGW` say which:
- running: the row is active and has its own pages; rounds read and write them;
- entering: the row's prompt is not complete.  `prompt_table_BGW` holds its pages already, but rounds treat it as padding;
- padding: the row is inactive, has length 0, and its pages are the dummy page.  Rounds compute padding like any row, and nobody
  reads the result.

The last row of the runner's state is always padding: the padding of a chunk of prompts is written there.

A row has a page table for each group of layers: all layers of both models, or the layers that read all keys, and then those
that read a span of keys only.

What a drafter keeps of each row is the drafter's own.

Shapes: B rows, G groups of layers, W pages per row, R some of the rows.  The floats and integers of options are F and I of
RowSampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from specdec.attention.encoder.encoder_texts import EncoderTexts
from specdec.attention.pages import PageTable
from specdec.attention.shared import SharedPrefix
from specdec.batch.grammars.waits import WaitRows
from specdec.batch.sampling import RowSampling
from specdec.batch.tables import TokenTables
from specdec.limits import DUMMY_PAGE
from specdec.steps import Needs, RowOptions


@dataclass(frozen=True)
class BatchState:
    """The rows of a batch.  Views of a batch's first rows are a BatchState too.

    lens_B: int32, how many tokens are committed (L): their keys and values are final.
    bonus_B: int64, the last emitted token, whose keys and values are not written yet.
    active_B: int32, 1 for a running row, else 0; the lengths of inactive rows don't grow.
    page_table_BGW: int32, the pages that rounds read and write: a running row's own, else the dummy page.
    prompt_table_BGW: int32, the pages that the row owns or borrows; chunks of prompts use these.
    speculates_B: int32, 1 where draft tokens may be accepted, else 0.  The drafter computes the other rows too, where it may
        read keys and values that nobody wrote; so their drafts are any token ids, with any scores.
    option_floats_BF, option_ints_BI: how the row samples; see RowSampling.
    encoder_page_B, encoder_lens_B: int32, the text of an encoder that the row reads; see EncoderTexts.  0 without an encoder.
    shared: the pages of group 0 that rows read together; None: each row reads all its own pages.
    page_size: tokens per page of both tables.
    group: the group of layers whose pages `pages` and `prompt_pages` are.
    encoder_size: tokens of the longest text of an encoder; 0: there is none.
    tables: the rows' rules for single tokens; None as long as no row has had any.
    waits: how the rows' texts wait for their grammars; None as long as no row has done so.
    """

    lens_B: Tensor
    bonus_B: Tensor
    active_B: Tensor
    page_table_BGW: Tensor
    prompt_table_BGW: Tensor
    speculates_B: Tensor
    option_floats_BF: Tensor
    option_ints_BI: Tensor
    encoder_page_B: Tensor
    encoder_lens_B: Tensor
    shared: SharedPrefix | None = field(default=None, kw_only=True)
    page_size: int = field(kw_only=True)
    group: int = field(default=0, kw_only=True)
    encoder_size: int = field(default=0, kw_only=True)
    tables: TokenTables | None = field(default=None, kw_only=True)
    waits: WaitRows | None = field(default=None, kw_only=True)

    @classmethod
    def empty(
        cls, rows: int, pages: int, *, page_size: int, groups: int = 1, encoder_size: int = 0, device: torch.device | str
    ) -> BatchState:
        """A batch of `rows` rows, all of them padding.  pages: W.  groups: G.  page_size, encoder_size: see the class."""

        def zeros(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        def tables() -> Tensor:
            width = pages if groups == 1 else -(-pages // 4) * 4  # so that each table is aligned to 16 bytes
            return torch.full((rows, groups, width), DUMMY_PAGE, dtype=torch.int32, device=device)

        neutral = RowSampling.of([RowOptions.of()] * rows, device)
        return cls(
            *(zeros(), zeros(torch.int64), zeros(), tables(), tables(), zeros()),
            *(neutral.floats_RF, neutral.ints_RI, zeros(), zeros()),
            page_size=page_size,
            encoder_size=encoder_size,
        )

    @property
    def rows(self) -> int:
        return self.lens_B.shape[0]

    @property
    def pages(self) -> PageTable:
        """The pages that rounds read and write in the layers of `group`."""
        return PageTable(self.page_table_BGW[:, self.group], self.page_size)

    @property
    def prompt_pages(self) -> PageTable:
        """The pages that chunks of prompts read and write in the layers of `group`."""
        return PageTable(self.prompt_table_BGW[:, self.group], self.page_size)

    @property
    def encoder_texts(self) -> EncoderTexts | None:
        """The encoder's texts that the rows read; None: there is no encoder."""
        return EncoderTexts(self.encoder_page_B, self.encoder_lens_B, self.encoder_size) if self.encoder_size else None

    @property
    def sampling(self) -> RowSampling:
        """How each row samples; the tensors are the batch's own."""
        return RowSampling(self.option_floats_BF, self.option_ints_BI, self.tables)

    def sampling_of(self, rows_R: Tensor, needs: Needs) -> RowSampling:
        """How some rows sample, in copies.  rows_R: int64.  needs: of the pass, which may do without tables."""
        sampling = self.sampling if needs.rules else self.sampling._replace(tables=None)
        return sampling.of_rows(rows_R)

    @property
    def shape(self) -> tuple[int, bool]:
        """What a CUDA graph captured with this state depends on, besides the values of its tensors."""
        return self.rows, self.shared is not None

    def tensors(self) -> list[Tensor]:
        """All tensors whose first dimension is the rows: those of every field but the ones after `encoder_lens_B`."""
        return [getattr(self, each.name) for each in fields(self) if not each.kw_only]

    def with_tables(self, width: int) -> BatchState:
        """The same rows with tables for rules, none of which has any yet.  width: this rank's run of the vocabulary."""
        return replace(self, tables=TokenTables.neutral(self.rows, width, self.lens_B.device))

    def with_waits(self, vocab_size: int) -> BatchState:
        """The same rows with tables of how texts wait for their grammars, which none of them does yet."""
        return replace(self, waits=WaitRows.empty(self.rows, vocab_size, self.lens_B.device))

    def written(self, needs: Needs) -> list[Tensor]:
        """The tensors that a pass with these needs changes as it chooses tokens."""
        of_tables = self.tables.written if self.tables is not None and needs.history else ()
        of_waits = [self.waits.state_B] if self.waits is not None and needs.waits else ()
        return [self.lens_B, self.bonus_B, *of_tables, *of_waits]

    def begin_round(self, needs: Needs) -> BatchState:
        """What `awake` gives, in the first pass of a round."""
        if needs.halts:
            self.waiting.wake(self.active_B)
        return self.awake(needs)

    def awake(self, needs: Needs) -> BatchState:
        """The rows as a round with these needs runs them: in one without masks, rows that had halted before it are padding."""
        return replace(self, active_B=self.waiting.awake_B) if needs.halts else self

    @property
    def waiting(self) -> WaitRows:
        """`waits`, in a pass that needs them."""
        assert self.waits is not None, "a pass over texts that wait has tables of them"
        return self.waits

    def narrow(self, rows: int) -> BatchState:
        """Views of the first `rows` rows, without `shared`: each row reads all its own pages."""
        tensors = (tensor[:rows] for tensor in self.tensors())
        tables = None if self.tables is None else self.tables.narrow(rows)
        waits = None if self.waits is None else self.waits.narrow(rows)
        return BatchState(*tensors, page_size=self.page_size, encoder_size=self.encoder_size, tables=tables, waits=waits)

    def of_group(self, group: int) -> BatchState:
        """The same rows as the layers of that group see them.  Only group 0 reads common pages together."""
        return self if group == self.group else replace(self, group=group, shared=None if group else self.shared)

    def sharing(self, shared: SharedPrefix) -> BatchState:
        """The same rows, which read common pages together.  shared: of at least as many rows."""
        return replace(self, shared=shared.narrow(self.rows))

    def enter_rows(self, rows_R: Tensor, pages_RGw: Tensor, sampling: RowSampling, speculates_R: Tensor) -> None:
        """Gives rows (int64) their pages and their options, and no rules for tokens.

        pages_RGw: of any integers, each row's first w pages of each group.  speculates_R: of any type.
        """
        # After its own pages, a row must not name an earlier request's.
        self.prompt_table_BGW.index_fill_(0, rows_R, DUMMY_PAGE)
        self.prompt_table_BGW[..., : pages_RGw.shape[2]].index_copy_(0, rows_R, pages_RGw.int())
        self.option_floats_BF.index_copy_(0, rows_R, sampling.floats_RF)
        self.option_ints_BI.index_copy_(0, rows_R, sampling.ints_RI)
        self.speculates_B.index_copy_(0, rows_R, speculates_R.int())
        for rules in (self.tables, self.waits):
            if rules is not None:
                rules.clear_rows(rows_R)

    def grow_rows(self, entries_NX: Tensor) -> None:
        """Writes more entries into running rows' tables.

        entries_NX: int64, X = 2 + G: a row, a place in its table, and for each group the page there.
        """
        (rows_N, places_N), pages_NG = entries_NX[:, :2].unbind(1), entries_NX[:, 2:].int()
        for table_BGW in (self.page_table_BGW, self.prompt_table_BGW):
            table_BGW[rows_N, :, places_N] = pages_NG

    def record(self, tokens_BE: Tensor, counts_B: Tensor, first: int, rows_B: Tensor | None = None) -> None:
        """Adds the first counts_B tokens of each row to what the tables know of its text.

        first: see TokenTables.enter.  rows_B: int64, which rows these are; None: all of them.
        """
        assert self.tables is not None, "a pass that needs the rows' texts has tables"
        if rows_B is None:
            return self.tables.record(tokens_BE, counts_B, first)
        some = self.tables.of_rows(rows_B)
        some.record(tokens_BE, counts_B, first)
        for tensor, values in zip(self.tables.written, some.written, strict=True):
            tensor.index_copy_(0, rows_B, values)

    def start_rows(self, rows_R: Tensor, lens_R: Tensor, last_R: Tensor, bonus_R: Tensor) -> None:
        """Makes rows whose prompts are complete running rows.  Rows with the rest of a prompt to come stay padding for rounds.

        rows_R: int64, rows of which a chunk has run a part of the prompt.
        lens_R: int32, how many tokens of the prompt have run.
        last_R: int32, 1 where the prompt is complete, else 0.
        bonus_R: int64, the first output token where the prompt is complete.
        """
        self.lens_B.index_copy_(0, rows_R, lens_R * last_R)
        self.active_B.index_copy_(0, rows_R, last_R)
        self.bonus_B.index_copy_(0, rows_R, bonus_R)
        own_RGW = self.prompt_table_BGW.index_select(0, rows_R)
        self.page_table_BGW.index_copy_(0, rows_R, torch.where(last_R[:, None, None] > 0, own_RGW, DUMMY_PAGE))

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Makes each target row what its source row was before.  Both are int64, and no target occurs twice."""
        if sources_R.shape[0]:
            more = [tensor for each in (self.tables, self.waits) if each is not None for tensor in each.tensors()]
            for tensor in [*self.tensors(), *more]:
                tensor.index_copy_(0, targets_R, tensor.index_select(0, sources_R))

    def clear_rows(self, rows_R: Tensor) -> None:
        """Makes rows (int64) padding.  Other values of theirs may stay, because inactive rows use the dummy page only."""
        for tensor in (self.active_B, self.lens_B, self.speculates_B, self.sampling.temperature_R, self.encoder_lens_B):
            tensor.index_fill_(0, rows_R, 0)
        if self.waits is not None:
            self.waits.clear_rows(rows_R)
        self.page_table_BGW.index_fill_(0, rows_R, DUMMY_PAGE)
