"""The kernel that goes through the blocks of a part: a program computes some columns of a head's values.  See launch.py.

All it holds is turned (values come first), so that what one product gives lies in the registers where the next one reads it:
on Hopper GPUs nothing but what is loaded passes through shared memory.

Shapes: as of specdec/ops/recurrent/ssd.py; N tokens of a block, M columns of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.chunks.prepare_triton import halves


@triton.jit
def ssd_scan_kernel(
    y,  # [T, 2 G K + H V]
    reads, factors,  # [H, T, N], [H, T, 2]: see ssd_prepare_triton.py
    state,  # [P, H, K, V]
    cu,  # [B + 1]
    read, write, keep, after,  # [B]
    out,  # [T, H, V]
    T, stride_y, stride_state,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, h, block = tl.program_id(1), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, n, v, width = h // (H // G), tl.arange(0, BLOCK_N), block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, K)
    by_key_NK, by_value_NM = n[:, None] * stride_y + width[None, :], n[:, None] * stride_y + v[None, :]
    by_token_NN, by_token_N2 = n[:, None] * BLOCK_N + n[None, :], n[:, None] * 2 + tl.arange(0, 2)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, kept_at = tl.load(cu + part).to(tl.int64), tl.load(after + part)
    tokens = tl.load(cu + part + 1) - begin.to(tl.int32)
    to_state_MK = state + h * K * V + width[None, :] * V + v[:, None]
    state_MK = tl.load(to_state_MK + tl.load(read + part) * stride_state)
    own = h * T.to(tl.int64)
    is_short: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    for turn in range(2):  # up to where the state is to be kept, and the rest
        end = tl.where(turn == 0, kept_at, tokens)
        for first in tl.range(turn * kept_at, end, BLOCK_N, num_stages=STAGES):
            at, ok_N1 = begin + first, (n < end - first)[:, None]
            from_y = y + at * stride_y
            k_NK = tl.load(from_y + (G + g) * K + by_key_NK, mask=ok_N1, other=0.0)
            q_NK = tl.load(from_y + g * K + by_key_NK, mask=ok_N1, other=0.0)
            x_NM = tl.load(from_y + 2 * G * K + h * V + by_value_NM, mask=ok_N1, other=0.0)
            reads_NN = tl.load(reads + (own + at) * BLOCK_N + by_token_NN, mask=ok_N1, other=0.0)
            by_q_N, added_N = tl.split(tl.load(factors + (own + at) * 2 + by_token_N2, mask=ok_N1, other=0.0))
            faded = tl.load(factors + (own + at + tl.minimum(BLOCK_N, end - first) - 1) * 2)
            added_MN = tl.trans(x_NM).to(tl.float32) * added_N[None, :]
            if is_short:
                high, low = halves(state_MK)
                out_MN = tl.dot(high, tl.trans(q_NK), tl.dot(low, tl.trans(q_NK))) * by_q_N[None, :]
                out_MN = tl.dot(tl.trans(x_NM), tl.trans(reads_NN), out_MN)
                high, low = halves(added_MN)
                state_MK = tl.dot(high, k_NK, tl.dot(low, k_NK, state_MK * faded))
            else:
                k_NK, q_NK = k_NK.to(tl.float32), q_NK.to(tl.float32)
                out_MN = tl.dot(state_MK, tl.trans(q_NK), input_precision=PRECISION) * by_q_N[None, :]
                out_MN = tl.dot(tl.trans(x_NM).to(tl.float32), tl.trans(reads_NN), out_MN, input_precision=PRECISION)
                state_MK = tl.dot(added_MN, k_NK, state_MK * faded, input_precision=PRECISION)
            to_out = out + (at * H + h) * V + n[:, None] * H * V + v[None, :]
            tl.store(to_out, tl.trans(out_MN).to(out.dtype.element_ty), mask=ok_N1)
        number = tl.load(tl.where(turn == 0, keep, write) + part)
        if (turn == 1) | (kept_at > 0):
            tl.store(to_state_MK + number * stride_state, state_MK)
