"""The two kernels of a mixture of few tokens: gate (if there is one), up and activation of the chosen experts; down, and the
weighted sum.

Nothing is sorted, and a chosen expert's weights are read once: all tokens are the columns of each product, and a mask says
which of them chose the expert.  Other tokens' rows are not read, and the tensor cores have nothing better to do.

- Gate and up: a program takes a tile of one expert's rows.  With one token the number of its expert is in topk_ids; otherwise
  each program finds the distinct experts, in their order, and takes its own.  The token's weight is multiplied in before the
  result is rounded, so that the second kernel only adds up.  It leaves a list for the second kernel: the chosen experts, and
  of each a mask of 64 bits, of its tokens.
- Down: a program takes a tile of rows of all chosen experts, or of a split of their columns, one after the other, in one loop
  whose pipeline does not end between two experts.  With one token a split is an expert, or an equal part of its columns.
  Splits are added up by the program that arrives last, in their order, or by the norm that follows (Partials).

Shared experts that are stored like the others stand in front of the chosen ones, as experts that every token has chosen
(R of them).  Their matrices are parts of one: the first one's rows lie below each other, the second one's columns side by side.
The output of other shared experts is a term of the sum.

An id below 0 or beyond the last expert names an expert that is not here, and counts for nothing.

Order of chained launches (specdec/ops/launch.py): both kernels trigger after their wait.  Programs of shared experts know their
weights, and ask for them before their wait.  With one token the second kernel reads topk_ids, which the first one has waited
for, and asks for its first words before its wait.

Shapes: T tokens, M tokens padded, K in, N out, E experts, A experts of a token (top_k), R shared ones, D entries of the list:
those, and the distinct experts that may be chosen, J words of a row, G scales of a row, F = N of the first kernel, S splits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.formats.experts import scales_form
from specdec.ops.products.kernels.dense.stream_triton import complete, prefetch, result_of, rows_of_tile
from specdec.ops.products.kernels.experts.convert_triton import LARGE
from specdec.ops.products.kernels.experts.stacked_triton import activated
from specdec.ops.products.kernels.experts.step_triton import add_step, no_sums, product, scale_at, unenlarged

if TYPE_CHECKING:
    from specdec.ops.products.experts import Form, SharedExperts, SharedOutput, Stack
    from specdec.ops.products.tiles.experts import ExpertTiles

MOST = 64  # tokens: bits of a mask
LEAST = 3  # steps of a split of one token's expert; measured: of two, a layer with experts of 512 takes 29.0 us instead of 27.8


@triton.jit(do_not_specialize=["T"])
def few_gate_up_kernel(
    x,  # [T, K]
    qweight,  # words [E * 2 * N, J]; without gates [E * N, J], and so below
    scales,  # [E * 2 * N, G]; words of POWERS exponents, [.., S], if SCALES is "powers"
    zero_points,  # as scales
    bias,  # [E * 2 * N]
    shared,  # words [2 * R * N, J]
    gate,  # [T] float32: what weighs shared experts
    topk_weights,  # [T, A] float32
    topk_ids,  # [T, A] int64
    y,  # [D, T, N]: rows of tokens that did not choose an expert are not written
    chosen,  # [2, D] int64: the distinct experts in their order; of each a mask whose bit t says whether token t chose it, or 0
    T, stride_x,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, G: tl.constexpr, A: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr, PADDED_A: tl.constexpr, ONE_TOKEN: tl.constexpr, R: tl.constexpr, HAS_GATE: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    d, m = tl.program_id(1), tl.arange(0, BLOCK_M)
    GATED: tl.constexpr = ACTIVATION == "swiglu" or ACTIVATION == "geglu"
    OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    out_N, row_N = rows_of_tile(tl.program_id(0), N, BLOCK_N, GATED)
    row_N = tl.where(out_N < N, row_N, 0)  # a row that is not there reads row 0
    if R > 0:
        shared_N = shared + (row_N + row_N // N * (R * N - N) + d * N) * J
    if PDL:
        if R > 0:
            LINE: tl.constexpr = 1024 // qweight.dtype.element_ty.primitive_bitwidth  # words of 128 bytes
            ahead = tl.arange(0, PREFETCH // 128) * LINE
            prefetch(shared_N[:, None] + ahead[None, :], ((out_N < N) & (d < R))[:, None] & (ahead < J)[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, ok_M, weight_M = _of_entry(
        topk_ids, topk_weights, gate, d, T, A, EXPERTS, PADDED_EXPERTS, PADDED_A, ONE_TOKEN, R, HAS_GATE, BLOCK_M
    )
    works = (expert >= 0) & (expert < EXPERTS)
    if not ONE_TOKEN:
        if tl.program_id(0) == 0:
            tl.store(chosen + d, tl.where(works, expert, 0).to(tl.int64))
            tl.store(chosen + tl.num_programs(1) + d, tl.sum(ok_M.to(tl.int64) << m.to(tl.int64), 0))
    if works:
        at_N = expert.to(tl.int64) * (2 * N if GATED else N) + row_N
        qweight_N = qweight + at_N * J
        if R > 0:
            qweight_N = tl.where(d < R, shared_N, qweight_N)
        acc_NM = product(
            x + m * stride_x, ok_M, qweight_N, scales + at_N * G, zero_points + at_N * G, 0, K,
            KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, True, BLOCK_M, BLOCK_N, UNROLL, 1, SLICES, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            acc_NM += tl.load(bias + at_N).to(tl.float32)[:, None]
        out_FM = activated(acc_NM, ACTIVATION, ALPHA, LIMIT) * weight_M[None, :]
        if ASM and (KIND == "e2m1" or KIND == "e4m3"):  # the second kernel, whose values are of the same kind, need not
            out_FM *= LARGE
        out_F = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        at_FM = (d * T + m).to(tl.int64)[None, :] * N + out_F[:, None]
        tl.store(y + at_FM, out_FM.to(y.dtype.element_ty), mask=(out_F < N)[:, None] & ok_M[None, :])


@triton.jit
def _of_entry(
    topk_ids, topk_weights, gate, d, T, A: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    PADDED_A: tl.constexpr, ONE_TOKEN: tl.constexpr, R: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(the expert of entry d of the list, which tokens chose it, and with what weights).  Of shared ones the number is 0.

    Where an entry has no expert, the number is none's, and no token chose it.
    """
    m = tl.arange(0, BLOCK_M)
    if ONE_TOKEN:
        expert = tl.load(topk_ids + d - R, mask=d >= R, other=0).to(tl.int32)
        ok_M = (m == 0) & (expert >= 0) & (expert < EXPERTS)
        weight_M = tl.where(ok_M, tl.load(topk_weights + d - R, mask=d >= R, other=1.0), 0.0)
    else:
        a = tl.arange(0, PADDED_A)
        at_MA = m[:, None] * A + a[None, :]
        ok_MA = (m < T)[:, None] & (a < A)[None, :] & (d >= R)
        id_MA = tl.load(topk_ids + at_MA, mask=ok_MA, other=-1).to(tl.int32)
        expert = _distinct(id_MA, d - R, EXPERTS, PADDED_EXPERTS)
        is_chosen_MA = (id_MA == expert) & (expert < EXPERTS)
        ok_M = tl.max(is_chosen_MA.to(tl.int32), 1) > 0
        weight_M = tl.sum(tl.where(is_chosen_MA, tl.load(topk_weights + at_MA, mask=ok_MA, other=0.0), 0.0), 1)
        if R > 0:
            expert = tl.where(d < R, 0, expert)
            ok_M = tl.where(d < R, m < T, ok_M)
            weight_M = tl.where(d < R, 1.0, weight_M)
    if R > 0 and HAS_GATE:
        weight_M *= tl.load(gate + m, mask=(m < T) & (d < R), other=1.0)
    return expert, ok_M, weight_M


