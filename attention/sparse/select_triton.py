"""The kernels that select each query's best scores, exactly: ties go to the lower position, and slots leave in position order.

Rows of few candidates take one launch: `select_kernel` keeps a query's scores in registers and searches the last selected score
by halves.  Rows of many take two.
- `filter_kernel` lists the scores that can be among the best.  Several programs share a query, each with a range (slice) of its
  scores.  Each finds the same border: a score that, by a sample of the query's scores, somewhat more than topk scores reach.
  The scores from the border on are listed, in the order of positions, at the beginning of the slice's part of the list.
- `select_kernel` then takes the list in the place of all scores.
The sample only decides how long the list is.  If fewer than topk scores were listed, or more than a program takes (many equal
scores at the border, say), `select_kernel` reads all of the query's scores as often as its search needs: slow, and as exact.

A query that sees at most topk keys selects all of them, and its scores are not read.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernels read what a pass's layers share about its
candidates, as the kernels of the scores do.  They trigger late.  Attention, which may be the next kernel, reads its rows'
lengths before its own wait: they are made once a pass, not by these kernels.

Shapes: T queries, N scores of a block, M scores of a sample, S slices, I selected keys.
"""

import triton
import triton.language as tl

from specdec.ops.topk_triton import ordered_32

LEAST_32 = tl.constexpr(-2147483648)  # lower than any ordered score
MOST_32 = tl.constexpr(2147483647)


@triton.jit
def extremes(score_N, ok_N):
    """(smallest, largest) of ordered scores, of which those that are not ok are LEAST_32."""
    return tl.min(tl.where(ok_N, score_N, MOST_32), 0).to(tl.int64), tl.max(score_N, 0).to(tl.int64)


@triton.jit
def halved(low, high, middle, count, wanted, enough):
    """The next (low, high) of a search: `count` scores are at least `middle`, and at least `wanted` are at least `low`."""
    next_low = tl.where(count >= wanted, middle, low)
    next_high = tl.where(count > enough, high, tl.where(count >= wanted, middle, middle - 1))
    return next_low, next_high


@triton.jit
def reached_by(score_N, ok_N, wanted, enough):
    """The largest number that at least `wanted` of the ordered scores reach, or a smaller one that at most `enough` reach."""
    low, high = extremes(score_N, ok_N)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.sum((score_N >= middle.to(tl.int32)).to(tl.int32), 0)
        low, high = halved(low, high, middle, count, wanted, enough)
    return low.to(tl.int32)


@triton.jit
def chosen(score_N, ok_N, last, ties):
    """Which scores are better than the last selected one, or among the first `ties` equal to it."""
    tie_N = (ok_N & (score_N == last)).to(tl.int32)
    return (ok_N & (score_N > last)) | ((tie_N > 0) & (tl.cumsum(tie_N, 0) <= ties))


