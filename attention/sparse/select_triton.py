"""The kernels that select each query's best scores, exactly: ties go to the lower position, and slots leave in position order.

Rows of few candidates take one launch, `select_kernel`, whose programs keep a query's scores in registers and search the last
selected score by halves.  Rows of many take three, each with one or more programs a query; a program looks at a range (slice)
of the query's scores.
- `histogram_kernel` counts the scores in equal bins between the query's smallest and largest score.
- `border_kernel` finds the bin that the last selected score lies in.  Scores in higher bins are all selected; the scores in
  this bin, the border, are listed.  It also counts each slice's scores in higher bins.
- `compact_kernel` finds the last selected score among the border's, and writes the slots of a slice's selected positions after
  those of earlier slices.
The list's order depends on which program comes first; what is made of it does not.  Bins only decide how long the list is: the
result is exact for any scores, and slow for a list that holds much of a row (many equal scores at the border, or a range of
scores that a few outliers widen a thousandfold).

A query that sees at most topk keys selects all of them, and its scores are not read.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernels read what a pass's layers share about its
candidates, as the kernels of the scores do.  They trigger late.  Attention, which may be the next kernel, reads its rows'
lengths before its own wait: they are made once a pass, not by these kernels.

Shapes: T queries, N scores of a block, B bins, C border scores of a block, S slices, E ranges of keys, I selected keys.
"""

import triton
import triton.language as tl

from specdec.ops.topk_triton import ordered_32


