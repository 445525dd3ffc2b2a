"""The kernel that reads a paged cache: every query of a row against one slice (split) of the row's keys.

The kernel knows pages, not what the keys are: prefixes, prompts and chains look alike to it.  The queries of a row and the
query heads of a kv head share one tile (packed GQA), so keys and values are read once for all of them.  Where each query has a
first key of its own, a tile's splits divide the keys from the smallest of these first keys to the tile's end; pages before that
are never touched. Each split leaves a state of its own; the launcher decides how many splits there are and merges their states.
With WINDOW_RIGHT, causal queries also read some keys after their own, as in an encoder's window.  ALiBi adds a slope times the
distance of the key, or its root.

8-bit keys and values are converted in registers to the queries' type, or to float16 if that type is bfloat16: float16
represents all 8-bit values exactly, and the conversion takes a fifth of the instructions.  Queries and softmax weights are
then scaled by a power of two into a range where float16 is at least as precise as bfloat16 was.  The scale of a head (fp8) is
multiplied into the products; the scale of a token (int8) is multiplied into its keys and values.

With int8 keys and values as they are ("int8_keys"), the scale of a token is multiplied into its products; its values lie in the
bytes after its key.  With INT8_QUERIES, queries are rounded to int8 and multiplied with int8 keys as they are; the products are
multiplied with the scales of both.

Order of chained launches (specdec/ops/launch.py): before gdc_wait the kernel reads the page table, lengths and first keys.  In
a model these are written before the norm ahead of the layer's projections, so they are complete when this kernel starts; any
other caller has to make sure of the same.

Values may have another width than keys; a token's keys and values lie in one row.  A key may consist of KEY_PARTS
equal parts.  The query heads of a group then form as many equal runs, and each run is multiplied with its own part of the key:
in the other parts its elements are taken as 0.  Differential attention hands over a pair of heads as one head of two parts.
In 8 bits both heads of a pair keep their own scales: one for each half of the key, and one for each half of the value.

Shapes: M rows of a tile (queries x heads of a group), N keys of a block, D key dim, E value dim, R rows, T queries, H heads, K
kv heads, S splits.
"""

import triton
import triton.language as tl

