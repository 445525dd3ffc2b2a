"""The kernels that select each query's best scores, exactly: ties go to the lower position, and slots leave in position order.

There are two launches.  Several programs share a query, each with a range (slice) of its scores.
- `filter_kernel` finds two cutoffs by a sample of the query's scores, which the kernels of the scores left; they are the same
  in each of a query's programs.  Somewhat more than topk scores reach the lower cutoff, and somewhat fewer the upper one.  It
  counts each slice's scores from the upper cutoff on, which are all selected, and lists those between the cutoffs at the
  beginning of the slice's part of the list.
- `select_kernel` searches the last selected score among all the query's listed ones, and writes the slots of a slice's selected
  positions after those of earlier slices.
The sample only decides how long the list is.  Two cases are slow, and as exact: the last selected score does not lie between
the cutoffs, or more scores do than a program takes (many equal ones, say).  Then one program reads all of the query's scores as
often as its search needs.

A query that sees at most topk keys selects all of them, and its scores are not read.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernels read what a pass's layers share about its
candidates, as the kernels of the scores do.  They trigger late.  Attention, which may be the next kernel, reads its rows'
lengths before its own wait: they are made once a pass, not by these kernels.

Shapes: T queries, N scores of a block, M scores of a sample, L listed scores, S slices, I selected keys.
"""

import triton
import triton.language as tl

from specdec.ops.topk_triton import ordered_32

MIN_32 = tl.constexpr(-2147483648)  # lower than any ordered score
MAX_32 = tl.constexpr(2147483647)
STEPS = tl.constexpr(24)  # of the search for cutoffs: enough for scores of which the largest is a million times too large


