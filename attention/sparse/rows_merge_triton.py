"""The kernel that merges the states which rows_hopper.py leaves for the splits of rows of slots.

Order of chained launches (specdec/ops/launch.py): the rows' lengths are read before gdc_wait, as attention's kernels read them;
so every load of a state can start at once after it.  The trigger comes late.

Shapes: T queries, H heads, S states of a query, C latent rank, P heads of a program, G groups of 8 columns.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["states"], do_not_specialize_on_alignment=["counts"])
def merge_rows_kernel(
    partial_out,  # [T, H / 64, S, C / 8, 64, 8] float32
    partial_lse,  # [T, H, S] float32, natural log
    out,  # [T, H, C], any float type
    lse,  # [T, H] float32, natural log
    counts,  # [T] int32
    states,  # S
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PADDED_STATES: tl.constexpr,
    UNROLL: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program merges 8 * BLOCK_G columns of BLOCK_P heads of a query.  Idle splits have left nothing."""
    token = tl.program_id(0).to(tl.int64)
    # The splits that hold keys, as rows_hopper_kernel divides them.
    length = tl.load(counts + token, cache_modifier=".cg")
    live = tl.cdiv(length, tl.cdiv(tl.maximum(tl.cdiv(length, states), MIN_SPLIT_KEYS), MIN_SPLIT_KEYS) * MIN_SPLIT_KEYS)
    h = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    g = tl.program_id(2) * BLOCK_G + tl.arange(0, BLOCK_G)
    e = tl.arange(0, 8)
    s = tl.arange(0, PADDED_STATES)
    state_P = (token * HEADS + h) * states
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lse_PS = tl.load(partial_lse + state_P[:, None] + s[None, :], mask=(s < live)[None, :], other=-float("inf"))
    top_P = tl.max(lse_PS, 1)
    shift_P = tl.where(top_P == -float("inf"), 0.0, top_P)  # -inf: no key was read
    total_P = tl.sum(tl.exp(lse_PS - shift_P[:, None]), 1)
    acc_GPE = tl.zeros([BLOCK_G, BLOCK_P, 8], tl.float32)
    tile_P = (token * (HEADS // 64) + h // 64) * states
    at_GPE = (tile_P * RANK * 64 + h % 64 * 8)[None, :, None] + g[:, None, None] * 512 + e[None, None, :]
    for start in range(0, live, UNROLL):
        for step in tl.static_range(UNROLL):
            ok = start + step < live
            lse_P = tl.load(partial_lse + state_P + start + step, mask=ok, other=-float("inf"))
            out_GPE = tl.load(partial_out + at_GPE + (start + step) * (RANK * 64), mask=ok, other=0.0)
            acc_GPE += out_GPE * tl.exp(lse_P - shift_P)[None, :, None]
    some_P = total_P > 0
    safe_P = tl.where(some_P, total_P, 1.0)
    at_P = token * HEADS + h
    tl.store(lse + at_P, tl.where(some_P, shift_P + tl.log(safe_P), -float("inf")))
    to_GPE = (at_P * RANK)[None, :, None] + g[:, None, None] * 8 + e[None, None, :]
    tl.store(out + to_GPE, (acc_GPE / safe_P[None, :, None]).to(out.dtype.element_ty))
