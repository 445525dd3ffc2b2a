"""The kernel that goes through the blocks of a part: a program computes some columns of a head's values.  See launch.py.

All it holds is turned (values come first), so that what one product gives lies in the registers where the next one reads it:
on Hopper GPUs nothing but what is loaded passes through shared memory.

Shapes: as of specdec/ops/recurrent/gated_delta.py; N tokens of a block, M columns of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.recurrent.chunks.prepare_triton import halves


@triton.jit
def chunk_scan_kernel(
    y,  # [T, 2 G K + H V]
    solved, reads, factors,  # [1 or 2, H, T, N], [H, T, N], [H, T, 4]: see prepare_triton.py
    state,  # [P, H, K, V]
    cu,  # [B + 1]
    read, write, keep, after,  # [B]
    out,  # [T, H, V]
    T, stride_y, stride_state,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PADDED_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, h, block = tl.program_id(1), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, n, v, width = h // (H // G), tl.arange(0, BLOCK_N), block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, PADDED_K)
    by_key_NK, by_value_NM = n[:, None] * stride_y + width[None, :], n[:, None] * stride_y + v[None, :]
    by_token_NN, by_out_NM = n[:, None] * BLOCK_N + n[None, :], n[:, None] * H * V + v[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, kept_at = tl.load(cu + part).to(tl.int64), tl.load(after + part)
    tokens = tl.load(cu + part + 1) - begin.to(tl.int32)
    to_state_MK = state + h * K * V + width[None, :] * V + v[:, None]
    ok_1K = width[None, :] < K if PADDED_K > K else width[None, :] >= 0  # zeros of columns that are not there
    state_MK = tl.load(to_state_MK + tl.load(read + part) * stride_state, mask=ok_1K, other=0.0)
    by_token_N4, T = n[:, None] * 4 + tl.arange(0, 4)[None, :], T.to(tl.int64)
    own = h * T
    is_short: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    for turn in range(2):  # up to where the state is to be kept, and the rest
        end = tl.where(turn == 0, kept_at, tokens)
        for first in tl.range(turn * kept_at, end, BLOCK_N, num_stages=STAGES):
            at, ok_N = begin + first, n < end - first
            from_y = y + at * stride_y
            k_NK = tl.load(from_y + (G + g) * K + by_key_NK, mask=ok_N[:, None] & ok_1K, other=0.0)
            q_NK = tl.load(from_y + g * K + by_key_NK, mask=ok_N[:, None] & ok_1K, other=0.0)
            v_NM = tl.load(from_y + 2 * G * K + h * V + by_value_NM, mask=ok_N[:, None], other=0.0)
            solved_NN = tl.load(solved + (own + at) * BLOCK_N + by_token_NN, mask=ok_N[:, None], other=0.0)
            reads_NN = tl.load(reads + (own + at) * BLOCK_N + by_token_NN, mask=ok_N[:, None], other=0.0)
            factors_N4 = tl.load(factors + (own + at) * 4 + by_token_N4, mask=ok_N[:, None], other=0.0)
            faded = tl.load(factors + (own + at) * 4 + 3)
            by_k_N, by_q_N, added_N = _columns(factors_N4, BLOCK_N)
            if is_short:
                rest_NN = tl.load(solved + (H * T + own + at) * BLOCK_N + by_token_NN, mask=ok_N[:, None], other=0.0)
                high, low = halves(state_MK)
                k_state_MN = tl.dot(high, tl.trans(k_NK), tl.dot(low, tl.trans(k_NK)))
                out_MN = tl.dot(high, tl.trans(q_NK), tl.dot(low, tl.trans(q_NK))) * by_q_N
                u_MN = tl.dot(tl.trans(v_NM), tl.trans(solved_NN), tl.dot(tl.trans(v_NM), tl.trans(rest_NN)))
                high, low = halves(-k_state_MN * by_k_N)
                u_MN = tl.dot(high, tl.trans(rest_NN), tl.dot(low, tl.trans(solved_NN), u_MN))
                u_MN = tl.dot(high, tl.trans(solved_NN), u_MN)
                out_MN = tl.dot(u_MN.to(tl.bfloat16), tl.trans(reads_NN), out_MN)
                high, low = halves(u_MN * added_N)
                state_MK = tl.dot(high, k_NK, tl.dot(low, k_NK, state_MK * faded))
            else:
                k_NK, q_NK = k_NK.to(tl.float32), q_NK.to(tl.float32)
                k_state_MN = tl.dot(state_MK, tl.trans(k_NK), input_precision=PRECISION)
                out_MN = tl.dot(state_MK, tl.trans(q_NK), input_precision=PRECISION) * by_q_N
                right_MN = tl.trans(v_NM).to(tl.float32) - k_state_MN * by_k_N
                u_MN = tl.dot(right_MN, tl.trans(solved_NN), input_precision=PRECISION)
                out_MN = tl.dot(u_MN, tl.trans(reads_NN), out_MN, input_precision=PRECISION)
                state_MK = tl.dot(u_MN * added_N, k_NK, state_MK * faded, input_precision=PRECISION)
            to_out = out + (at * H + h) * V + by_out_NM
            tl.store(to_out, tl.trans(out_MN).to(out.dtype.element_ty), mask=ok_N[:, None])
        number = tl.load(tl.where(turn == 0, keep, write) + part)
        if (turn == 1) | (kept_at > 0):
            tl.store(to_state_MK + number * stride_state, state_MK, mask=ok_1K)


@triton.jit
def _columns(factors_N4, N: tl.constexpr):
    """The first three, each as a row: they are read at once, because small loads would be done by every warp."""
    keys_N2, queries_N2 = tl.split(tl.reshape(factors_N4, [N, 2, 2]))
    by_k_N, added_N = tl.split(keys_N2)
    by_q_N, _ = tl.split(queries_N2)
    return by_k_N[None, :], by_q_N[None, :], added_N[None, :]