@triton.jit
def slice_of(visible, BLOCK_N: tl.constexpr):
    """(begin, end, size) of this program's part of a query's candidates."""
    size = tl.cdiv(tl.cdiv(visible, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    begin = tl.program_id(1) * size
    return begin, tl.minimum(begin + size, visible), size


@triton.jit
def cutoffs(s_M, ok_M, expected):
    """(lower, upper): at least `expected` of the ok scores and 4.5 times its root more reach the lower cutoff, and at most as
    many fewer the upper one.  Infinite where no cutoff was found.

    The two are searched together, by halving ranges of scores, until they are about as near as that.  Scores that are not ok
    are -inf.
    """
    margin = 4.5 * tl.sqrt(expected)
    above = (expected + margin).to(tl.int32) + 4
    below = tl.maximum(expected - margin, -1.0).to(tl.int32)  # 0: above all of the sample; -1: there is no upper cutoff
    lower, upper = -float("inf"), float("inf")
    low_a = tl.min(tl.where(ok_M, s_M, float("inf")), 0)
    high_a = tl.max(s_M, 0)
    low_b, high_b = low_a, high_a
    steps = 0
    while steps < STEPS:
        a = 0.5 * low_a + 0.5 * high_a
        b = 0.5 * low_b + 0.5 * high_b
        counts = tl.sum((s_M >= a).to(tl.int32) + ((s_M >= b).to(tl.int32) << 16), 0)
        count_a, count_b = counts & 0xFFFF, counts >> 16
        lower = tl.where(count_a >= above, a, lower)
        low_a, high_a = tl.where(count_a >= above, a, low_a), tl.where(count_a >= above, high_a, a)
        upper = tl.where(count_b <= below, b, upper)
        low_b, high_b = tl.where(count_b <= below, low_b, b), tl.where(count_b <= below, b, high_b)
        near_a = (count_a >= above) & (count_a <= above + above // 16)
        near_b = (below < 0) | ((count_b <= below) & (count_b >= below - below // 16))
        low_a, high_a = tl.where(near_a, a, low_a), tl.where(near_a, a, high_a)
        low_b, high_b = tl.where(near_b, b, low_b), tl.where(near_b, b, high_b)
        steps = tl.where(near_a & near_b, STEPS, steps + 1)
    return lower, upper


@triton.jit(do_not_specialize=["first_token", "topk"])
def filter_kernel(
    scores,  # [queries, stride_scores] float32
    sample,  # [queries, stride_sample] float32: of a query's scores the first one and every EVERY-th after it
    listed,  # [queries, stride_scores] int32: ordered scores
    counts,  # [queries, slices, 2] int32: how many scores of each slice are listed, and how many are above the upper cutoff
    paged_T,  # [T] int32
    path_T,  # [T] int32
    first_token,
    topk,
    stride_scores,
    stride_sample,
    EVERY: tl.constexpr,
    SAMPLE: tl.constexpr,  # the most scores of a sample
    LISTED: tl.constexpr,  # a query that sees at most so many keys lists all of them
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    paged = tl.load(paged_T + first_token + place, cache_modifier=".cg")
    visible = paged + tl.load(path_T + first_token + place, cache_modifier=".cg")
    begin, end, _ = slice_of(visible, BLOCK_N)
    at = counts + (place * tl.num_programs(1) + tl.program_id(1)) * 2
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if visible <= topk:
        return
    if begin >= end:
        tl.store(at, 0)
        tl.store(at + 1, 0)
        return
    n = tl.arange(0, BLOCK_N)
    scores += place * stride_scores
    s_N = tl.load(scores + begin + n, mask=begin + n < end, other=0.0)  # blocks are read one ahead
    lower, upper = -float("inf"), float("inf")
    if visible > LISTED:
        m = tl.arange(0, SAMPLE)
        ok_M = m * EVERY < visible
        s_M = tl.load(sample + place * stride_sample + m, mask=ok_M, other=-float("inf"))
        lower, upper = cutoffs(s_M, ok_M, topk.to(tl.float32) / EVERY)
    listed += place * stride_scores + begin
    found = 0
    above_N = tl.zeros([BLOCK_N], tl.int32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        ok_N = start + n < end
        above_N += (ok_N & (s_N >= upper)).to(tl.int32)
        take_N = (ok_N & (s_N >= lower) & (s_N < upper)).to(tl.int32)
        score_N = ordered_32(s_N)
        s_N = tl.load(scores + start + BLOCK_N + n, mask=start + BLOCK_N + n < end, other=0.0)
        tl.store(listed + found + tl.cumsum(take_N, 0) - 1, score_N, mask=take_N > 0)
        found += tl.sum(take_N, 0)
    tl.store(at, found)
    tl.store(at + 1, tl.sum(above_N, 0))


@triton.jit
def extremes(score_L, ok_L):
    """(smallest, largest) of ordered scores, of which those that are not ok are MIN_32."""
    return tl.min(tl.where(ok_L, score_L, MAX_32), 0).to(tl.int64), tl.max(score_L, 0).to(tl.int64)


@triton.jit
def halved(low, high, middle, count, wanted):
    """The next (low, high) of a search for a threshold that `wanted` scores reach; `count` scores reach `middle`."""
    next_low = tl.where(count >= wanted, middle, low)
    return next_low, tl.where(count > wanted, high, tl.where(count == wanted, middle, middle - 1))


@triton.jit
def last_of(score_L, ok_L, wanted):
    """The `wanted`-th largest of ordered scores, or a value between it and the next smaller one."""
    low, high = extremes(score_L, ok_L)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = tl.sum((score_L >= middle.to(tl.int32)).to(tl.int32), 0)
        low, high = halved(low, high, middle, count, wanted)
    return low.to(tl.int32)


@triton.jit
def put_best(
    scores, s_N, begin, end, last, ties, slots, pages, path, paged, PAGE_SIZE: tl.constexpr, HAS_SUFFIX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes the slots of a slice's scores that are better than `last`, and of the first `ties` equal to it.

    s_N: the slice's first block.  Blocks are read one ahead.
    last: MIN_32 if all are selected; their scores are then not read.
    """
    n = tl.arange(0, BLOCK_N)
    scored = tl.where(last == MIN_32, begin, end)  # scores that this program reads end here
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        key_N = start + n
        score_N = ordered_32(s_N)
        take_N = (key_N < end) & (score_N > last)
        if ties > 0:  # most slices hold no tie that is selected
            tie_N = ((key_N < end) & (score_N == last)).to(tl.int32)
            take_N = take_N | ((tie_N > 0) & (tl.cumsum(tie_N, 0) <= ties))
            ties -= tl.minimum(tl.sum(tie_N, 0), ties)
        s_N = tl.load(scores + start + BLOCK_N + n, mask=start + BLOCK_N + n < scored, other=0.0)
        paged_N = take_N & (key_N < paged)
        page_N = tl.load(pages + key_N // PAGE_SIZE, mask=paged_N, other=0)
        slot_N = page_N * PAGE_SIZE + key_N % PAGE_SIZE
        if HAS_SUFFIX:
            slot_N = tl.where(paged_N, slot_N, tl.load(path + key_N, mask=take_N & (key_N >= paged), other=0))
        tl.store(slots + tl.cumsum(take_N.to(tl.int32), 0) - 1, slot_N, mask=take_N)
        slots += tl.sum(take_N.to(tl.int32), 0)


@triton.jit
def last_of_all(scores, visible, topk, BLOCK_N: tl.constexpr):
    """(the topk-th largest of any number of scores, how many of those equal to it are selected).  Every step of the search
    reads all of them.
    """
    n = tl.arange(0, BLOCK_N)
    low = tl.full([], MAX_32, tl.int64)
    high = tl.full([], MIN_32, tl.int64)
    for start in tl.range(0, visible, BLOCK_N, num_stages=1):
        ok_N = start + n < visible
        score_N = tl.where(ok_N, ordered_32(tl.load(scores + start + n, mask=ok_N, other=0.0)), MIN_32)
        smallest, largest = extremes(score_N, ok_N)
        low, high = tl.minimum(low, smallest), tl.maximum(high, largest)
    while low < high:
        middle = low + (high - low + 1) // 2
        count = 0
        for start in tl.range(0, visible, BLOCK_N, num_stages=1):
            ok_N = start + n < visible
            score_N = ordered_32(tl.load(scores + start + n, mask=ok_N, other=0.0))
            count += tl.sum((ok_N & (score_N >= middle)).to(tl.int32), 0)
        low, high = halved(low, high, middle, count, topk)
    ties = topk
    for start in tl.range(0, visible, BLOCK_N, num_stages=1):
        ok_N = start + n < visible
        score_N = ordered_32(tl.load(scores + start + n, mask=ok_N, other=0.0))
        ties -= tl.sum((ok_N & (score_N > low)).to(tl.int32), 0)
    return low.to(tl.int32), ties


@triton.jit
def listed_scores(listed, count_S, size, SLICES: tl.constexpr, LOG_SLICES: tl.constexpr, LISTED: tl.constexpr):
    """[L]: the listed scores of a query, slice after slice, and MIN_32 after them."""
    place_L = tl.arange(0, LISTED)
    at_L = place_L
    if SLICES > 1:
        offset_S = tl.cumsum(count_S, 0) - count_S
        slice_L = tl.zeros([LISTED], tl.int32)  # of each place in the list: the last slice that begins at or before it
        for bit in tl.static_range(LOG_SLICES):
            higher_L = slice_L + (SLICES >> (bit + 1))
            slice_L = tl.where(tl.gather(offset_S, higher_L, 0) <= place_L, higher_L, slice_L)
        at_L = place_L - tl.gather(offset_S, slice_L, 0) + slice_L * size
    return tl.load(listed + at_L, mask=place_L < tl.sum(count_S, 0), other=MIN_32)


@triton.jit(
    do_not_specialize=["first_token", "topk", "stride_row", "stride_suffix", "stride_out"],
    do_not_specialize_on_alignment=["page_table", "rows_T", "paged_T", "path_T", "suffix"],
)
def select_kernel(
    scores,  # [queries, stride_scores] float32
    listed,  # [queries, stride_scores] int32: ordered scores
    counts,  # [queries, slices, 2] int32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    rows_T,  # [T] int32
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
    LOG_SLICES: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    slices = tl.num_programs(1)
    token = first_token + place
    paged = tl.load(paged_T + token, cache_modifier=".cg")
    visible = paged + tl.load(path_T + token, cache_modifier=".cg")
    pages = page_table + tl.load(rows_T + token, cache_modifier=".cg").to(tl.int64) * stride_row
    path = suffix + token * stride_suffix - paged
    begin, end, size = slice_of(visible, BLOCK_N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if begin >= end:
        return
    scores += place * stride_scores
    slots += token * stride_out
    n = tl.arange(0, BLOCK_N)
    s_N = tl.load(scores + begin + n, mask=begin + n < tl.where(visible > topk, end, begin), other=0.0)
    last = tl.full([], MIN_32, tl.int32)
    ties = 0  # how many of the scores equal to the last one are still to be selected in this slice
    at = begin
    if visible > topk:
        s = tl.arange(0, 1 << LOG_SLICES)
        at_S = counts + (place * slices + s) * 2
        count_S = tl.load(at_S, mask=s < slices, other=0)
        above_S = tl.load(at_S + 1, mask=s < slices, other=0)
        total = tl.sum(count_S, 0)
        wanted = topk - tl.sum(above_S, 0)
        if (wanted > 0) & (wanted <= total) & (total <= LISTED):
            score_L = listed_scores(listed + place * stride_scores, count_S, size, 1 << LOG_SLICES, LOG_SLICES, LISTED)
            l = tl.arange(0, LISTED)
            last = last_of(score_L, l < total, wanted)
            before = tl.sum(tl.where(s < tl.program_id(1), count_S, 0), 0)
            better_L = (score_L > last).to(tl.int32)
            ties_before = tl.sum(((score_L == last) & (l < before)).to(tl.int32), 0)
            ties = wanted - tl.sum(better_L, 0)
            at = tl.sum(tl.where(s < tl.program_id(1), above_S, 0), 0) + tl.sum(tl.where(l < before, better_L, 0), 0)
            at += tl.minimum(ties_before, ties)
            ties = tl.maximum(ties - ties_before, 0)
        else:
            if begin > 0:
                return
            last, ties = last_of_all(scores, visible, topk, BLOCK_N)
            end = visible
    put_best(scores, s_N, begin, end, last, ties, slots + at, pages, path, paged, PAGE_SIZE, HAS_SUFFIX, BLOCK_N)
