"""The two kernels of a mixture of few tokens: gate, up and activation of the chosen experts; down, and the weighted sum.

Nothing is sorted, and a chosen expert's weights are read once: all tokens are the columns of each product, and a mask says
which of them chose the expert.  Other tokens' rows are not read, and the tensor cores have nothing better to do.

- Gate and up: a program takes a tile of one expert's rows.  With one token the number of its expert is in topk_ids; otherwise
  each program finds the distinct experts, in their order, and takes its own.  The token's weight is multiplied in before the
  result is rounded, so that the second kernel only adds up.  It leaves a list for the second kernel: the chosen experts, and
  of each a mask of 64 bits, of its tokens.
- Down: a program takes a tile of rows of all chosen experts (or of a split of them), one after the other, in one loop whose
  pipeline does not end between two experts.  Splits are added up by the program that arrives last, in their order, or by the
  norm that follows (Partials).  The shared experts' output, if there is one, is a term of the sum.

An id below 0 or beyond the last expert names an expert that is not here, and counts for nothing.

Order of chained launches (specdec/ops/launch.py): both kernels trigger after their wait.  With one token the second kernel
reads topk_ids, which the first one has waited for, and asks for its first words before its wait.

Shapes: T tokens, M tokens padded, K in, N out, E experts, A experts of a token (top_k), D distinct experts that may be chosen,
J words of a row, G scales of a row, F = N of the first kernel, S splits.
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
from specdec.ops.products.kernels.experts.stacked_triton import swiglu
from specdec.ops.products.kernels.experts.step_triton import add_step, no_sums, product, scale_at, unenlarged

if TYPE_CHECKING:
    from specdec.ops.products.experts import Form, SharedOutput, Stack
    from specdec.ops.products.tiles.experts import ExpertTiles

MOST = 64  # tokens: bits of a mask


@triton.jit(do_not_specialize=["T"])
def few_gate_up_kernel(
    x,  # [T, K]
    qweight,  # words [E * 2 * N, J]
    scales,  # [E * 2 * N, G]; words of POWERS exponents, [.., S], if SCALES is "powers"
    zero_points,  # as scales
    bias,  # [E * 2 * N]
    topk_weights,  # [T, A] float32
    topk_ids,  # [T, A] int64
    y,  # [D, T, N]: rows of tokens that did not choose an expert are not written
    chosen,  # [2, D] int64: the distinct experts in their order; of each a mask whose bit t says whether token t chose it, or 0
    T, stride_x,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, G: tl.constexpr, A: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr, PADDED_A: tl.constexpr, ONE_TOKEN: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    d = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    a = tl.arange(0, PADDED_A)
    if ONE_TOKEN:
        expert = tl.load(topk_ids + d).to(tl.int32)
        works = (expert >= 0) & (expert < EXPERTS)
        ok_M = (m == 0) & works
        weight_M = tl.where(ok_M, tl.load(topk_weights + d), 0.0)
    else:
        at_MA = m[:, None] * A + a[None, :]
        ok_MA = (m < T)[:, None] & (a < A)[None, :]
        id_MA = tl.load(topk_ids + at_MA, mask=ok_MA, other=-1).to(tl.int32)
        expert = _distinct(id_MA, d, EXPERTS, PADDED_EXPERTS)
        works = expert < EXPERTS
        is_chosen_MA = (id_MA == expert) & works
        ok_M = tl.max(is_chosen_MA.to(tl.int32), 1) > 0
        weight_M = tl.sum(tl.where(is_chosen_MA, tl.load(topk_weights + at_MA, mask=ok_MA, other=0.0), 0.0), 1)
        if tl.program_id(0) == 0:
            tl.store(chosen + d, tl.where(works, expert, 0).to(tl.int64))
            tl.store(chosen + tl.num_programs(1) + d, tl.sum(ok_M.to(tl.int64) << m.to(tl.int64), 0))
    if works:
        out_N, row_N = rows_of_tile(tl.program_id(0), N, BLOCK_N, True)
        row_N = expert.to(tl.int64) * (2 * N) + tl.where(out_N < N, row_N, 0)  # a row that is not there reads row 0
        acc_NM = product(
            x + m * stride_x, ok_M, qweight + row_N * J, scales + row_N * G, zero_points + row_N * G, K,
            KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, True, BLOCK_M, BLOCK_N, UNROLL, SLICES, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            acc_NM += tl.load(bias + row_N).to(tl.float32)[:, None]
        out_FM = swiglu(acc_NM, BLOCK_N // 2, ALPHA, LIMIT) * weight_M[None, :]
        if ASM and (KIND == "e2m1" or KIND == "e4m3"):  # the second kernel, whose values are of the same kind, need not
            out_FM *= LARGE
        out_F = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at_FM = (d * T + m).to(tl.int64)[None, :] * N + out_F[:, None]
        tl.store(y + at_FM, out_FM.to(y.dtype.element_ty), mask=(out_F < N)[:, None] & ok_M[None, :])


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
    shared,  # [T, N]: a term of the sum
    gate,  # [T] float32: what weighs `shared`
    y,  # [T, N], or [S, T, N] float32 if PARTIALS
    partials,  # [tiles, S, BLOCK_N, BLOCK_M] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, G: tl.constexpr, A: tl.constexpr, EXPERTS: tl.constexpr,
    D: tl.constexpr, PADDED_D: tl.constexpr, ONE_TOKEN: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, ASM: tl.constexpr, PARTIALS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, UNROLL: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    out_N, row_N = rows_of_tile(tl.program_id(0), N, BLOCK_N, False)
    row_N = tl.where(out_N < N, row_N, 0)
    split, m = tl.program_id(1), tl.arange(0, BLOCK_M)
    i_D = tl.arange(0, PADDED_D)
    if ONE_TOKEN:
        expert_D = tl.load(topk_ids + i_D, mask=i_D < D, other=-1, cache_modifier=".cg")
        here_D = (expert_D >= 0) & (expert_D < EXPERTS)
        mask_D, count = here_D.to(tl.int32), A
        expert_D = tl.where(here_D, expert_D, 0).to(tl.int32)
        if PDL:
            LINE: tl.constexpr = 1024 // qweight.dtype.element_ty.primitive_bitwidth  # words of 128 bytes
            ahead = tl.arange(0, PREFETCH // 128) * LINE
            for i in range(split * A // SPLITS, (split + 1) * A // SPLITS):
                at_N = _entry(expert_D, i_D, i).to(tl.int64) * N + row_N
                prefetch(qweight + (at_N * J)[:, None] + ahead[None, :], (out_N < N)[:, None] & (ahead < J)[None, :])
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert_D = tl.load(chosen + i_D, mask=i_D < D, other=0).to(tl.int32)
        mask_D = tl.load(chosen + D + i_D, mask=i_D < D, other=0)
        count = tl.sum((mask_D != 0).to(tl.int32), 0)
        if BLOCK_M <= 32:
            mask_D = mask_D.to(tl.int32)
    low, high = split * count // SPLITS, (split + 1) * count // SPLITS
    if ONE_TOKEN and SPLITS == A:  # a program has one expert, which it need not look up at each step
        at_N = _entry(expert_D, i_D, split).to(tl.int64) * N + row_N
        acc_NM = product(
            x + (split + m) * K, (m == 0) & (_entry(mask_D, i_D, split) > 0), qweight + at_N * J, scales + at_N * G,
            zero_points + at_N * G, K, KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, False, BLOCK_M, BLOCK_N, UNROLL, SLICES,
            STAGES,
        )  # fmt: skip
    else:
        acc_NM = _down(
            x, qweight, scales, zero_points, expert_D, mask_D, i_D, low, high, row_N, T, N, K, J, G, KIND, GROUP_SIZE, SCALES,
            HAS_ZERO_POINTS, ASM, BLOCK_M, BLOCK_N, UNROLL, SLICES, STAGES,
        )  # fmt: skip
    if (HAS_BIAS or HAS_SHARED) and split == 0:
        if HAS_BIAS:
            for a in tl.static_range(A):
                expert_M = tl.load(topk_ids + m * A + a, mask=m < T, other=-1)
                ok_M = (expert_M >= 0) & (expert_M < EXPERTS)
                weight_M = tl.load(topk_weights + m * A + a, mask=m < T, other=0.0)
                bias_NM = tl.load(bias + expert_M[None, :] * N + row_N[:, None], mask=ok_M[None, :], other=0.0)
                acc_NM += bias_NM.to(tl.float32) * weight_M[None, :]
        if HAS_SHARED:
            ok_NM = (out_N < N)[:, None] & (m < T)[None, :]
            shared_NM = tl.load(shared + m[None, :] * N + out_N[:, None], mask=ok_NM, other=0.0).to(tl.float32)
            acc_NM += shared_NM * tl.load(gate + m, mask=m < T, other=0.0)[None, :] if HAS_GATE else shared_NM
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
def _down(
    x, qweight, scales, zero_points, expert_D, mask_D, i_D, low, high, row_N, T,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, G: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[N, M] float32: the sum over the experts from entry `low` to before `high` of the list."""
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
    first_N = _entry(expert_D, i_D, low).to(tl.int64) * N + row_N
    next_N = scale_at(scales + first_N * G, tl.minimum(base, LAST), K, GROUP_SIZE, SCALES)
    for run in tl.range(low * RUNS, high * RUNS, num_stages=STAGES):
        i, first = run // RUNS, base + run % RUNS * (UNROLL * 128)
        mask = _entry(mask_D, i_D, i)
        ok_M = (mask >> m.to(mask_D.dtype) & 1) > 0
        at_N = _entry(expert_D, i_D, i).to(tl.int64) * N + row_N
        x_M = x + (i * T + m).to(tl.int64) * K
        for n in tl.static_range(UNROLL):
            at, now_N = first + n * 128, next_N
            if n < UNROLL - 1:
                next_N = scale_at(scales + at_N * G, tl.minimum(at + 128, LAST), K, GROUP_SIZE, SCALES)
            elif SCALES != "none":
                after = tl.minimum(run + 1, high * RUNS - 1)
                after_N = _entry(expert_D, i_D, after // RUNS).to(tl.int64) * N + row_N
                column = tl.minimum(base + after % RUNS * (UNROLL * 128), LAST)
                next_N = scale_at(scales + after_N * G, column, K, GROUP_SIZE, SCALES)
            acc_NM = add_step(
                acc_NM, x_M, ok_M, qweight + at_N * J, scales + at_N * G, zero_points + at_N * G, now_N, at, K,
                KIND, GROUP_SIZE, SCALED, HAS_ZERO_POINTS, ASM, False, STEPS % (SLICES * UNROLL) == 0, SLICES,
            )  # fmt: skip
    if SLICES > 1:
        acc_NM = tl.sum(acc_NM, 0)
    return unenlarged(acc_NM, KIND, ASM)


def launch_few_gate_up(
    x_TH: Tensor, stack: Stack, form: Form, topk_weights_TK: Tensor, topk_ids_TK: Tensor, tiles: ExpertTiles
) -> tuple[Tensor, Tensor]:
    """(activations times the tokens' weights [D, T, F]; the chosen experts and the masks of their tokens, [2, D] int64).

    Of the first, rows of chosen experts' own tokens alone are written; of the second, with one token, nothing.
    """
    (T, A), arguments, values = topk_ids_TK.shape, *_arguments(stack, form.gate_up_bias, x_TH)
    E, N, device = values["EXPERTS"], values["N"] // 2, x_TH.device
    D = A if T == 1 else min(T * A, E)
    assert 0 < T <= min(MOST, tiles.block_m) and x_TH.stride(1) == 1 and x_TH.shape[1] == values["K"]
    assert topk_ids_TK.is_contiguous() and topk_weights_TK.is_contiguous() and topk_weights_TK.dtype == torch.float32
    y_DTF = torch.empty(D, T, N, dtype=x_TH.dtype, device=device)
    chosen_2D = torch.empty(2, D, dtype=torch.int64, device=device)
    few_gate_up_kernel[(triton.cdiv(N, tiles.block_n // 2), D)](
        x_TH, *arguments, topk_weights_TK, topk_ids_TK, y_DTF, chosen_2D, T, x_TH.stride(0), **values | {"N": N},
        A=A, PADDED_EXPERTS=triton.next_power_of_2(E), PADDED_A=triton.next_power_of_2(A), ONE_TOKEN=T == 1,
        ALPHA=form.gate.alpha, LIMIT=form.gate.limit, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, UNROLL=tiles.unroll,
        SLICES=tiles.slices, STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages, **chained(device),
    )  # fmt: skip
    return y_DTF, chosen_2D


def launch_few_down(
    gated: tuple[Tensor, Tensor], stack: Stack, form: Form, topk_weights_TK: Tensor, topk_ids_TK: Tensor,
    tiles: ExpertTiles, shared: SharedOutput | None, store_partials: bool,
) -> Tensor:  # fmt: skip
    """[T, N], or with store_partials [S, T, N] float32: the sum over experts.  gated: what launch_few_gate_up gave."""
    (x_DTK, chosen_2D), (T, A) = gated, topk_ids_TK.shape
    arguments, values = _arguments(stack, form.down_bias, x_DTK)
    assert x_DTK.shape[2] == values["K"] and x_DTK.is_contiguous()
    assert shared is None or (shared.out_TH.is_contiguous() and shared.out_TH.shape == (T, values["N"]))
    num_tiles, none = triton.cdiv(values["N"], tiles.block_n), x_DTK
    y, partials, arrivals = result_of(
        x_DTK[0], values["N"], tiles.splits, num_tiles, tiles.block_n, tiles.block_m, store_partials
    )
    gate = None if shared is None else shared.gate_T1
    assert gate is None or (gate.is_contiguous() and gate.dtype == torch.float32 and gate.numel() == T)
    few_down_kernel[(num_tiles, tiles.splits)](
        x_DTK, *arguments, topk_weights_TK, topk_ids_TK, chosen_2D, none if shared is None else shared.out_TH,
        none if gate is None else gate, y, partials, arrivals, T, **values, A=A, D=x_DTK.shape[0],
        PADDED_D=triton.next_power_of_2(x_DTK.shape[0]), ONE_TOKEN=T == 1, HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None, PARTIALS=store_partials, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        SPLITS=tiles.splits, UNROLL=tiles.unroll, SLICES=tiles.slices, STAGES=tiles.stages, PREFETCH=tiles.prefetch,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_DTK.device),
    )  # fmt: skip
    return y


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