from specdec.attention.caches.int8_triton import queries_in_int8
from specdec.attention.kernels.tables_triton import slots_on

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def upcast(x, to: tl.constexpr, ASM: tl.constexpr):
    """8-bit values converted to the type `to`.

    ASM: int8 becomes float16 by bit operations, because the GPU's integer conversions are slow.
    """
    if ASM and x.dtype == tl.int8 and to == tl.float16:  # the float16 1024 + n holds n in its last bits
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 n, a, b;
            xor.b32 n, $2, 0x80808080;
            mov.b32 b, 0x64806480;
            prmt.b32 a, n, 0x64646464, 0x4140;
            sub.f16x2 $0, a, b;
            prmt.b32 a, n, 0x64646464, 0x4342;
            sub.f16x2 $1, a, b;
            }""",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return x.to(to)


@triton.jit
def own_part(head_G, d, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_PARTS: tl.constexpr):
    """Where the elements of a query are that meet the elements d of a key, and which of the latter are its own part of the key.

    head_G: the query's place among the heads of its group.
    """
    if KEY_PARTS == 1:
        at_GD, ok_GD = d[None, :], (d < HEAD_DIM)[None, :]
    else:
        part_G1 = (head_G // (GROUP // KEY_PARTS))[:, None]
        at_GD, ok_GD = d[None, :] - part_G1 * (HEAD_DIM // KEY_PARTS), d[None, :] // (HEAD_DIM // KEY_PARTS) == part_G1
    return at_GD, ok_GD


@triton.jit
def queries_in_float16(q_MD, scaled_q_MD, ok_MD, Q_IN_MEMORY: tl.constexpr):
    """Queries divided by a power of two so that they fit float16, and that power, by which their products are to be multiplied.

    Q_IN_MEMORY: the scaled queries are written to scaled_q_MD in global memory and loaded again.  Triton then feeds products
        with queries from shared memory; otherwise it would hold them in registers, of which large tiles have none to spare.
        The splits of a row write the same values.
    """
    size_MD = tl.abs(q_MD.to(tl.float32))
    amax = tl.max(tl.where(size_MD < float("inf"), size_MD, 1e-30))  # a padded row may hold inf or NaN
    q_scale = tl.exp2(tl.floor(tl.log2(tl.maximum(amax, 1e-30))) - 14)
    q_MD = (q_MD.to(tl.float32) / q_scale).to(tl.float16)
    if Q_IN_MEMORY:
        tl.store(scaled_q_MD, q_MD, mask=ok_MD)
        tl.debug_barrier()
        q_MD = tl.load(scaled_q_MD, mask=ok_MD, other=0.0)
    return q_MD, q_scale


@triton.jit
def queries_for_8_bits(q_MD, scaled_q_MD, ok_MD, Q_IN_MEMORY: tl.constexpr, INT8_QUERIES: tl.constexpr):
    """Queries as they multiply 8-bit keys, and the factor of their products.  The other arguments: see queries_in_float16."""
    if INT8_QUERIES:
        q_MD, q_scale = queries_in_int8(q_MD)
    elif q_MD.dtype == tl.bfloat16:
        q_MD, q_scale = queries_in_float16(q_MD, scaled_q_MD, ok_MD, Q_IN_MEMORY)
    else:
        q_scale = 1.0
    return q_MD, q_scale


@triton.jit
def scales_loaded_once(scales_N, ok_N):
    """Scales for the columns of products.

    The maximum over an axis of size 1 makes the compiler load each scale once: a load in the products' layout would fetch the
    scales of all columns in every thread, and page numbers too.
    """
    return tl.max(tl.load(scales_N[:, None], mask=ok_N[:, None], other=0.0), 1)


@triton.jit
def scales_in_range(scales_N, to: tl.constexpr):
    """A token's scales in the type `to`, limited so that 127 times a scale is finite in float16."""
    return (tl.minimum(scales_N, 515.0) if to == tl.float16 else scales_N).to(to)


