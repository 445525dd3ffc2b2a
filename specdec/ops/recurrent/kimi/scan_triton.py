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
    y,  # [T, 2 H K + H V]
    solved, reads, decays, lengths,  # [1 or 2, H, T, N], [H, T, N], [H, T, K], [H, T, 2]: see prepare_triton.py
    state,  # [P, H, K, V]
    cu,  # [B + 1]
    read, write, keep, after,  # [B]
    out,  # [T, H, V]
    T, stride_y, stride_state,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, h, block = tl.program_id(1), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    n, v, width = tl.arange(0, BLOCK_N), block * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, K)
    by_key_NK, by_value_NM = n[:, None] * stride_y + width[None, :], n[:, None] * stride_y + v[None, :]
    by_token_NN, by_out_NM = n[:, None] * BLOCK_N + n[None, :], n[:, None] * H * V + v[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, kept_at = tl.load(cu + part).to(tl.int64), tl.load(after + part)
    tokens = tl.load(cu + part + 1) - begin.to(tl.int32)
    to_state_MK = state + h * K * V + width[None, :] * V + v[:, None]
    state_MK = tl.load(to_state_MK + tl.load(read + part) * stride_state)
    by_decay_NK, by_two_N2, T = n[:, None] * K + width[None, :], n[:, None] * 2 + tl.arange(0, 2)[None, :], T.to(tl.int64)
    own = h * T
    is_short: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    for turn in range(2):  # up to where the state is to be kept, and the rest
        end = tl.where(turn == 0, kept_at, tokens)
        for first in tl.range(turn * kept_at, end, BLOCK_N, num_stages=STAGES):
            at, ok_N = begin + first, n < end - first
            from_y = y + at * stride_y + h * K
            k_NK = tl.load(from_y + H * K + by_key_NK, mask=ok_N[:, None], other=0.0)
            q_NK = tl.load(from_y + by_key_NK, mask=ok_N[:, None], other=0.0)
            v_NM = tl.load(from_y - h * K + 2 * H * K + h * V + by_value_NM, mask=ok_N[:, None], other=0.0)
            solved_NN = tl.load(solved + (own + at) * BLOCK_N + by_token_NN, mask=ok_N[:, None], other=0.0)
            reads_NN = tl.load(reads + (own + at) * BLOCK_N + by_token_NN, mask=ok_N[:, None], other=0.0)
            summed_NK = tl.load(decays + (own + at) * K + by_decay_NK, mask=ok_N[:, None], other=0.0)
            last_K = tl.load(decays + (own + at + tl.minimum(end - first, BLOCK_N) - 1) * K + width)
            lengths_N2 = tl.load(lengths + (own + at) * 2 + by_two_N2, mask=ok_N[:, None], other=0.0)
            q_length_N, k_length_N = tl.split(lengths_N2)
            faded_NK, k_NK = tl.exp(summed_NK), k_NK.to(tl.float32) * k_length_N[:, None]
            q_NK, added_NK = q_NK.to(tl.float32) * q_length_N[:, None] * faded_NK, k_NK * _rest(last_K, summed_NK)
            k_NK *= faded_NK
            less_MK = state_MK * tl.exp(last_K)[None, :]
            if is_short:
                rest_NN = tl.load(solved + (H * T + own + at) * BLOCK_N + by_token_NN, mask=ok_N[:, None], other=0.0)
                high, low = halves(state_MK)
                k_high, k_low = halves(k_NK)
                k_state_MN = tl.dot(low, tl.trans(k_high), tl.dot(high, tl.trans(k_low)))
                k_state_MN = tl.dot(high, tl.trans(k_high), k_state_MN)
                out_MN = tl.dot(high, tl.trans(q_NK.to(tl.bfloat16)))
                u_MN = tl.dot(tl.trans(v_NM), tl.trans(solved_NN), tl.dot(tl.trans(v_NM), tl.trans(rest_NN)))
                high, low = halves(-k_state_MN)
                u_MN = tl.dot(high, tl.trans(rest_NN), tl.dot(low, tl.trans(solved_NN), u_MN))
                u_MN = tl.dot(high, tl.trans(solved_NN), u_MN)
                high, low = halves(u_MN)
                out_MN = tl.dot(high, tl.trans(reads_NN), out_MN)
                k_high, k_low = halves(added_NK)
                state_MK = tl.dot(high, k_high, tl.dot(high, k_low, tl.dot(low, k_high, less_MK)))
            else:
                k_state_MN = tl.dot(state_MK, tl.trans(k_NK), input_precision=PRECISION)
                out_MN = tl.dot(state_MK, tl.trans(q_NK), input_precision=PRECISION)
                right_MN = tl.trans(v_NM).to(tl.float32) - k_state_MN
                u_MN = tl.dot(right_MN, tl.trans(solved_NN), input_precision=PRECISION)
                out_MN = tl.dot(u_MN, tl.trans(reads_NN), out_MN, input_precision=PRECISION)
                state_MK = tl.dot(u_MN, added_NK, less_MK, input_precision=PRECISION)
            to_out = out + (at * H + h) * V + by_out_NM
            tl.store(to_out, tl.trans(out_MN).to(out.dtype.element_ty), mask=ok_N[:, None])
        number = tl.load(tl.where(turn == 0, keep, write) + part)
        if (turn == 1) | (kept_at > 0):
            tl.store(to_state_MK + number * stride_state, state_MK)


@triton.jit
def _rest(last_K, summed_NK):
    """How tokens fade up to the end of their block.  Rows of padding have no sum, and their keys are zeros."""
    return tl.exp(tl.minimum(last_K[None, :] - summed_NK, 0.0))
