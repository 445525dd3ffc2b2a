"""The kernels that merge the states of a query's splits and segments, which mla_triton.py and mla_hopper.py leave.

`latent_merge_kernel` also reads the query's few keys of its own (its suffix, given as slots); `latent_combine_kernel` has
states alone.  `attend_latent` in mla_launch.py chooses.

Order of chained launches (specdec/ops/launch.py): both read nothing before their wait, and trigger after it.

Shapes: N keys of a block, C latent rank, R rotated dim, T queries, H heads, S states of each query, P states that are loaded
together.
"""

import triton
import triton.language as tl

from specdec.attention.latent.mla_triton import latents, rotated_parts


@triton.jit(do_not_specialize=["states"])
def latent_combine_kernel(
    partial_out,  # [T, H, S, C], any float type
    partial_lse,  # [T, H, S] float32, natural log
    out,  # [T, H, C], any float type
    lse,  # [T, H] float32, natural log
    states,  # S
    RANK: tl.constexpr,
    PADDED_STATES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program merges BLOCK_C columns of one head of a query.  An idle split has left its lse, which is -inf, and no output.

    Loading the first BLOCK_P outputs and dropping some is faster than waiting for their lse; the others wait.
    """
    at = tl.program_id(0).to(tl.int64)  # a query's head
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, PADDED_STATES)
    p = tl.arange(0, BLOCK_P)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    from_C = partial_out + at * states * RANK + c
    first_PC = tl.load(from_C[None, :] + p[:, None] * RANK, mask=(p < states)[:, None] & (c < RANK)[None, :], other=0.0)
    lse_P = tl.load(partial_lse + at * states + p, mask=p < states, other=-float("inf"))
    lse_S = tl.load(partial_lse + at * states + s, mask=s < states, other=-float("inf"))
    top = tl.max(lse_S, 0)
    shift = tl.where(top == -float("inf"), 0.0, top)  # -inf: no key was read
    total = tl.sum(tl.exp(lse_S - shift), 0)
    acc_PC = tl.where((lse_P > -float("inf"))[:, None], first_PC * tl.exp(lse_P - shift)[:, None], 0.0)
    for start in tl.static_range(BLOCK_P, PADDED_STATES, BLOCK_P):
        lse_P = tl.load(partial_lse + at * states + start + p, mask=start + p < states, other=-float("inf"))
        ok_PC = (lse_P > -float("inf"))[:, None] & (c < RANK)[None, :]
        more_PC = tl.load(from_C[None, :] + (start + p)[:, None] * RANK, mask=ok_PC, other=0.0)
        acc_PC += more_PC * tl.exp(lse_P - shift)[:, None]

    safe = tl.where(total > 0, total, 1.0)
    if tl.program_id(1) == 0:
        tl.store(lse + at, tl.where(total > 0, shift + tl.log(safe), -float("inf")))
    tl.store(out + at * RANK + c, (tl.sum(acc_PC, 0) / safe).to(out.dtype.element_ty), mask=c < RANK)


@triton.jit(
    do_not_specialize=["stride_row", "states"],
    do_not_specialize_on_alignment=["slot_table", "cache_seqlens", "starts"],
)
def latent_merge_kernel(
    q,  # [T, H, C + R]
    latent,  # [slots, C], any float type
    rope,  # [slots, R]
    scales,  # [slots, C / 128] float32
    slot_table,  # [T, W] int32
    cache_seqlens,  # [T] int32
    starts,  # [T] int32
    partial_out,  # [T, H, S, C], any float type
    partial_lse,  # [T, H, S] float32, natural log
    out,  # [T, H, C], any float type
    lse,  # [T, H] float32, natural log
    scale,
    stride_qt,
    stride_qh,
    stride_row,
    states,  # S
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PADDED_STATES: tl.constexpr,
    UNROLL: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Reads each query's few keys of its own (its suffix, given as slots) and merges them with the states of splits and
    segments.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    c = tl.arange(0, PADDED_RANK)
    r = tl.arange(0, PADDED_ROPE)
    ok_H = h < HEADS
    ok_C = c < RANK
    ok_R = r < ROPE
    top_H = tl.full([BLOCK_H], -float("inf"), tl.float32)
    total_H = tl.zeros([BLOCK_H], tl.float32)
    acc_HC = tl.zeros([BLOCK_H, PADDED_RANK], tl.float32)

    length = tl.load(cache_seqlens + token)
    begin = 0
    if HAS_STARTS:
        begin = tl.maximum(tl.load(starts + token), 0)
    from_H = q + token * stride_qt + h * stride_qh
    q_HC = tl.load(from_H[:, None] + c[None, :], mask=ok_H[:, None] & ok_C[None, :], other=0.0)
    q_HR = tl.load(from_H[:, None] + RANK + r[None, :], mask=ok_H[:, None] & ok_R[None, :], other=0.0)
    for start in range(begin, length, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        ok_N = key_N < length
        slot_N = tl.load(slot_table + token * stride_row + key_N, mask=ok_N, other=0).to(tl.int64)
        c_NC = latents(latent, scales, slot_N, ok_N, LATENT_STRIDE, SCALES_STRIDE, q_HC.dtype, RANK, PADDED_RANK, SCALED)
        r_NR = rotated_parts(rope, slot_N, ok_N, ROPE_STRIDE, q_HR.dtype, ROPE, PADDED_ROPE)
        s_HN = tl.dot(q_HC, tl.trans(c_NC), input_precision="ieee")
        s_HN = tl.dot(q_HR, tl.trans(r_NR), s_HN, input_precision="ieee") * scale
        s_HN = tl.where(ok_N[None, :], s_HN, -float("inf"))
        new_H = tl.maximum(top_H, tl.max(s_HN, 1))  # finite: every block holds a readable key
        p_HN = tl.exp(s_HN - new_H[:, None])
        decay_H = tl.exp(top_H - new_H)
        total_H = total_H * decay_H + tl.sum(p_HN, 1)
        acc_HC = tl.dot(p_HN.to(c_NC.dtype), c_NC, acc_HC * decay_H[:, None], input_precision="ieee")
        top_H = new_H

    state_H = (token * HEADS + h) * states
    s = tl.arange(0, PADDED_STATES)
    ok_HS = ok_H[:, None] & (s < states)[None, :]
    lse_HS = tl.load(partial_lse + state_H[:, None] + s[None, :], mask=ok_HS, other=-float("inf"))
    live = tl.max(tl.max(tl.where(lse_HS > -float("inf"), s[None, :] + 1, 0), 1), 0)  # only idle splits follow
    new_H = tl.maximum(top_H, tl.max(lse_HS, 1))
    shift_H = tl.where(new_H == -float("inf"), 0.0, new_H)  # -inf: no key was read
    total_H = total_H * tl.exp(top_H - shift_H) + tl.sum(tl.exp(lse_HS - shift_H[:, None]), 1)
    acc_HC = acc_HC * tl.exp(top_H - shift_H)[:, None]
    for start in range(0, live, UNROLL):
        for step in tl.static_range(UNROLL):
            ok_state_H = h < tl.where(start + step < live, HEADS, 0)
            lse_H = tl.load(partial_lse + state_H + start + step, mask=ok_state_H, other=-float("inf"))
            at_HC = (state_H + start + step)[:, None] * RANK + c[None, :]
            out_HC = tl.load(partial_out + at_HC, mask=ok_state_H[:, None] & ok_C[None, :], other=0.0)
            # An idle split wrote no output.  Loading the output and dropping it is faster than waiting for the split's lse.
            weight_H = tl.exp(lse_H - shift_H)
            acc_HC += tl.where((lse_H > -float("inf"))[:, None], out_HC * weight_H[:, None], 0.0)

    some_H = total_H > 0
    safe_H = tl.where(some_H, total_H, 1.0)
    at_H = token * HEADS + h
    tl.store(lse + at_H, tl.where(some_H, shift_H + tl.log(safe_H), -float("inf")), mask=ok_H)
    out_HC = (acc_HC / safe_H[:, None]).to(out.dtype.element_ty)
    tl.store(out + at_H[:, None] * RANK + c[None, :], out_HC, mask=ok_H[:, None] & ok_C[None, :])