@triton.jit
def fp8_scales(at, i, PER_PART: tl.constexpr, PARTS: tl.constexpr, AXIS: tl.constexpr):
    """The scale of an fp8 head, or with parts those of the parts to which rows or columns i belong, with one more axis."""
    if PARTS == 1:
        scale = tl.load(at)
    else:
        scale = tl.expand_dims(tl.load(at + tl.minimum(i // PER_PART, PARTS - 1)), AXIS)
    return scale


@triton.jit
def scales_by_column(scales_N, ok_N, d, WIDTH: tl.constexpr, PARTS: tl.constexpr, to: tl.constexpr):
    """Tokens' scales in the type `to`: [N, 1], or [N, D] where each half of a key or value has its own."""
    scale_ND = scales_in_range(tl.load(scales_N, mask=ok_N, other=0.0), to)[:, None]
    if PARTS == 2:
        second_N = scales_in_range(tl.load(scales_N + 1, mask=ok_N, other=0.0), to)
        scale_ND = tl.where((d < WIDTH // 2)[None, :], scale_ND, second_N[:, None])
    return scale_ND


@triton.jit
def scales_by_row(scales_N, ok_N, head_M, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Tokens' scales for products: [1, N], or [M, N] where each row is multiplied with one half of a key."""
    scale_MN = scales_loaded_once(scales_N, ok_N)[None, :]
    if PARTS == 2:
        second_N = scales_loaded_once(scales_N + 1, ok_N)
        scale_MN = tl.where((head_M < GROUP // 2)[:, None], scale_MN, second_N[None, :])
    return scale_MN


@triton.jit
def masked(s_MN, key_N, ok_N, start_M, end_M, HAS_STARTS: tl.constexpr, HAS_ENDS: tl.constexpr):
    """The logits, and -inf for keys that are not there, before a query's first key, or from its end on."""
    visible_MN = ok_N[None, :]
    if HAS_ENDS:
        visible_MN = visible_MN & (key_N[None, :] < end_M[:, None])
    if HAS_STARTS:
        visible_MN = visible_MN & (key_N[None, :] >= start_M[:, None])
    return tl.where(visible_MN, s_MN, -float("inf"))


@triton.jit
def store_lse(lse, at_M, top_M, total_M, ok_M, MAX_OFFSET: tl.constexpr):
    """Stores the logarithms of sums of weights scaled by 2 ** (MAX_OFFSET - top); returns the sums, with 1 in place of 0."""
    some_M = total_M > 0
    safe_M = tl.where(some_M, total_M, 1.0)
    tl.store(lse + at_M, tl.where(some_M, (top_M + (tl.log2(safe_M) - MAX_OFFSET)) * LN2, -float("inf")), mask=ok_M)
    return safe_M


@triton.jit
def values_at(kv, at_ND, slot_N, stride_slot, e, pointer: tl.constexpr, SAME_WIDTH: tl.constexpr, QUANT: tl.constexpr):
    """Where the values of slots begin, stride_v values early.  pointer: the type of a pointer to queries."""
    if QUANT == "int8_keys":
        at_NE = (kv + slot_N * stride_slot).to(pointer)[:, None] + e[None, :]
    elif SAME_WIDTH:
        at_NE = at_ND
    else:
        at_NE = kv + (slot_N * stride_slot)[:, None] + e[None, :]
    return at_NE


@triton.jit
def spaced(distance, ALIBI: tl.constexpr):
    """What slopes are multiplied with.  distance: a key's position minus the query's; later keys are masked."""
    if ALIBI == "root":
        factor = -tl.sqrt(tl.maximum(-distance, 0).to(tl.float32))
    else:
        factor = distance.to(tl.float32)
    return factor


@triton.jit
def biases(slope_M, first_M, n, ALIBI: tl.constexpr):
    """ALiBi's for keys at distances first_M + n of queries."""
    if ALIBI == "root":
        bias_MN = slope_M[:, None] * spaced(first_M[:, None] + n[None, :], ALIBI)
    else:
        bias_MN = (slope_M * first_M.to(tl.float32))[:, None] + slope_M[:, None] * n.to(tl.float32)[None, :]
    return bias_MN


@triton.jit
def capped(logits, softcap):
    """softcap * tanh(logits / softcap)."""
    return softcap - 2 * softcap / (1 + tl.exp2(logits * (2 * LOG2E / softcap)))


@triton.jit(
    # Batch, lengths and table width change from call to call.  Triton would compile again for a 1 or a multiple of 16.
    do_not_specialize=["stride_row", "states", "tiles"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "starts", "q_positions", "slopes", "lse"],
)
def paged_attention_kernel(
    q,  # [T, H, D]
    kv,  # [slots, ...]: the keys [slots, K, D]; the values [slots, K, E] begin stride_v values later
    scales,  # float32: [2, K * KEY_PARTS], [slots, 2, K * KEY_PARTS] or [slots, K]
    page_table,  # [R, W] int32
    cache_seqlens,  # [R] int32
    cu_seqlens_q,  # [R + 1] int32
    starts,  # [T] int32
    q_positions,  # [T] int32: each query's position, counted from its row's key 0
    slopes,  # [H] float32
    out,  # [T, H, states, E], any float type: points to the first of this segment's S adjacent states
    lse,  # [T, H, states] float32, natural log
    scaled_q,  # [T, H, D] float16
    scale,
    softcap,
    stride_qt,
    stride_qh,
    stride_slot,
    stride_v,
    stride_kv_head,
    stride_v_head,
    stride_row,
    states,
    tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,  # keys after its own that each query of a causal segment reads too
    ALIBI: tl.constexpr,  # what slopes are multiplied with: the "distance", its "root", or nothing ("")
    SOFTCAP: tl.constexpr,
    QUANT: tl.constexpr,  # the kv_cache_dtype of an 8-bit cache: "fp8", "int8" or "int8_keys"; else ""
    INT8_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    Q_IN_MEMORY: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0) % tiles  # neighbouring programs read the same keys, mostly from L2
    if CAUSAL:
        tile = tiles - 1 - tile  # the tiles with the most keys start first
    kv_head, row = (tl.program_id(0) // tiles) % KV_HEADS, tl.program_id(0) // tiles // KV_HEADS
    split, splits = tl.program_id(1), tl.num_programs(1)

    first = tl.load(cu_seqlens_q + row, cache_modifier=".cg")
    queries = tl.load(cu_seqlens_q + row + 1, cache_modifier=".cg") - first
    length = tl.load(cache_seqlens + row, cache_modifier=".cg")
    gqa_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = gqa_M // GROUP
    head_M = kv_head * GROUP + gqa_M % GROUP
    ok_M = query_M < queries
    end = length
    if CAUSAL:  # keys up to the tile's last query
        end = length - tl.maximum(queries - 1 - WINDOW_RIGHT - (tile * BLOCK_M + BLOCK_M - 1) // GROUP, 0)
    end = tl.maximum(tl.where(tile * BLOCK_M < queries * GROUP, end, 0), 0)
    begin, start_M = 0, query_M
    if HAS_STARTS:
        start_M = tl.load(starts + first + query_M, mask=ok_M, other=2147483647, cache_modifier=".cg")
        begin = tl.minimum(tl.maximum(tl.min(start_M, 0), 0), end)
    # With fewer than MIN_SPLIT_KEYS keys a split, merging would cost more than splitting gains: a short row uses few splits.
    per_split = tl.cdiv(tl.maximum(tl.cdiv(end - begin, splits), MIN_SPLIT_KEYS), BLOCK_N) * BLOCK_N
    low = begin + split * per_split
    high = tl.minimum(low + per_split, end)
    pages = page_table + row.to(tl.int64) * stride_row
    kv += kv_head.to(tl.int64) * stride_kv_head
    if VALUE_DIM != HEAD_DIM:
        stride_v += kv_head * (stride_v_head - stride_kv_head)
    n = tl.arange(0, BLOCK_N)
    # A block's page numbers are read one block ahead, so that the loads of its keys can start at once.
    page_N = tl.load(pages + (low + n) // PAGE_SIZE, mask=low + n < high, other=0, cache_modifier=".cg")

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    d, e = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE)
    ok_D, ok_E = d < HEAD_DIM, e < VALUE_DIM
    token_M = (first + query_M).to(tl.int64)
    at_MD, ok_MD = own_part(gqa_M % GROUP, d, GROUP, HEAD_DIM, KEY_PARTS)
    ok_MD &= ok_M[:, None]
    q_MD = tl.load(q + (token_M * stride_qt + head_M * stride_qh)[:, None] + at_MD, mask=ok_MD, other=0.0)
    scale_log2 = scale if SOFTCAP else scale * LOG2E
    if QUANT == "fp8":
        scale_log2 *= fp8_scales(scales + kv_head * KEY_PARTS, gqa_M % GROUP, GROUP // KEY_PARTS, KEY_PARTS, 1)
    if QUANT != "":
        scaled_q_MD = scaled_q + (token_M * (KV_HEADS * GROUP) + head_M)[:, None] * HEAD_DIM + d[None, :]
        q_MD, q_scale = queries_for_8_bits(q_MD, scaled_q_MD, ok_MD, Q_IN_MEMORY, INT8_QUERIES)
        scale_log2 *= q_scale
    if ALIBI != "":
        q_position_M, slope_M = tl.load(q_positions + first + query_M, mask=ok_M, other=0), tl.load(slopes + head_M) * LOG2E
    # Weights of 8-bit values are scaled by 2 ** MAX_OFFSET, as in flash-attn: small ones stay normal in float16.  TO: the type
    # that values are converted to.
    MAX_OFFSET: tl.constexpr = 14.0 if QUANT == "fp8" or QUANT == "int8" else 0.0
    TO: tl.constexpr = tl.float16 if MAX_OFFSET > 0 and q.dtype.element_ty == tl.bfloat16 else q.dtype.element_ty
    top_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, PADDED_VALUE], tl.float32)
    for start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        key_N = start + n
        ok_N = key_N < high
        slot_N = slots_on(page_N, key_N, PAGE_SIZE)
        page_N = tl.load(pages + (key_N + BLOCK_N) // PAGE_SIZE, mask=key_N + BLOCK_N < high, other=0)
        at_ND = kv + (slot_N * stride_slot)[:, None] + d[None, :]
        k_ND = upcast(tl.load(at_ND, mask=ok_N[:, None] & ok_D[None, :], other=0.0), q_MD.dtype, ASM)
        scales_N = scales + slot_N * (KV_HEADS if QUANT == "int8_keys" else 2 * KV_HEADS * KEY_PARTS) + kv_head * KEY_PARTS
        if QUANT == "int8" and not INT8_QUERIES:
            k_ND *= scales_by_column(scales_N, ok_N, d, HEAD_DIM, KEY_PARTS, q_MD.dtype)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
        if QUANT == "int8_keys" or INT8_QUERIES:
            s_MN *= scales_by_row(scales_N, ok_N, gqa_M % GROUP, GROUP, KEY_PARTS)
        if SOFTCAP:
            s_MN = capped(s_MN, softcap) * LOG2E
        if ALIBI != "":
            s_MN += biases(slope_M, start - q_position_M, n, ALIBI)
        if CAUSAL or HAS_STARTS:
            s_MN = masked(s_MN, key_N, ok_N, start_M, length - (queries - 1 - WINDOW_RIGHT - query_M), HAS_STARTS, CAUSAL)
            new_M = tl.maximum(top_M, tl.max(s_MN, 1))
            shift_M = tl.where(new_M == -float("inf"), 0.0, new_M)  # -inf: the query has read no key yet
        else:
            s_MN += tl.where(ok_N, 0.0, -float("inf"))[None, :]  # compiles to one fused multiply-add with scale_log2
            new_M = tl.maximum(top_M, tl.max(s_MN, 1))
            shift_M = new_M
        p_MN = tl.exp2(s_MN - (shift_M - MAX_OFFSET)[:, None])
        decay_M = tl.exp2(top_M - shift_M)
        total_M = total_M * decay_M + tl.sum(p_MN, 1)
        at_NE = values_at(kv, at_ND, slot_N, stride_slot, e, q.dtype, VALUE_DIM == HEAD_DIM, QUANT)
        ok_NE = ok_N[:, None] & ok_E[None, :]  # also for values: an unwritten slot may hold NaN, and 0 * NaN is NaN
        v_NE = upcast(tl.load(at_NE + stride_v, mask=ok_NE, other=0.0), TO, ASM)
        if QUANT == "int8":
            v_NE *= scales_by_column(scales_N + KV_HEADS * KEY_PARTS, ok_N, e, VALUE_DIM, KEY_PARTS, TO)
        acc_ME = tl.dot(p_MN.to(v_NE.dtype), v_NE, acc_ME * decay_M[:, None], input_precision="ieee")
        top_M = new_M

    if QUANT == "fp8":
        acc_ME *= fp8_scales(scales + (KV_HEADS + kv_head) * KEY_PARTS, e, VALUE_DIM // KEY_PARTS, KEY_PARTS, 0)
    state_M = (token_M * (KV_HEADS * GROUP) + head_M) * states + split
    safe_M = store_lse(lse, state_M, top_M, total_M, ok_M, MAX_OFFSET)
    # The merge ignores the output of a split whose lse is -inf, so a short row's idle splits write no output.
    written_M = query_M < tl.where((low < high) | (splits == 1), queries, 0)
    at_ME = out + state_M[:, None] * VALUE_DIM + e[None, :]
    tl.store(at_ME, (acc_ME / safe_M[:, None]).to(out.dtype.element_ty), mask=written_M[:, None] & ok_E[None, :])