@triton.jit
def put(to, key_N, take_N, pages, path, paged, PAGE_SIZE: tl.constexpr, HAS_SUFFIX: tl.constexpr):
    """Writes the slots of the positions that are taken one after the other, from `to` on."""
    paged_N = take_N & (key_N < paged)
    page_N = tl.load(pages + key_N // PAGE_SIZE, mask=paged_N, other=0)
    slot_N = page_N * PAGE_SIZE + key_N % PAGE_SIZE
    if HAS_SUFFIX:
        slot_N = tl.where(paged_N, slot_N, tl.load(path + key_N, mask=take_N & (key_N >= paged), other=0))
    tl.store(to + tl.cumsum(take_N.to(tl.int32), 0) - 1, slot_N, mask=take_N)


@triton.jit
def slice_size(visible, slices, BLOCK_N: tl.constexpr):
    """How many of a query's candidates a program of filter_kernel looks at."""
    return tl.cdiv(tl.cdiv(visible, slices), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["first_token", "topk"])
def filter_kernel(
    scores,  # [queries, stride_scores] float32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    listed,  # [queries, stride_scores] int64: ordered scores, each above its position
    counts,  # [queries, slices] int32: how many scores of each slice are listed
    first_token,
    topk,
    stride_scores,
    SAMPLE: tl.constexpr,
    LISTED: tl.constexpr,  # a query that sees at most so many keys lists all of them
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    paged = tl.load(paged_T + first_token + place)
    visible = paged + tl.load(path_T + first_token + place)
    per_slice = slice_size(visible, tl.num_programs(1), BLOCK_N)
    begin = tl.program_id(1) * per_slice
    end = tl.minimum(begin + per_slice, visible)
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
    s_N = tl.load(scores + begin + n, mask=begin + n < end, other=0.0)  # blocks are read one ahead
    border = tl.full([], LEAST_32, tl.int32)
    if visible > LISTED:
        # Of the query's scores, p of the sample are expected to be among the best topk, give or take the root of p.
        p = topk * (SAMPLE / visible.to(tl.float32))
        wanted = (p + 5.0 * tl.sqrt(p)).to(tl.int32) + 4
        m = tl.arange(0, SAMPLE)
        sample_M = ordered_32(tl.load(scores + m.to(tl.int64) * visible // SAMPLE))
        border = reached_by(sample_M, m >= 0, wanted, wanted + wanted // 8)
    listed += place * stride_scores + begin
    found = 0
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        score_N = ordered_32(s_N)
        take_N = (start + n < end) & (score_N >= border)
        s_N = tl.load(scores + start + BLOCK_N + n, mask=start + BLOCK_N + n < end, other=0.0)
        key_N = (score_N.to(tl.int64) << 32) | (start + n).to(tl.int64)
        tl.store(listed + found + tl.cumsum(take_N.to(tl.int32), 0) - 1, key_N, mask=take_N)
        found += tl.sum(take_N.to(tl.int32), 0)
    tl.store(at, found)


@triton.jit
def listed_keys(listed, count_S, total, per_slice, SLICES: tl.constexpr, LOG_SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """[N] (ordered score, position): the listed scores of a query, in the order of positions."""
    n = tl.arange(0, BLOCK_N)
    at_N = n
    if SLICES > 1:
        offset_S = tl.cumsum(count_S, 0) - count_S
        slice_N = tl.zeros([BLOCK_N], tl.int32)  # of each place in the list: the last slice that begins at or before it
        for bit in tl.static_range(LOG_SLICES):
            higher_N = slice_N + (SLICES >> (bit + 1))
            slice_N = tl.where(tl.gather(offset_S, higher_N, 0) <= n, higher_N, slice_N)
        at_N = n - tl.gather(offset_S, slice_N, 0) + slice_N * per_slice
    key_N = tl.load(listed + at_N, mask=n < total, other=0)
    return tl.where(n < total, (key_N >> 32).to(tl.int32), LEAST_32), (key_N & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def select_by_reading_again(
    scores, visible, topk, slots, pages, path, paged, PAGE_SIZE: tl.constexpr, HAS_SUFFIX: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Selects from any number of scores.  Every step of the search reads all of them."""
    n = tl.arange(0, BLOCK_N)
    low = tl.full([], MOST_32, tl.int64)
    high = tl.full([], LEAST_32, tl.int64)
    for start in tl.range(0, visible, BLOCK_N, num_stages=1):
        ok_N = start + n < visible
        score_N = tl.where(ok_N, ordered_32(tl.load(scores + start + n, mask=ok_N, other=0.0)), LEAST_32)
        least, most = extremes(score_N, ok_N)
        low, high = tl.minimum(low, least), tl.maximum(high, most)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = 0
        for start in tl.range(0, visible, BLOCK_N, num_stages=1):
            ok_N = start + n < visible
            score_N = ordered_32(tl.load(scores + start + n, mask=ok_N, other=0.0))
            count += tl.sum((ok_N & (score_N >= middle)).to(tl.int32), 0)
        low, high = halved(low, high, middle, count, topk, topk)
    last = low.to(tl.int32)
    ties = topk
    for start in tl.range(0, visible, BLOCK_N, num_stages=1):
        ok_N = start + n < visible
        score_N = ordered_32(tl.load(scores + start + n, mask=ok_N, other=0.0))
        ties -= tl.sum((ok_N & (score_N > last)).to(tl.int32), 0)
    for start in tl.range(0, visible, BLOCK_N, num_stages=1):
        ok_N = start + n < visible
        score_N = ordered_32(tl.load(scores + start + n, mask=ok_N, other=0.0))
        take_N = chosen(score_N, ok_N, last, ties)
        put(slots, start + n, take_N, pages, path, paged, PAGE_SIZE, HAS_SUFFIX)
        slots += tl.sum(take_N.to(tl.int32), 0)
        ties -= tl.sum((take_N & (score_N == last)).to(tl.int32), 0)


@triton.jit(
    do_not_specialize=["first_token", "topk", "slices", "stride_row", "stride_suffix", "stride_out"],
    do_not_specialize_on_alignment=["page_table", "rows_T", "paged_T", "path_T", "suffix"],
)
def select_kernel(
    scores,  # [queries, stride_scores] float32
    listed,  # [queries, stride_scores] int64
    counts,  # [queries, slices] int32
    rows_T,  # [T] int32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    page_table,  # [R, W] int32
    suffix,  # [T, P] int32 slots
    slots,  # [T, I] int32
    first_token,
    topk,
    slices,
    stride_scores,
    stride_row,
    stride_suffix,
    stride_out,
    PAGE_SIZE: tl.constexpr,
    HAS_SUFFIX: tl.constexpr,
    LOG_SLICES: tl.constexpr,  # -1: there is no list, and no row has more than BLOCK_N candidates
    FILTER_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,  # not less than topk
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
    key_N = n
    take_N = n < visible
    scores += place * stride_scores
    slots += token * stride_out
    if visible > topk:
        if LOG_SLICES < 0:
            ok_N = n < visible
            score_N = tl.where(ok_N, ordered_32(tl.load(scores + n, mask=ok_N, other=0.0)), LEAST_32)
        else:
            s = tl.arange(0, 1 << LOG_SLICES)
            count_S = tl.load(counts + place * slices + s, mask=s < slices, other=0)
            total = tl.sum(count_S, 0)
            ok_N = n < total
            per_slice = slice_size(visible, slices, FILTER_BLOCK)
            score_N, key_N = listed_keys(
                listed + place * stride_scores, count_S, tl.minimum(total, BLOCK_N), per_slice, 1 << LOG_SLICES, LOG_SLICES,
                BLOCK_N,
            )  # fmt: skip
            if (total < topk) | (total > BLOCK_N):
                select_by_reading_again(scores, visible, topk, slots, pages, path, paged, PAGE_SIZE, HAS_SUFFIX, BLOCK_N)
                ok_N = n < 0
        last = reached_by(score_N, ok_N, topk, topk)
        take_N = chosen(score_N, ok_N, last, topk - tl.sum((ok_N & (score_N > last)).to(tl.int32), 0))
    put(slots, key_N, take_N, pages, path, paged, PAGE_SIZE, HAS_SUFFIX)
