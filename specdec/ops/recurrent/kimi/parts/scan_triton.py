"""The kernel that goes through the blocks of a part in Kimi's rule: a program computes some columns of a head's values.

All it holds is turned (values come first), as in chunks/scan_triton.py.  See launch.py.

Shapes: as of specdec/ops/recurrent/kimi_delta.py; N tokens of a block, M columns of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.chunks.prepare_triton import halves


@triton.jit
def kimi_scan_kernel(
    keys, queries, added, values, reads, ends,  # see prepare_triton.py
    state,  # [P, H, K, V]
    cu,  # [B + 1]
    read, write, keep, after,  # [B]
    out,  # [T, H, V]
    T, blocks, stride_state,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, SEARCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, h, block = tl.program_id(1), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    n, v, width = tl.arange(0, BLOCK_N), block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, K)
    by_key_NK, by_value_NM = n[:, None] * K + width[None, :], n[:, None] * V + v[None, :]
    by_token_NN, by_out_NM = n[:, None] * BLOCK_N + n[None, :], n[:, None] * H * V + v[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, kept_at = tl.load(cu + part).to(tl.int64), tl.load(after + part)
    tokens, number = tl.load(cu + part + 1) - begin.to(tl.int32), _blocks_before(part, cu, after, BLOCK_N, SEARCH)
    to_state_MK = state + h * K * V + width[None, :] * V + v[:, None]
    state_MK = tl.load(to_state_MK + tl.load(read + part) * stride_state)
    T = T.to(tl.int64)
    own, second, ends = h * T + begin, H * T * K, ends + (h.to(tl.int64) * blocks + number) * K + width
    is_short: tl.constexpr = keys.dtype.element_ty == tl.bfloat16
    for turn in range(2):  # up to where the state is to be kept, and the rest
        end = tl.where(turn == 0, kept_at, tokens)
        for first in tl.range(turn * kept_at, end, BLOCK_N, num_stages=STAGES):
            at, ok_N1 = own + first, (n < end - first)[:, None]
            k_NK = tl.load(keys + at * K + by_key_NK, mask=ok_N1, other=0.0)
            q_NK = tl.load(queries + at * K + by_key_NK, mask=ok_N1, other=0.0)
            added_NK = tl.load(added + at * K + by_key_NK, mask=ok_N1, other=0.0)
            u_NM = tl.load(values + at * V + by_value_NM, mask=ok_N1, other=0.0)
            reads_NN = tl.load(reads + at * BLOCK_N + by_token_NN, mask=ok_N1, other=0.0)
            less_K = tl.load(ends + ((first - turn * kept_at) // BLOCK_N + turn * tl.cdiv(kept_at, BLOCK_N)) * K)
            if is_short:
                k_low_NK = tl.load(keys + second + at * K + by_key_NK, mask=ok_N1, other=0.0)
                added_low_NK = tl.load(added + second + at * K + by_key_NK, mask=ok_N1, other=0.0)
                high, low = halves(state_MK)
                u_MN = tl.dot(low, tl.trans(k_NK), tl.dot(high, tl.trans(k_low_NK), tl.trans(u_NM)))
                u_MN = tl.dot(high, tl.trans(k_NK), u_MN)
                out_MN = tl.dot(high, tl.trans(q_NK))
                high, low = halves(u_MN)
                out_MN = tl.dot(high, tl.trans(reads_NN), out_MN)
                state_MK = tl.dot(low, added_NK, tl.dot(high, added_low_NK, state_MK * less_K[None, :]))
                state_MK = tl.dot(high, added_NK, state_MK)
            else:
                u_MN = tl.dot(state_MK, tl.trans(k_NK), tl.trans(u_NM), input_precision=PRECISION)
                out_MN = tl.dot(state_MK, tl.trans(q_NK), input_precision=PRECISION)
                out_MN = tl.dot(u_MN, tl.trans(reads_NN), out_MN, input_precision=PRECISION)
                state_MK = tl.dot(u_MN, added_NK, state_MK * less_K[None, :], input_precision=PRECISION)
            to_out = out + ((begin + first) * H + h) * V + by_out_NM
            tl.store(to_out, tl.trans(out_MN).to(out.dtype.element_ty), mask=ok_N1)
        to = tl.load(tl.where(turn == 0, keep, write) + part)
        if (turn == 1) | (kept_at > 0):
            tl.store(to_state_MK + to * stride_state, state_MK)


@triton.jit
def _blocks_before(part, cu, after, N: tl.constexpr, SEARCH: tl.constexpr):
    """How many blocks the parts before this one have: see `tokens_of_block`."""
    count = part * 0
    for first in range(0, part, SEARCH):
        other = first + tl.arange(0, SEARCH)
        begin_P = tl.load(cu + other, mask=other < part, other=0)
        kept_P = tl.load(after + other, mask=other < part, other=0)
        tokens_P = tl.load(cu + other + 1, mask=other < part, other=0) - begin_P
        count += tl.sum(tl.cdiv(kept_P, N) + tl.cdiv(tokens_P - kept_P, N), 0)
    return count
