"""Segments and plans: descriptions of what one attention call reads.  They do not say who asks, nor which kernel answers.

Shapes: R rows, W table width, T queries, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specdec.attention.context_parallel.sharding import KVSharding
from specdec.attention.kinds import LayerKind
from specdec.attention.pages import PageTable
from specdec.ops.index import kept, use_index_kernels
from specdec.ops.operator import is_traced
from specdec.parallel.group import Group

Fresh = Literal["none", "queries", "all"]


@dataclass(frozen=True)
class Segment:
    """A table of rows of keys, and the queries of each row.

    Row r holds the queries cu_seqlens_q[r] to cu_seqlens_q[r + 1]; each of them reads the row's first cache_seqlens[r] keys.

    pages: the pages of each row's keys.  With page_size 1 they are slots (one token's place each).
    cache_seqlens: [R] int32, the number of readable keys in each row.
    cu_seqlens_q: [R + 1] int32, cumulative query counts as in FlashAttention.
    max_seqlen_q: the most queries that any row holds.  The host knows this number, so no one has to read it from the device.
    causal: query i of n reads keys up to cache_seqlens - n + i (bottom-right aligned, as in FlashAttention).
    ragged: the rows hold different numbers of queries, as prompts do (varlen).
    base_B: int32, the sequence position of key 0 of each sequence's rows; a sequence's rows are adjacent.  In a ragged segment
        there is one for each query, of its row.  None: position 0.
    starts_T: int32, the first key of its row that each query reads (windows, chunks, or a shared prefix that another segment
        reads).  None: key 0.
    window_right: of a causal segment, how many keys after its own each query reads too, as in flash-attn's window_size (an
        encoder's window looks in both directions).
    alibi_positions_T: int32, each query's position counted from its row's key 0 (its position minus the row's base), for
        ALiBi's distances.  None: no layer that reads this segment has slopes.
    span: the most keys between any query's first and its last key; known to the host.  None: a query may read its whole row.
    window: the queries are their row's last tokens, and starts_T says of each that it reads the last `window` keys up to its
        own, and nothing else.  A library that has windows then needs no first keys.  None: starts_T alone says what is read.
    whole_or_none: starts_T says of each query that it reads its whole row, or that it reads nothing.
    fresh: which of a row's keys the layer may have stored just before it attends: those of the row's own "queries", its last
        ones; "none"; or perhaps "all".  The others were complete before its projections, so kernels may read them early.
    max_cached: the most keys that any row of a prompt holds before the pass's own tokens; known to the host.  None: not given.
    """

    pages: PageTable
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    causal: bool = False
    ragged: bool = False
    base_B: Tensor | None = None
    starts_T: Tensor | None = None
    alibi_positions_T: Tensor | None = None
    span: int | None = None
    window: int | None = None
    whole_or_none: bool = False
    max_cached: int | None = None
    window_right: int = 0
    fresh: Fresh = "all"

    @property
    def rows(self) -> int:
        """R, the number of rows."""
        return self.cache_seqlens.shape[0]

    @property
    def is_per_query(self) -> bool:
        """Whether queries of a row differ in what they read, or in how they score it, beyond what `causal` says."""
        return not (self.starts_T is None and self.alibi_positions_T is None and self.window_right == 0)

    @property
    def max_keys(self) -> int:
        """An estimate of the most keys that the queries of one row read together; kernels split a row's keys by it.

        The estimate uses the host's knowledge only: the table's width and the span.  Without a span it is an upper bound, and
        with a span as long as the row's queries stand at consecutive positions, as a chain's do.  A row of a shared prefix
        holds the queries of several sequences, whose windows may lie far apart and cover more keys than this: there the number
        only decides how many splits there are, and every key is still read.
        """
        max_keys = self.pages.capacity
        return max_keys if self.span is None else min(max_keys, self.span + self.max_seqlen_q - 1)

    @classmethod
    def empty(cls, rows: int, width: int, queries_per_row: int, *, device: torch.device | str = "cpu") -> Segment:
        """Buffers for `rows` rows of `width` slots, with `queries_per_row` queries each; a builder fills them."""
        return cls(
            pages=PageTable(torch.zeros(rows, width, dtype=torch.int32, device=device)),
            cache_seqlens=torch.zeros(rows, dtype=torch.int32, device=device),
            cu_seqlens_q=uniform_cu_seqlens(rows, queries_per_row, device),
            max_seqlen_q=queries_per_row,
        )

    @classmethod
    def of_slots(cls, slots_RW: Tensor, lens_R: Tensor, base_B: Tensor | None = None) -> Segment:
        """One query a row, which reads the first lens_R[r] slots of row r.  All tensors are int32."""
        rows = lens_R.shape[0]
        if is_traced(lens_R):
            cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=lens_R.device)
        else:  # a prompt may have any number of rows: the tensors that are kept double in length
            cu_seqlens_q = uniform_cu_seqlens(1 << rows.bit_length(), 1, lens_R.device)[: rows + 1]
        return cls(PageTable(slots_RW), lens_R, cu_seqlens_q, 1, base_B=base_B)

    def local(self, kind: LayerKind, positions_T: Tensor) -> Segment:
        """This segment for layers of that kind: the part that a windowed or chunked layer reads, and the queries' positions
        if the layer has slopes.  positions_T: int64, each query's position.
        """
        if kind.alibi:
            with_positions = replace(self, alibi_positions_T=row_positions(positions_T, self.base_B))
            return with_positions.local(replace(kind, alibi=False), positions_T)
        if kind.reads_all:
            return self
        first_T = first_keys(kind, positions_T, self.base_B, self.starts_T)
        window = kind.window if self._holds_texts_to_their_end else None
        return replace(self, starts_T=first_T, span=kind.span, window=window, whole_or_none=False)

    @property
    def _holds_texts_to_their_end(self) -> bool:
        """Whether a row's key k is that of position k, and its last queries' keys are its last ones."""
        ends = self.causal or (self.max_seqlen_q == 1 and self.fresh == "queries")
        return ends and self.base_B is None and self.starts_T is None


class ContextParallelPrefix(NamedTuple):
    """Committed tokens that are sharded over several ranks (attention/context_parallel/).

    own: the tokens that this rank keeps; every query of a row reads all of them, or those from its first key on.
    group: the ranks that keep the others.  sharding: which these are.
    has_all_heads: whether each rank computes the queries of all heads; else ranks share the heads.
    """

    own: Segment
    group: Group
    sharding: KVSharding
    has_all_heads: bool = False

    def local(self, kind: LayerKind, positions_T: Tensor) -> ContextParallelPrefix:
        """This prefix for layers of that kind: of a window or a chunk the tokens that this rank keeps, which may be none."""
        assert not kind.alibi, "a rank's keys stand at positions that ALiBi can't tell"
        if kind.reads_all:
            return self
        before_T = self.sharding.local_lens(first_keys(kind, positions_T, None, None))  # are as many as the first key's number
        span = None if kind.span is None else self.sharding.max_local(kind.span)
        return self._replace(own=replace(self.own, starts_T=before_T, span=span))


class LaterQueries(NamedTuple):
    """The queries of a pass from number `begin` on, which a plan of their own describes."""

    begin: int
    plan: AttentionPlan


@dataclass(frozen=True)
class AttentionPlan:
    """What the T queries of one attention call read, by part.  Every part covers all T queries; the parts' states are merged.

    segments: the paged parts: prefixes, shared prefixes, causal rows.  A page may be one slot.
    positions_T: int64, each query's position in its sequence.  None: every row holds the same number of queries, and they
        are the row's last tokens, as in a causal segment.
    suffix: the draft tree's own keys: row t lists the few slots (page size 1) that query t reads.  None: there is no tree.
        The builder of a plan says which part is the suffix; no backend guesses it from a segment's shape.
    context_parallel: a prefix of which this rank keeps a part.  It is not one of `parts`: the queries of all ranks' heads read
        it, and the ranks exchange partial states (LayerCall.attend).  None: this rank keeps all that its queries read.
    cross: the texts of an encoder, which layers of cross attention read.  Such a layer reads nothing else, and no other layer
        reads it: it is not one of the parts that are merged.  None: the model has no encoder.
    later: queries of the same pass after these T, which are attended by a call of their own.  None: there are none.
    """

    segments: tuple[Segment, ...]
    positions_T: Tensor | None = None
    suffix: Segment | None = None
    cross: Segment | None = None
    context_parallel: ContextParallelPrefix | None = None
    later: LaterQueries | None = None

    def __post_init__(self) -> None:
        assert self.segments or (self.suffix and self.context_parallel), "a plan needs a paged segment"
        assert self.suffix is None or self.suffix.pages.page_size == self.suffix.max_seqlen_q == 1, (
            "a suffix lists one query's slots"
        )

    @property
    def parts(self) -> tuple[Segment, ...]:
        """The paged segments, and last the suffix if there is one."""
        return self.segments if self.suffix is None else (*self.segments, self.suffix)

    def local(self, kind: LayerKind) -> AttentionPlan:
        """The same plan for layers of that kind, without `later`.  Suffixes are restricted like the paged segments."""
        if kind.reads_all and not kind.alibi:
            return self
        prefix = self.context_parallel
        assert prefix is None or self.positions_T is not None, "tokens in a scratch do not say where they stand"
        positions_T = last_positions(self.segments[0]) if self.positions_T is None else self.positions_T
        segments = tuple(segment.local(kind, positions_T) for segment in self.segments)
        suffix = None if self.suffix is None else self.suffix.local(kind, positions_T)
        prefix = None if prefix is None else prefix.local(kind, positions_T)
        return AttentionPlan(segments, positions_T, suffix, self.cross, prefix)


def last_positions(segment: Segment) -> Tensor:
    """[T] int64: the queries' positions, where a row's queries are its last max_seqlen_q tokens."""
    assert not segment.ragged and (segment.causal or segment.max_seqlen_q == 1), "queries may not be their rows' last tokens"
    n = segment.max_seqlen_q
    if use_index_kernels(segment.cache_seqlens):
        from specdec.attention.kernels.tables_triton import launch_last_positions

        return launch_last_positions(segment.cache_seqlens, n)
    offsets_n = torch.arange(-n, 0, dtype=torch.int64, device=segment.cache_seqlens.device)
    return (segment.cache_seqlens.long()[:, None] + offsets_n).flatten()


def first_keys(kind: LayerKind, positions_T: Tensor, base_B: Tensor | None, lower_T: Tensor | None) -> Tensor:
    """[T] int32: the first key of its row that each query may read under a kind that does not read all keys.

    positions_T: int64, each query's position.
    base_B: int32, the position of key 0 of each sequence's rows, or of each query's row; None: 0.
    lower_T: int32, lower bounds for the result; None: 0.
    """
    if use_index_kernels(positions_T):
        from specdec.attention.kernels.tables_triton import launch_first_keys

        return launch_first_keys(kind, positions_T, base_B, lower_T)
    first_T = kind.first_keys(positions_T)
    if base_B is not None:
        first_T = (first_T.view(base_B.shape[0], -1) - base_B[:, None]).clamp_(min=0).flatten()
    first_T = first_T.int()
    return first_T if lower_T is None else torch.maximum(first_T, lower_T)


def row_positions(positions_T: Tensor, base_B: Tensor | None) -> Tensor:
    """[T] int32: each query's position, counted from key 0 of its row.

    positions_T: int64, each query's position.
    base_B: int32, the position of key 0 of each sequence's rows, or of each query's row; None: 0.
    """
    if base_B is None:
        return positions_T.int()
    return (positions_T.view(base_B.shape[0], -1) - base_B[:, None]).int().flatten()


@kept
def uniform_cu_seqlens(rows: int, queries_per_row: int, device: torch.device | str) -> Tensor:
    """[rows + 1] int32: cumulative query counts of rows that hold equally many.  The tensor is cached: never write to it."""
    return torch.arange(0, rows * queries_per_row + 1, queries_per_row, dtype=torch.int32, device=device)
