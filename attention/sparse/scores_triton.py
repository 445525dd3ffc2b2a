"""The kernels that score an indexer's cached keys: products on tensor cores, then the weighted sum over heads, in float32.

`single_query_scores_kernel` is for rows of one query: a program reads a range of the row's keys once.
`multi_query_scores_kernel` is for rows of several queries (chains, trees, prompts): a program keeps a block of keys, and scores
it for one query after the other.  Both multiply a block of keys with all heads of one query in the same order.  So a query's
score of a key does not depend on the kernel, nor on whether the key lies in a page or on the query's path in a draft tree.

In a draft tree, the first programs of either kernel, one for each query, score the query's path.  Of every query's scores, the
first one and each EVERY-th after it are also written to a sample, for the selection.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernels read page tables, lengths and what a pass's
layers share about its candidates, as attention's kernels read tables and lengths.  They trigger late.

Shapes: T queries, H heads, D indexer dim, N keys of a block, X slots.
"""

import triton
import triton.language as tl

from specdec.attention.kernels.tables_triton import slots_on

LARGEST = tl.constexpr(1e38)  # the bound of scores: twice of it is a finite float32


@triton.jit
def query_of(q, w, stride_qt, stride_wt, token, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr,
             BLOCK_D: tl.constexpr, scale):  # fmt: skip
    """One query's heads [H, D], and their weights times `scale`."""
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    ok_HD = (h < HEADS)[:, None] & (d < DIM)[None, :]
    q_HD = tl.load(q + token * stride_qt + h[:, None] * DIM + d[None, :], mask=ok_HD, other=0.0)
    w_H = tl.load(w + token * stride_wt + h, mask=h < HEADS, other=0.0).to(tl.float32)
    return q_HD, w_H * scale


@triton.jit
def block_scores(q_HD, w_H, k_ND):
    """[N]: the weighted sum of the heads' products, of which negative ones count as 0."""
    s_NH = tl.dot(k_ND, tl.trans(q_HD), input_precision="ieee")
    s_N = tl.sum(tl.maximum(s_NH, 0.0) * w_H[None, :], 1)
    return tl.minimum(tl.maximum(tl.where(s_N == s_N, s_N, -LARGEST), -LARGEST), LARGEST)  # NaN counts as the lowest


@triton.jit
def keys_at(keys, slot_N, ok_N, stride_slot, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[N, D]: the keys of these slots.  Slots that are not ok are not read: they may hold NaN."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(
        keys + slot_N.to(tl.int64)[:, None] * stride_slot + d[None, :], mask=ok_N[:, None] & (d < DIM)[None, :], other=0.0
    )