@triton.jit
def bounds(extremes, place, ranges, live, BLOCK_E: tl.constexpr):
    """(the smallest score, bins a unit of score) of a query, from the first `live` of its ranges of keys."""
    e = tl.arange(0, BLOCK_E)
    low = float("inf")
    high = -float("inf")
    for start in tl.range(0, live, BLOCK_E, num_stages=1):
        ok_E = start + e < live
        at_E = extremes + (place * ranges + start + e) * 2
        low = tl.minimum(low, tl.min(tl.load(at_E, mask=ok_E, other=float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.load(at_E + 1, mask=ok_E, other=-float("inf")), 0))
    return low, 1.0 / tl.maximum(high - low, 1e-30)


@triton.jit
def live_ranges(paged, splits, block):
    """How many ranges of keys of a query hold scores.  The path's range is the first.

    splits: into how many parts row_scores_kernel divided the keys; 0: the ranges are blocks.
    """
    per_range = block
    if splits > 0:
        per_range = tl.cdiv(tl.cdiv(paged, tl.maximum(splits, 1)), block) * block
    return 1 + tl.cdiv(paged, tl.maximum(per_range, 1))


@triton.jit
def bin_of(score, low, unit, BINS: tl.constexpr):
    """The bin of a score; a larger score is never in a lower bin."""
    return tl.minimum(((score - low) * unit * BINS).to(tl.int32), BINS - 1)


@triton.jit
def slice_of(visible, slices, BLOCK_N: tl.constexpr):
    """(begin, end) of this program's part of a query's candidates."""
    per_slice = tl.cdiv(tl.cdiv(visible, slices), BLOCK_N) * BLOCK_N
    begin = tl.program_id(1) * per_slice
    return begin, tl.minimum(begin + per_slice, visible)


@triton.jit
def border_of(histogram, place, visible, topk, BINS: tl.constexpr):
    """(the bin of the topk-th score, how many of its scores are selected)."""
    b = tl.arange(0, BINS)
    count_B = tl.load(histogram + place * BINS + b)
    above_B = visible - tl.cumsum(count_B, 0)  # scores in higher bins
    border = tl.max(tl.where(above_B + count_B >= topk, b, 0), 0)
    return border, topk - tl.sum(tl.where(b == border, above_B, 0), 0)


@triton.jit(do_not_specialize=["first_token", "splits", "ranges", "topk", "slices"])
def histogram_kernel(
    scores,  # [queries, stride_scores] float32
    extremes,  # [queries, ranges, 2] float32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    histogram,  # [queries, BINS] int32, zeros
    first_token,
    splits,
    ranges,
    topk,
    stride_scores,
    SCORE_BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    paged = tl.load(paged_T + first_token + place)
    visible = paged + tl.load(path_T + first_token + place)
    begin, end = slice_of(visible, tl.num_programs(1), BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (visible <= topk) | (begin >= end):
        return
    n = tl.arange(0, BLOCK_N)
    scores += place * stride_scores
    s_N = tl.load(scores + begin + n, mask=begin + n < end, other=0.0)  # blocks are read one ahead
    low, unit = bounds(extremes, place, ranges, live_ranges(paged, splits, SCORE_BLOCK), BLOCK_E)
    count_B = tl.zeros([BINS], tl.int32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        bin_N = tl.where(start + n < end, bin_of(s_N, low, unit, BINS), 0)
        s_N = tl.load(scores + start + BLOCK_N + n, mask=start + BLOCK_N + n < end, other=0.0)
        count_B += tl.histogram(bin_N, BINS)
        count_B -= tl.where(tl.arange(0, BINS) == 0, BLOCK_N - tl.minimum(end - start, BLOCK_N), 0)
    tl.atomic_add(histogram + place * BINS + tl.arange(0, BINS), count_B, mask=count_B > 0, sem="relaxed")


@triton.jit(do_not_specialize=["first_token", "splits", "ranges", "topk", "slices"])
def border_kernel(
    scores,  # [queries, stride_scores] float32
    extremes,  # [queries, ranges, 2] float32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    histogram,  # [queries, BINS] int32
    cursor,  # [queries] int32, zeros
    listed,  # [queries, stride_scores] int64: border scores, each above its position
    counts,  # [queries, slices] int32
    first_token,
    splits,
    ranges,
    topk,
    stride_scores,
    SCORE_BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    paged = tl.load(paged_T + first_token + place)
    visible = paged + tl.load(path_T + first_token + place)
    begin, end = slice_of(visible, tl.num_programs(1), BLOCK_N)
    at = counts + place * tl.num_programs(1) + tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if visible <= topk:
        return
    if begin >= end:
        tl.store(at, 0)
        return
    n = tl.arange(0, BLOCK_N)
    scores += place * stride_scores
    s_N = tl.load(scores + begin + n, mask=begin + n < end, other=0.0)
    low, unit = bounds(extremes, place, ranges, live_ranges(paged, splits, SCORE_BLOCK), BLOCK_E)
    border, _ = border_of(histogram, place, visible, topk, BINS)
    above_N = tl.zeros([BLOCK_N], tl.int32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        bin_N = tl.where(start + n < end, bin_of(s_N, low, unit, BINS), -1)
        score_N = ordered_32(s_N)
        s_N = tl.load(scores + start + BLOCK_N + n, mask=start + BLOCK_N + n < end, other=0.0)
        above_N += (bin_N > border).to(tl.int32)
        on_N = (bin_N == border).to(tl.int32)
        found = tl.sum(on_N, 0)
        if found > 0:
            first = tl.atomic_add(cursor + place, found, sem="relaxed")
            to_N = place * stride_scores + first + tl.cumsum(on_N, 0) - 1
            key_N = (score_N.to(tl.int64) << 32) | (start + n).to(tl.int64)
            tl.store(listed + to_N, key_N, mask=on_N > 0)
    tl.store(at, tl.sum(above_N, 0))


@triton.jit
def last_of_few(listed, length, wanted, BLOCK_C: tl.constexpr):
    """The score, as an ordered integer, of the `wanted`-th best of at most BLOCK_C listed ones."""
    c = tl.arange(0, BLOCK_C)
    o = tl.arange(0, 32)
    score_C = (tl.load(listed + c, mask=c < length, other=0) >> 32).to(tl.int32)
    better_C = tl.zeros([BLOCK_C], tl.int32)
    for start in tl.range(0, length, 32, num_stages=1):
        ok_O = start + o < length
        other_O = (tl.load(listed + start + o, mask=ok_O, other=0) >> 32).to(tl.int32)
        better_C += tl.sum(((other_O[None, :] > score_C[:, None]) & ok_O[None, :]).to(tl.int32), 1)
    return tl.min(tl.where((c < length) & (better_C < wanted), score_C, 2147483647), 0)


@triton.jit
def last_of_many(listed, length, wanted, BLOCK_N: tl.constexpr):
    """The same of any number of listed scores: a search by halves between the smallest and the largest."""
    n = tl.arange(0, BLOCK_N)
    low = tl.full([], 2147483647, tl.int64)
    high = tl.full([], -2147483648, tl.int64)
    for start in tl.range(0, length, BLOCK_N, num_stages=1):
        ok_N = start + n < length
        score_N = tl.load(listed + start + n, mask=ok_N, other=0) >> 32
        low = tl.minimum(low, tl.min(tl.where(ok_N, score_N, 2147483647), 0))
        high = tl.maximum(high, tl.max(tl.where(ok_N, score_N, -2147483648), 0))
    while low < high:  # at least `wanted` scores are `low` or better, and at most as many are better than `high`
        middle = low + (high - low + 1) // 2
        count = 0
        for start in tl.range(0, length, BLOCK_N, num_stages=1):
            ok_N = start + n < length
            score_N = tl.load(listed + start + n, mask=ok_N, other=0) >> 32
            count += tl.sum((ok_N & (score_N >= middle)).to(tl.int32), 0)
        low = tl.where(count >= wanted, middle, low)
        high = tl.where(count > wanted, high, tl.where(count == wanted, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit(
    do_not_specialize=["first_token", "splits", "ranges", "topk", "stride_row", "stride_suffix", "stride_out"],
    do_not_specialize_on_alignment=["page_table", "rows_T", "paged_T", "path_T", "suffix"],
)
def compact_kernel(
    scores,  # [queries, stride_scores] float32
    extremes,  # [queries, ranges, 2] float32
    rows_T,  # [T] int32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    histogram,  # [queries, BINS] int32
    cursor,  # [queries] int32
    listed,  # [queries, stride_scores] int64
    counts,  # [queries, slices] int32
    page_table,  # [R, W] int32
    suffix,  # [T, P] int32 slots
    slots,  # [T, I] int32
    first_token,
    splits,
    ranges,
    topk,
    stride_scores,
    stride_row,
    stride_suffix,
    stride_out,
    PAGE_SIZE: tl.constexpr,
    HAS_SUFFIX: tl.constexpr,
    SCORE_BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token = first_token + place
    paged = tl.load(paged_T + token)
    visible = paged + tl.load(path_T + token)
    pages = page_table + tl.load(rows_T + token).to(tl.int64) * stride_row
    path = suffix + token * stride_suffix - paged
    begin, end = slice_of(visible, tl.num_programs(1), BLOCK_N)
    every = visible <= topk
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if begin >= end:
        return
    n = tl.arange(0, BLOCK_N)
    scores += place * stride_scores
    scored = tl.where(every, begin, end)  # scores that this program reads end here
    s_N = tl.load(scores + begin + n, mask=begin + n < scored, other=0.0)
    low, unit, border, last = 0.0, 0.0, 0, 0
    ties = 0  # how many of the scores equal to the last one are still to be selected in this slice
    at = begin
    if not every:
        low, unit = bounds(extremes, place, ranges, live_ranges(paged, splits, SCORE_BLOCK), BLOCK_E)
        border, wanted = border_of(histogram, place, visible, topk, BINS)
        listed += place * stride_scores
        length = tl.load(cursor + place)
        if length <= BLOCK_C:
            last = last_of_few(listed, length, wanted, BLOCK_C)
        else:
            last = last_of_many(listed, length, wanted, BLOCK_N)
        better = 0
        better_before = 0
        ties_before = 0
        for start in tl.range(0, length, BLOCK_N, num_stages=1):
            ok_N = start + n < length
            key_N = tl.load(listed + start + n, mask=ok_N, other=0)
            score_N = (key_N >> 32).to(tl.int32)
            before_N = ok_N & ((key_N & 0xFFFFFFFF).to(tl.int32) < begin)
            better += tl.sum((ok_N & (score_N > last)).to(tl.int32), 0)
            better_before += tl.sum((before_N & (score_N > last)).to(tl.int32), 0)
            ties_before += tl.sum((before_N & (score_N == last)).to(tl.int32), 0)
        tied = wanted - better  # how many of the scores equal to the last one are selected: the first ones
        s = tl.arange(0, BLOCK_S)
        count_S = tl.load(counts + place * tl.num_programs(1) + s, mask=s < tl.program_id(1), other=0)
        at = tl.sum(count_S, 0) + better_before + tl.minimum(ties_before, tied)
        ties = tl.maximum(tied - ties_before, 0)
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        key_N = start + n
        ok_N = key_N < end
        take_N = ok_N
        if not every:
            bin_N = bin_of(s_N, low, unit, BINS)
            score_N = ordered_32(s_N)
            tie_N = (ok_N & (bin_N == border) & (score_N == last)).to(tl.int32)
            take_N = ok_N & ((bin_N > border) | ((bin_N == border) & (score_N > last)))
            if ties > 0:  # most slices hold no tie that is selected
                take_N = take_N | ((tie_N > 0) & (tl.cumsum(tie_N, 0) <= ties))
                ties -= tl.minimum(tl.sum(tie_N, 0), ties)
            s_N = tl.load(scores + start + BLOCK_N + n, mask=start + BLOCK_N + n < scored, other=0.0)
        paged_N = take_N & (key_N < paged)
        page_N = tl.load(pages + key_N // PAGE_SIZE, mask=paged_N, other=0)
        slot_N = page_N * PAGE_SIZE + key_N % PAGE_SIZE
        if HAS_SUFFIX:
            slot_N = tl.where(paged_N, slot_N, tl.load(path + key_N, mask=take_N & (key_N >= paged), other=0))
        to_N = at + tl.cumsum(take_N.to(tl.int32), 0) - 1
        tl.store(slots + token * stride_out + to_N, slot_N, mask=take_N)
        at += tl.sum(take_N.to(tl.int32), 0)


@triton.jit(
    do_not_specialize=["first_token", "topk", "stride_row", "stride_suffix", "stride_out"],
    do_not_specialize_on_alignment=["page_table", "rows_T", "paged_T", "path_T", "suffix"],
)
def select_kernel(
    scores,  # [queries, stride_scores] float32
    rows_T,  # [T] int32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    page_table,  # [R, W] int32
    suffix,  # [T, P] int32 slots
    slots,  # [T, I] int32
    first_token,
    topk,
    stride_scores,
    stride_row,
    stride_suffix,
    stride_out,
    PAGE_SIZE: tl.constexpr,
    HAS_SUFFIX: tl.constexpr,
    BLOCK_N: tl.constexpr,  # no row has more candidates
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token = first_token + place
    paged = tl.load(paged_T + token)
    visible = paged + tl.load(path_T + token)
    pages = page_table + tl.load(rows_T + token).to(tl.int64) * stride_row
    path = suffix + token * stride_suffix - paged
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.arange(0, BLOCK_N)
    take_N = n < visible
    if visible > topk:
        s_N = tl.load(scores + place * stride_scores + n, mask=n < visible, other=0.0)
        score_N = tl.where(n < visible, ordered_32(s_N), -2147483648)
        low = tl.min(tl.where(n < visible, score_N, 2147483647), 0).to(tl.int64)
        high = tl.max(score_N, 0).to(tl.int64)
        while low < high:  # at least topk scores are `low` or better, and at most as many are better than `high`
            middle = low + (high - low + 1) // 2
            count = tl.sum((score_N >= middle.to(tl.int32)).to(tl.int32), 0)
            low = tl.where(count >= topk, middle, low)
            high = tl.where(count > topk, high, tl.where(count == topk, middle, middle - 1))
        last = low.to(tl.int32)
        better_N = score_N > last
        tie_N = ((n < visible) & (score_N == last)).to(tl.int32)
        tied = topk - tl.sum(better_N.to(tl.int32), 0)
        take_N = better_N | ((tie_N > 0) & (tl.cumsum(tie_N, 0) <= tied))
    paged_N = take_N & (n < paged)
    page_N = tl.load(pages + n // PAGE_SIZE, mask=paged_N, other=0)
    slot_N = page_N * PAGE_SIZE + n % PAGE_SIZE
    if HAS_SUFFIX:
        slot_N = tl.where(paged_N, slot_N, tl.load(path + n, mask=take_N & (n >= paged), other=0))
    to_N = tl.cumsum(take_N.to(tl.int32), 0) - 1
    tl.store(slots + token * stride_out + to_N, slot_N, mask=take_N)
