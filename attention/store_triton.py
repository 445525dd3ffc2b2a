"""The kernel that stores: one token's keys and values, of all heads, to its slot.  One program a token.

Shapes: T tokens, K kv heads, R the 2 * K rows of a token (keys, then values), D head dim.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_kernel(
    source,  # [T, 2, K, D]
    kv,  # [slots, 2, K, D]
    slots,  # [T] int64 (int32 does)
    stride_t,
    stride_source_v,
    stride_source_head,
    stride_slot,
    stride_v,
    stride_kv_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PADDED_DIM)
    which_R, head_R = r // KV_HEADS, r % KV_HEADS
    ok_RD = (r < 2 * KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    from_R = token * stride_t + which_R * stride_source_v + head_R * stride_source_head
    to_R = slot * stride_slot + which_R * stride_v + head_R * stride_kv_head
    x_RD = tl.load(source + from_R[:, None] + d[None, :], mask=ok_RD)
    tl.store(kv + to_R[:, None] + d[None, :], x_RD, mask=ok_RD)