@triton.jit
def keep(scores, sample, key_N, s_N, ok_N, EVERY: tl.constexpr):
    """Writes a query's scores of these positions, and those that belong to its sample there too."""
    tl.store(scores + key_N, s_N, mask=ok_N)
    tl.store(sample + key_N // EVERY, s_N, mask=ok_N & (key_N % EVERY == 0))


@triton.jit
def score_path(
    q, w, keys, suffix, paged_T, path_T, scores, sample, scale, token, place, stride_qt, stride_wt, stride_slot, stride_suffix,
    stride_scores, stride_sample, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, EVERY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores one query's own path."""
    paged = tl.load(paged_T + token, cache_modifier=".cg")
    length = tl.load(path_T + token, cache_modifier=".cg")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scores += place * stride_scores
    sample += place * stride_sample
    n = tl.arange(0, BLOCK_N)
    q_HD, w_H = query_of(q, w, stride_qt, stride_wt, token, HEADS, BLOCK_H, DIM, BLOCK_D, scale)
    for start in tl.range(0, length, BLOCK_N, num_stages=1):
        ok_N = start + n < length
        slot_N = tl.load(suffix + token * stride_suffix + start + n, mask=ok_N, other=0)
        s_N = block_scores(q_HD, w_H, keys_at(keys, slot_N, ok_N, stride_slot, DIM, BLOCK_D))
        keep(scores, sample, paged + start + n, s_N, ok_N, EVERY)


@triton.jit(
    do_not_specialize=["first_token", "queries", "splits", "stride_row", "stride_suffix", "topk"],
    do_not_specialize_on_alignment=["page_table", "rows_T", "paged_T", "path_T", "suffix"],
)
def single_query_scores_kernel(
    q,  # [T, H, D]
    w,  # [T, H], any float type
    keys,  # [X, D]
    page_table,  # [R, W] int32
    suffix,  # [T, P] int32 slots
    rows_T,  # [T] int32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    scores,  # [queries, stride_scores] float32
    sample,  # [queries, stride_sample] float32
    scale,
    first_token,  # of this launch, which scores `queries` tokens
    queries,
    splits,
    topk,
    stride_qt,
    stride_wt,
    stride_slot,
    stride_row,
    stride_suffix,
    stride_scores,
    stride_sample,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVERY: tl.constexpr,
    HAS_SUFFIX: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if HAS_SUFFIX:
        if program < queries:
            place = program.to(tl.int64)
            score_path(
                q, w, keys, suffix, paged_T, path_T, scores, sample, scale, first_token + place, place, stride_qt, stride_wt,
                stride_slot, stride_suffix, stride_scores, stride_sample, HEADS, BLOCK_H, DIM, BLOCK_D, BLOCK_N, EVERY, PDL,
            )  # fmt: skip
            return
        program -= queries
    place = (program // splits).to(tl.int64)
    split = program % splits
    token = first_token + place
    paged = tl.load(paged_T + token, cache_modifier=".cg")
    visible = paged + tl.load(path_T + token, cache_modifier=".cg")
    pages = page_table + tl.load(rows_T + token, cache_modifier=".cg").to(tl.int64) * stride_row
    per_split = tl.cdiv(tl.cdiv(paged, splits), BLOCK_N) * BLOCK_N
    low = split * per_split
    high = tl.minimum(low + per_split, paged)
    n = tl.arange(0, BLOCK_N)
    page_N = tl.load(pages + (low + n) // PAGE_SIZE, mask=low + n < high, other=0, cache_modifier=".cg")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (low >= high) | (visible <= topk):  # a query that sees so few keys selects all of them
        return
    q_HD, w_H = query_of(q, w, stride_qt, stride_wt, token, HEADS, BLOCK_H, DIM, BLOCK_D, scale)
    scores += place * stride_scores
    sample += place * stride_sample
    # A block's page numbers are read one block ahead, so that the loads of its keys can start at once.
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        ok_N = start + n < high
        slot_N = slots_on(page_N, start + n, PAGE_SIZE)
        k_ND = keys_at(keys, slot_N, ok_N, stride_slot, DIM, BLOCK_D)
        ahead_N = start + BLOCK_N + n
        page_N = tl.load(pages + ahead_N // PAGE_SIZE, mask=ahead_N < high, other=0)
        s_N = block_scores(q_HD, w_H, k_ND)
        keep(scores, sample, start + n, s_N, ok_N, EVERY)


@triton.jit(
    do_not_specialize=[
        "first_token",
        "queries",
        "groups",
        "group_size",
        "blocks",
        "path_width",
        "stride_row",
        "stride_suffix",
        "topk",
    ],
    do_not_specialize_on_alignment=["page_table", "cu_seqlens_q", "cache_seqlens", "paged_T", "path_T", "suffix"],
)
def multi_query_scores_kernel(
    q,  # [T, H, D]
    w,  # [T, H], any float type
    keys,  # [X, D]
    page_table,  # [R, W] int32
    suffix,  # [T, P] int32 slots
    cu_seqlens_q,  # [R + 1] int32
    cache_seqlens,  # [R] int32
    paged_T,  # [T] int32
    path_T,  # [T] int32
    scores,  # [queries, stride_scores] float32
    sample,  # [queries, stride_sample] float32
    scale,
    first_token,  # of this launch, which scores `queries` tokens
    queries,
    groups,  # of a row's queries
    group_size,
    blocks,  # of a row's keys
    path_width,  # the most keys of a path
    topk,
    stride_qt,
    stride_wt,
    stride_slot,
    stride_row,
    stride_suffix,
    stride_scores,
    stride_sample,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVERY: tl.constexpr,
    HAS_SUFFIX: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    if HAS_SUFFIX:
        if program < queries:
            place = program.to(tl.int64)
            score_path(
                q, w, keys, suffix, paged_T, path_T, scores, sample, scale, first_token + place, place, stride_qt, stride_wt,
                stride_slot, stride_suffix, stride_scores, stride_sample, HEADS, BLOCK_H, DIM, BLOCK_D, BLOCK_N, EVERY, PDL,
            )  # fmt: skip
            return
        program -= queries
    group = program % groups  # neighbouring programs read the same keys
    block = program // groups % blocks
    row = program // groups // blocks
    row_end = tl.load(cu_seqlens_q + row + 1, cache_modifier=".cg")
    begin = tl.maximum(tl.load(cu_seqlens_q + row, cache_modifier=".cg"), first_token) + group * group_size
    end = tl.minimum(tl.minimum(row_end, first_token + queries), begin + group_size)
    length = tl.load(cache_seqlens + row, cache_modifier=".cg")
    start = block * BLOCK_N
    if CAUSAL:  # from the first query that sees the block
        begin = tl.maximum(begin, start + row_end - length)
    last = tl.load(paged_T + tl.maximum(end - 1, 0), cache_modifier=".cg")
    max_paged = tl.where(begin < end, last, 0)  # the last query sees the most keys
    key_N = start + tl.arange(0, BLOCK_N)
    ok_N = key_N < max_paged
    page_N = tl.load(page_table + row.to(tl.int64) * stride_row + key_N // PAGE_SIZE, mask=ok_N, other=0, cache_modifier=".cg")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (start >= max_paged) | (max_paged + path_width <= topk):  # queries that see so few keys select all of them
        return
    k_ND = keys_at(keys, slots_on(page_N, key_N, PAGE_SIZE), ok_N, stride_slot, DIM, BLOCK_D)
    for t in tl.range(begin, end, num_stages=STAGES):
        token = begin.to(tl.int64) + (t - begin)
        q_HD, w_H = query_of(q, w, stride_qt, stride_wt, token, HEADS, BLOCK_H, DIM, BLOCK_D, scale)
        s_N = block_scores(q_HD, w_H, k_ND)
        ok_N = key_N < length
        if CAUSAL:
            ok_N = key_N < length - (row_end - 1 - t)
        place = token - first_token
        keep(scores + place * stride_scores, sample + place * stride_sample, key_N, s_N, ok_N, EVERY)