@triton.jit
def _distinct(id_MA, d, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr):
    """Number d of the experts that anybody chose, in their order; EXPERTS or more if there are fewer."""
    SIZE: tl.constexpr = id_MA.shape[0] * id_MA.shape[1]
    id_P = tl.reshape(id_MA, [SIZE])
    counts_E = tl.histogram(id_P, PADDED_EXPERTS, mask=(id_P >= 0) & (id_P < EXPERTS))
    expert = tl.sum((tl.cumsum((counts_E > 0).to(tl.int32), 0) <= d).to(tl.int32), 0)
    return expert


@triton.jit(do_not_specialize=["T"])
def few_down_kernel(
    x,  # [D, T, K]
    qweight,  # words [E * N, J]
    scales,  # [E * N, G], as above
    zero_points,  # as scales
    bias,  # [E * N]
    topk_weights,  # [T, A] float32
    topk_ids,  # [T, A] int64
    chosen,  # [2, D] int64
    shared,  # words [N, R * J]
    output,  # [T, N]: of other shared experts, a term of the sum
    gate,  # [T] float32: what weighs `output`
    y,  # [T, N], or [S, T, N] float32 if PARTIALS
    partials,  # [tiles, S, BLOCK_N, BLOCK_M] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, G: tl.constexpr, A: tl.constexpr, EXPERTS: tl.constexpr,
    D: tl.constexpr, PADDED_D: tl.constexpr, ONE_TOKEN: tl.constexpr, R: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_OUTPUT: tl.constexpr, HAS_GATE: tl.constexpr, ASM: tl.constexpr, PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, UNROLL: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    out_N, row_N = rows_of_tile(tl.program_id(0), N, BLOCK_N, False)
    row_N = tl.where(out_N < N, row_N, 0)
    split, m = tl.program_id(1), tl.arange(0, BLOCK_M)
    if ONE_TOKEN:
        entry, part = split // PARTS, split % PARTS
        expert = tl.load(topk_ids + entry - R, mask=entry >= R, other=0, cache_modifier=".cg")
        is_here = (expert >= 0) & (expert < EXPERTS)
        at_N = tl.where(is_here, expert, 0) * N + row_N
        qweight_N = _words_of(qweight, shared, entry, at_N, row_N, J, R)
        if PDL:
            if PREFETCH > 0:
                LINE: tl.constexpr = 1024 // qweight.dtype.element_ty.primitive_bitwidth  # words of 128 bytes
                ahead = part * (J // PARTS) + tl.arange(0, PREFETCH // 128) * LINE
                prefetch(qweight_N[:, None] + ahead[None, :], (out_N < N)[:, None] & (ahead < J)[None, :])
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        acc_NM = product(
            x + (entry + m) * K, (m == 0) & is_here, qweight_N, scales + at_N * G, zero_points + at_N * G, part, K,
            KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, False, BLOCK_M, BLOCK_N, UNROLL, PARTS, SLICES, STAGES,
        )  # fmt: skip
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        i_D = tl.arange(0, PADDED_D)
        expert_D = tl.load(chosen + i_D, mask=i_D < D, other=0).to(tl.int32)
        mask_D = tl.load(chosen + D + i_D, mask=i_D < D, other=0)
        count = tl.sum((mask_D != 0).to(tl.int32), 0)
        if BLOCK_M <= 32:
            mask_D = mask_D.to(tl.int32)
        acc_NM = _down(
            x, qweight, scales, zero_points, shared, expert_D, mask_D, i_D, split, count, row_N, T, N, K, J, G, R, KIND,
            GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, BLOCK_M, BLOCK_N, SPLITS, UNROLL, SLICES, STAGES,
        )  # fmt: skip
    if (HAS_BIAS or HAS_OUTPUT) and split == 0:
        if HAS_BIAS:
            for a in tl.static_range(A):
                expert_M = tl.load(topk_ids + m * A + a, mask=m < T, other=-1)
                ok_M = (expert_M >= 0) & (expert_M < EXPERTS)
                weight_M = tl.load(topk_weights + m * A + a, mask=m < T, other=0.0)
                bias_NM = tl.load(bias + expert_M[None, :] * N + row_N[:, None], mask=ok_M[None, :], other=0.0)
                acc_NM += bias_NM.to(tl.float32) * weight_M[None, :]
        if HAS_OUTPUT:
            ok_NM = (out_N < N)[:, None] & (m < T)[None, :]
            output_NM = tl.load(output + m[None, :] * N + out_N[:, None], mask=ok_NM, other=0.0).to(tl.float32)
            acc_NM += output_NM * tl.load(gate + m, mask=m < T, other=0.0)[None, :] if HAS_GATE else output_NM
    if PARTIALS:
        at_NM = (split * T + m)[None, :] * N + out_N[:, None]
        tl.store(y + at_NM, acc_NM, mask=(out_N < N)[:, None] & (m < T)[None, :])
    else:
        complete(acc_NM, bias, y, partials, arrivals, tl.program_id(0), split, T, N, BLOCK_M, BLOCK_N, SPLITS, False, False)


@triton.jit
def _entry(list_D, i_D, i):
    """Entry i of a list.  Registers hold the list: a load would take a stage of the loop's pipeline."""
    return tl.sum(tl.where(i_D == i, list_D, 0), 0)


@triton.jit
def _words_of(qweight, shared, entry, at_N, row_N, J: tl.constexpr, R: tl.constexpr):
    """Where rows of an entry of the list begin, which are numbered at_N in the stack of experts."""
    words_N = qweight + at_N * J
    if R > 0:
        words_N = tl.where(entry < R, shared + (row_N.to(tl.int64) * R + entry) * J, words_N)
    return words_N


@triton.jit
def _down(
    x, qweight, scales, zero_points, shared, expert_D, mask_D, i_D, split, count, row_N, T,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, UNROLL: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """[N, M] float32: the sum over a split of the columns of all `count` experts of the list."""
    STEPS: tl.constexpr = (K + 127) // 128
    RUNS: tl.constexpr = (STEPS + SLICES * UNROLL - 1) // (SLICES * UNROLL)  # of UNROLL steps of each slice
    SCALED: tl.constexpr = "step" if SCALES == "row" else SCALES  # experts' rows have different scales
    m = tl.arange(0, BLOCK_M)
    if SLICES == 1:
        base = 0
    else:
        base = tl.arange(0, SLICES)[:, None] * (RUNS * UNROLL * 128)
        m, row_N = m[None, :], row_N[None, :]
    acc_NM = no_sums(BLOCK_N, BLOCK_M, SLICES)
    LAST: tl.constexpr = STEPS * 128 - 128  # beyond which a slice's steps find no scales
    low, high = split * (count * RUNS) // SPLITS, (split + 1) * (count * RUNS) // SPLITS
    first_N = _entry(expert_D, i_D, low // RUNS).to(tl.int64) * N + row_N
    next_N = scale_at(scales + first_N * G, tl.minimum(base + low % RUNS * (UNROLL * 128), LAST), K, GROUP_SIZE, SCALES)
    for run in tl.range(low, high, num_stages=STAGES):
        i, first = run // RUNS, base + run % RUNS * (UNROLL * 128)
        mask = _entry(mask_D, i_D, i)
        ok_M = (mask >> m.to(mask_D.dtype) & 1) > 0
        at_N = _entry(expert_D, i_D, i).to(tl.int64) * N + row_N
        qweight_N = _words_of(qweight, shared, i, at_N, row_N, J, R)
        x_M = x + (i * T + m).to(tl.int64) * K
        for n in tl.static_range(UNROLL):
            at, now_N = first + n * 128, next_N
            if n < UNROLL - 1:
                next_N = scale_at(scales + at_N * G, tl.minimum(at + 128, LAST), K, GROUP_SIZE, SCALES)
            elif SCALES != "none":
                after = tl.minimum(run + 1, high - 1)
                after_N = _entry(expert_D, i_D, after // RUNS).to(tl.int64) * N + row_N
                column = tl.minimum(base + after % RUNS * (UNROLL * 128), LAST)
                next_N = scale_at(scales + after_N * G, column, K, GROUP_SIZE, SCALES)
            acc_NM = add_step(
                acc_NM, x_M, ok_M, qweight_N, scales + at_N * G, zero_points + at_N * G, now_N, at, K,
                KIND, GROUP_SIZE, SCALED, HAS_ZERO_POINTS, ASM, False, STEPS % (SLICES * UNROLL) == 0, SLICES,
            )  # fmt: skip
    if SLICES > 1:
        acc_NM = tl.sum(acc_NM, 0)
    return unenlarged(acc_NM, KIND, ASM)


def launch_few_gate_up(
    x_TH: Tensor, stack: Stack, form: Form, topk_weights_TK: Tensor, topk_ids_TK: Tensor, tiles: ExpertTiles,
    shared: SharedExperts | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(activations times the tokens' weights [D, T, F]; the chosen experts and the masks of their tokens, [2, D] int64).

    Of the first, rows of chosen experts' own tokens alone are written; of the second, with one token, nothing.
    """
    from specdec.ops.products.experts import epilogue, inputs_of

    (T, A), arguments, values = topk_ids_TK.shape, *_arguments(stack, form.gate_up_bias, x_TH)
    parts, E, device = inputs_of(form.activation), values["EXPERTS"], x_TH.device
    N = values["N"] // parts
    R = shared.number if shared else 0
    D = R + (A if T == 1 else min(T * A, E))
    assert 0 < T <= min(MOST, tiles.block_m) and x_TH.stride(1) == 1 and x_TH.shape[1] == values["K"]
    assert topk_ids_TK.is_contiguous() and topk_weights_TK.is_contiguous() and topk_weights_TK.dtype == torch.float32
    assert shared is None or (shared.gate_up_GH.shape == (parts * R * N, values["K"]) and not values["HAS_BIAS"])
    y_DTF = torch.empty(D, T, N, dtype=x_TH.dtype, device=device)
    chosen_2D = torch.empty(2, D, dtype=torch.int64, device=device)
    few_gate_up_kernel[(triton.cdiv(N, tiles.block_n // parts), D)](
        x_TH, *arguments, shared.gate_up_GH if shared else arguments[0], _gate_of(shared, topk_weights_TK), topk_weights_TK,
        topk_ids_TK, y_DTF, chosen_2D, T, x_TH.stride(0), **values | {"N": N},
        A=A, PADDED_EXPERTS=triton.next_power_of_2(E), PADDED_A=triton.next_power_of_2(A), ONE_TOKEN=T == 1, R=R,
        HAS_GATE=shared is not None and shared.gate_T1 is not None, **epilogue(form.activation),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, UNROLL=tiles.unroll, SLICES=tiles.slices, STAGES=tiles.stages,
        PREFETCH=tiles.prefetch, num_warps=tiles.warps, num_stages=tiles.stages, **chained(device),
    )  # fmt: skip
    return y_DTF, chosen_2D


def launch_few_down(
    gated: tuple[Tensor, Tensor], stack: Stack, form: Form, topk_weights_TK: Tensor, topk_ids_TK: Tensor,
    tiles: ExpertTiles, shared: SharedExperts | SharedOutput | None, store_partials: bool,
) -> Tensor:  # fmt: skip
    """[T, N], or with store_partials and more splits than one [S, T, N] float32: the sum over experts.

    gated: what launch_few_gate_up gave, of the same shared experts.
    """
    from specdec.ops.products.experts import SharedExperts, SharedOutput

    (x_DTK, chosen_2D), (T, A) = gated, topk_ids_TK.shape
    arguments, values = _arguments(stack, form.down_bias, x_DTK)
    D, N, K, none = len(x_DTK), values["N"], values["K"], x_DTK
    R, words, output = 0, arguments[0], None
    if isinstance(shared, SharedExperts):
        R, words = shared.number, shared.down_HF
        assert words.shape == (N, R * K) and not values["HAS_BIAS"]
    elif isinstance(shared, SharedOutput):
        output = shared.out_TH
        assert output.is_contiguous() and output.shape == (T, N)
    assert x_DTK.shape[2] == K and x_DTK.is_contiguous()
    splits, parts = tiles.splits, 1
    if T == 1:
        parts = min(triton.cdiv(splits, D), max(1, K // (LEAST * 128 * tiles.slices * tiles.unroll)))
        splits = D * parts
    num_tiles, store_partials = triton.cdiv(N, tiles.block_n), store_partials and splits > 1
    y, partials, arrivals = result_of(x_DTK[0], N, splits, num_tiles, tiles.block_n, tiles.block_m, store_partials)
    few_down_kernel[(num_tiles, splits)](
        x_DTK, *arguments, topk_weights_TK, topk_ids_TK, chosen_2D, words, none if output is None else output,
        topk_weights_TK if output is None else _gate_of(shared, topk_weights_TK), y, partials, arrivals, T, **values, A=A, D=D,
        PADDED_D=triton.next_power_of_2(D), ONE_TOKEN=T == 1, R=R, HAS_OUTPUT=output is not None,
        HAS_GATE=output is not None and shared is not None and shared.gate_T1 is not None, PARTIALS=store_partials,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, SPLITS=splits, PARTS=parts, UNROLL=tiles.unroll, SLICES=tiles.slices,
        STAGES=tiles.stages, PREFETCH=tiles.prefetch, num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_DTK.device),
    )  # fmt: skip
    return y


def _gate_of(shared: SharedExperts | SharedOutput | None, none: Tensor) -> Tensor:
    """What weighs shared experts, as kernels take it; `none` where nothing does."""
    gate_T1 = None if shared is None else shared.gate_T1
    assert gate_T1 is None or (gate_T1.is_contiguous() and gate_T1.dtype == torch.float32)
    return none if gate_T1 is None else gate_T1


def _arguments(stack: Stack, bias_EN: Tensor | None, x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """(words, scales, zero points and bias, as kernels take them; their constexprs)."""
    if isinstance(stack, Tensor):
        E, N, K = stack.shape
        assert stack.is_contiguous() and stack.dtype == x.dtype
        words = scales = zero_points = stack
        values: dict[str, Any] = {"J": K, "G": 0, "KIND": "dense", "GROUP_SIZE": 0, "SCALES": "none", "HAS_ZERO_POINTS": False}
    else:
        E, N, K = stack.experts, stack.rows, stack.columns
        words, scales = stack.qweight_RJ.view(torch.int16), stack.scales_RG
        scales = scales.view(torch.int32) if stack.has_powers else scales
        zero_points = scales if stack.zero_points_RG is None else stack.zero_points_RG
        values = {"J": words.shape[1], "G": scales.shape[1], "KIND": stack.kind, "GROUP_SIZE": stack.group_size}
        values |= {"SCALES": scales_form(stack.kind, stack.group_size), "HAS_ZERO_POINTS": stack.zero_points_RG is not None}
    assert bias_EN is None or (bias_EN.shape == (E, N) and bias_EN.is_contiguous())
    values |= {"N": N, "K": K, "EXPERTS": E, "HAS_BIAS": bias_EN is not None, "ASM": x.is_cuda and x.dtype == torch.bfloat16}
    return (words, scales, zero_points, x if bias_EN is None else bias_EN), values
