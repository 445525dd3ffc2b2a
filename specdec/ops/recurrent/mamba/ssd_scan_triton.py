"""The kernel that goes through the blocks of a part: a program computes some columns of a head's values.  See launch.py.

Where parts are few, and long, each is cut into stretches of blocks.  A first launch (ONLY_STATES) computes what each stretch
would leave if it began with an empty state, and how far it fades what was there; in the second one a program puts the state
with which its stretch begins together from those, and computes outputs.

All it holds is turned (values come first), so that what one product gives lies in the registers where the next one reads it:
on Hopper GPUs nothing but what is loaded passes through shared memory.

Shapes: as of specdec/ops/recurrent/ssd.py; N tokens of a block, M columns of values, Z stretches of a part.
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
    added, fades,  # [B, Z - 1, H, K, V], [B, Z - 1, H]: what stretches add to a state, and by how much they fade it
    out,  # [T, H, V]
    T, stride_y, stride_state,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr, Z: tl.constexpr,
    ONLY_STATES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
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
    kept_blocks = tl.cdiv(kept_at, BLOCK_N)
    blocks = kept_blocks + tl.cdiv(tokens - kept_at, BLOCK_N)
    first_block = tl.program_id(2) * tl.cdiv(blocks, Z)
    end_block = tl.minimum(first_block + tl.cdiv(blocks, Z), blocks)
    # Nothing is left to do for this stretch, or nobody reads what it leaves.
    if (tl.program_id(2) > 0) & (first_block >= blocks) | ONLY_STATES & (end_block == blocks):
        return
    at_MK = h * K * V + width[None, :] * V + v[:, None]
    of_part = part.to(tl.int64) * (Z - 1) * H
    if ONLY_STATES:
        state_MK, fade = tl.zeros([BLOCK_V, K], tl.float32), 1.0
    else:
        state_MK = tl.load(state + tl.load(read + part) * stride_state + at_MK)
        for before in range(tl.program_id(2) if Z > 1 else 0):
            of_stretch = of_part + before * H
            more_MK = tl.load(added + of_stretch * K * V + at_MK)
            state_MK = state_MK * tl.load(fades + of_stretch + h) + more_MK
    own = h * T.to(tl.int64)
    is_short: tl.constexpr = y.dtype.element_ty == tl.bfloat16
    for turn in range(2):  # up to where the state is to be kept, and the rest
        end = tl.where(turn == 0, kept_at, tokens)
        low = tl.where(turn == 0, first_block * BLOCK_N, kept_at + tl.maximum(first_block - kept_blocks, 0) * BLOCK_N)
        high = tl.where(turn == 0, end_block * BLOCK_N, kept_at + tl.maximum(end_block - kept_blocks, 0) * BLOCK_N)
        for first in tl.range(low, tl.minimum(high, end), BLOCK_N, num_stages=STAGES):
            at, ok_N1 = begin + first, (n < end - first)[:, None]
            from_y = y + at * stride_y
            k_NK = tl.load(from_y + (G + g) * K + by_key_NK, mask=ok_N1, other=0.0)
            x_NM = tl.load(from_y + 2 * G * K + h * V + by_value_NM, mask=ok_N1, other=0.0)
            by_q_N, added_N = tl.split(tl.load(factors + (own + at) * 2 + by_token_N2, mask=ok_N1, other=0.0))
            faded = tl.load(factors + (own + at + tl.minimum(BLOCK_N, end - first) - 1) * 2)
            if not ONLY_STATES:
                q_NK = tl.load(from_y + g * K + by_key_NK, mask=ok_N1, other=0.0)
                reads_NN = tl.load(reads + (own + at) * BLOCK_N + by_token_NN, mask=ok_N1, other=0.0)
                out_MN = _outputs(state_MK, q_NK, x_NM, reads_NN, by_q_N, PRECISION)
            added_MN = tl.trans(x_NM).to(tl.float32) * added_N[None, :]
            if is_short:
                high_MN, low_MN = halves(added_MN)
                state_MK = tl.dot(high_MN, k_NK, tl.dot(low_MN, k_NK, state_MK * faded))
            else:
                state_MK = tl.dot(added_MN, k_NK.to(tl.float32), state_MK * faded, input_precision=PRECISION)
            if ONLY_STATES:
                fade *= faded
            else:
                to_out = out + (at * H + h) * V + n[:, None] * H * V + v[None, :]
                tl.store(to_out, tl.trans(out_MN).to(out.dtype.element_ty), mask=ok_N1)
        if not ONLY_STATES:
            number = tl.load(tl.where(turn == 0, keep, write) + part)
            ends_kept = (kept_at > 0) & (first_block < kept_blocks) & (end_block >= kept_blocks)
            if tl.where(turn == 0, ends_kept, end_block == blocks):
                tl.store(state + number * stride_state + at_MK, state_MK)
    if ONLY_STATES:
        of_stretch = of_part + tl.program_id(2) * H
        tl.store(added + of_stretch * K * V + at_MK, state_MK)
        if block == 0:
            tl.store(fades + of_stretch + h, fade)


@triton.jit
def _outputs(state_MK, q_NK, x_NM, reads_NN, by_q_N, PRECISION: tl.constexpr):
    """[M, N]."""
    is_short: tl.constexpr = q_NK.dtype == tl.bfloat16
    if is_short:
        high, low = halves(state_MK)
        out_MN = tl.dot(high, tl.trans(q_NK), tl.dot(low, tl.trans(q_NK))) * by_q_N[None, :]
        out_MN = tl.dot(tl.trans(x_NM), tl.trans(reads_NN), out_MN)
    else:
        out_MN = tl.dot(state_MK, tl.trans(q_NK.to(tl.float32)), input_precision=PRECISION) * by_q_N[None, :]
        out_MN = tl.dot(tl.trans(x_NM).to(tl.float32), tl.trans(reads_NN), out_MN, input_precision=PRECISION)
    return out_MN
