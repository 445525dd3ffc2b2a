"""The kernel of a mixture of experts over weights in 8 or 4 bits: each pair's product with its expert's matrix.

A tile of codes is converted in registers to x's dtype, in which every code is exact (convert_triton.py), and multiplied; scales
multiply float32 sums over their columns.  So nothing is rounded before the end, and the numbers of a matrix are never written
to memory.

A program takes a tile of one expert's rows and some of the pairs that chose this expert.  There are two ways to find them:
- of few pairs, each program reads all choices.  It belongs to a pair, and works if the pair is the first of its expert's (or
  number BLOCK_T, 2 * BLOCK_T, ...); so an expert's weights are read once for BLOCK_T pairs.  ALONE: of a single token's pairs,
  no two of which have the same expert, there is nothing to find.
- of many, `order` lists the pairs sorted by expert, and `counts` says how many each expert has (ops/products/stacked.py).

Order of chained launches (specdec/ops/launch.py): the kernel triggers after its wait.  The second product of an MLP comes
directly after the first one; so when it starts, the choices are complete, and it reads them, from L2, and asks for its first
codes before its wait.

Shapes: T tokens, E experts, K experts of a token, P = T * K pairs, I in, O out, J words of a row, G scales of a row, S steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.formats.experts import scales_form
from specdec.ops.products.kernels.dense.stream_triton import prefetch
from specdec.ops.products.kernels.experts.convert_triton import LARGE, convert_4, convert_8, enlarged
from specdec.ops.products.kernels.experts.stacked_triton import rows_of_expert
from specdec.ops.products.tiles.experts import MAX_READ

if TYPE_CHECKING:
    from specdec.ops.products.experts import SwiGlu
    from specdec.ops.products.formats.experts import QuantisedStack
    from specdec.ops.products.tiles.experts import ExpertTiles

READ = 16, 128, MAX_READ  # pairs that programs read, padded: few sizes, for each of which the kernel is compiled
AHEAD = 512  # bytes of each row that are asked of L2 before the wait


@triton.jit(do_not_specialize=["pairs"])
def quantised_experts_kernel(
    x,  # [T, I] if GATED, else [P, I]
    codes,  # words [E * O, J], or [E * 2 * O, J] if GATED
    scales,  # as codes, [.., G]; words of POWERS exponents, [.., S], if SCALES is "powers"
    zeros,  # as scales
    bias,  # as codes, without columns
    chosen,  # [P] int64: each pair's expert; if SORTED the numbers of pairs, sorted by expert
    counts,  # [E] int32, if SORTED
    y,  # [P, O]
    pairs, stride_x,
    O: tl.constexpr, I: tl.constexpr, J: tl.constexpr, G: tl.constexpr, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr, PADDED_PAIRS: tl.constexpr, SORTED: tl.constexpr, ALONE: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, BLOCK_O)
    HALF: tl.constexpr = BLOCK_O // 2
    ROWS: tl.constexpr = 2 * O if GATED else O
    if GATED:  # the tile's first half holds gate rows, its second half the up rows that belong to them
        out_O = tl.program_id(0) * HALF + r % HALF
        row_O = tl.where(out_O < O, out_O + r // HALF * O, 0)  # a row that is not there reads row 0, and is not stored
    else:
        out_O = tl.program_id(0) * BLOCK_O + r
        row_O = tl.where(out_O < O, out_O, 0)
    READS_EARLY: tl.constexpr = PDL and not GATED and not SORTED
    if PDL and not READS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SORTED:
        expert, first, end = rows_of_expert(counts, tl.program_id(1), EXPERTS, PADDED_EXPERTS, BLOCK_T)
        works = expert < EXPERTS
        p_T = first + tl.arange(0, BLOCK_T)
        ok_T = p_T < end
        pair_T = tl.load(chosen + p_T, mask=ok_T, other=0).to(tl.int32)
    elif ALONE:
        expert = tl.load(chosen + tl.program_id(1), cache_modifier=".cg").to(tl.int32)
        works = expert >= 0
        ok_T = tl.arange(0, BLOCK_T) == 0
        pair_T = tl.where(ok_T, tl.program_id(1), 0)
    else:
        expert, works, pair_T, ok_T = _pairs_of_program(chosen, pairs, PADDED_PAIRS, BLOCK_T)
    row_O = tl.where(works, expert, 0).to(tl.int64) * ROWS + row_O
    codes_O = codes + row_O * J
    if READS_EARLY:
        ahead = tl.arange(0, AHEAD // 128) * 64
        prefetch(codes_O[:, None] + ahead[None, :], ((r >= 0) & works)[:, None] & (ahead < J)[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if works:
        x_T = x + (pair_T // CHOSEN if GATED else pair_T).to(tl.int64) * stride_x
        acc_OT = _product(
            x_T, ok_T, codes_O, scales + row_O * G, zeros + row_O * G, I,
            KIND, GROUP, SCALES, HAS_ZEROS, ASM, GATED, BLOCK_T, BLOCK_O, UNROLL, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            acc_OT += tl.load(bias + row_O).to(tl.float32)[:, None]
        y_T = y + pair_T.to(tl.int64) * O
        if GATED:
            gate_FT, up_FT = tl.split(tl.permute(tl.reshape(acc_OT, [2, HALF, BLOCK_T]), [1, 2, 0]))
            if LIMIT > 0:
                gate_FT = tl.minimum(gate_FT, LIMIT)
                up_FT = tl.minimum(tl.maximum(up_FT, -LIMIT), LIMIT) + 1
            out_FT = gate_FT / (1 + tl.exp(-ALPHA * gate_FT)) * up_FT
            if ASM and (KIND == "e2m1" or KIND == "e4m3"):  # the product that reads it, whose codes are alike, need not
                out_FT *= LARGE
            out_F = tl.program_id(0) * HALF + tl.arange(0, HALF)
            tl.store(y_T[None, :] + out_F[:, None], out_FT.to(y.dtype.element_ty), mask=(out_F < O)[:, None] & ok_T[None, :])
        else:
            tl.store(y_T[None, :] + out_O[:, None], acc_OT.to(y.dtype.element_ty), mask=(out_O < O)[:, None] & ok_T[None, :])


@triton.jit
def _pairs_of_program(chosen, pairs, PADDED_PAIRS: tl.constexpr, BLOCK_T: tl.constexpr):
    """(the expert, whether the program works, numbers of its pairs, which of these there are), of a program for each pair."""
    pair = tl.program_id(1)
    p = tl.arange(0, PADDED_PAIRS)
    t = tl.arange(0, BLOCK_T)
    expert_P = tl.load(chosen + p, mask=p < pairs, other=-1, cache_modifier=".cg").to(tl.int32)
    expert = tl.sum(tl.where(p == pair, expert_P, 0), 0)
    same_P = (expert_P == expert).to(tl.int32)
    before = tl.sum(tl.where(p < pair, same_P, 0), 0)
    place_P = tl.where(same_P == 1, tl.cumsum(same_P, 0) - 1 - before, -1)  # among the pairs of this expert from this one on
    is_TP = place_P[None, :] == t[:, None]
    pair_T = tl.sum(tl.where(is_TP, p[None, :], 0), 1)
    return expert, before % BLOCK_T == 0, pair_T, tl.sum(is_TP.to(tl.int32), 1) > 0


@triton.jit
def _product(
    x_T, ok_T, codes_O, scales_O, zeros_O, I: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr,
    ENLARGES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[O, T] float32: rows of a matrix times rows of x.

    ENLARGES: whether x is still to be multiplied by LARGE, where it must be; else it was.
    SCALES: as `scales_form` names them.  They are read a step ahead, because the loop's pipeline holds only what is multiplied.
    """
    FOUR: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    SMALL: tl.constexpr = ASM and (KIND == "e2m1" or KIND == "e4m3")
    WORDS: tl.constexpr = 32 if FOUR else 64
    STEPS: tl.constexpr = (I + 127) // 128
    EVEN_I: tl.constexpr = I % 128 == 0 and STEPS % UNROLL == 0
    j = tl.arange(0, WORDS)
    i = j if FOUR else j // 32 * 64 + j % 32
    acc_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    next_O = _scale(scales_O, 0, I, GROUP, SCALES)
    for first in tl.range(0, STEPS, UNROLL, num_stages=STAGES):
        for n in tl.static_range(UNROLL):
            step = first + n
            now_O = next_O
            next_O = _scale(scales_O, tl.minimum(step + 1, STEPS - 1) * 128, I, GROUP, SCALES)
            at_J = step * WORDS + j
            if STEPS % UNROLL == 0:
                c_OJ = tl.load(codes_O[:, None] + at_J[None, :])
            else:
                c_OJ = tl.load(codes_O[:, None] + at_J[None, :], mask=(at_J < STEPS * WORDS)[None, :], other=0)
            acc_OT = _add_step(
                acc_OT, c_OJ, x_T, step * 128, i, ok_T, now_O, scales_O, zeros_O, I,
                KIND, GROUP, SCALES, HAS_ZEROS, ASM, SMALL and ENLARGES, FOUR, EVEN_I,
            )  # fmt: skip
    if SCALES == "row":
        acc_OT *= next_O.to(tl.float32)[:, None]
    if SMALL:  # what LARGE, and the place of the codes' bits, have multiplied it by
        acc_OT *= 4.611686018427388e18 if KIND == "e2m1" else 7.205759403792794e16  # 2^(126 - 64), 2^(120 - 64)
    return acc_OT


@triton.jit
def _add_step(
    acc_OT, c_OJ, x_T, at, i, ok_T, now_O, scales_O, zeros_O, I: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr,
    ENLARGES: tl.constexpr, FOUR: tl.constexpr, EVEN_I: tl.constexpr,
):  # fmt: skip
    """acc_OT plus the products of a step's columns.  c_OJ: their words.  now_O: their scale, or scales."""
    DTYPE: tl.constexpr = x_T.dtype.element_ty
    a_TJ = _columns(x_T, at + i, ok_T, I, EVEN_I, ENLARGES)
    b_TJ = _columns(x_T, at + i + 32, ok_T, I, EVEN_I, ENLARGES)
    if FOUR:
        c_TJ = _columns(x_T, at + i + 64, ok_T, I, EVEN_I, ENLARGES)
        d_TJ = _columns(x_T, at + i + 96, ok_T, I, EVEN_I, ENLARGES)
        a_OJ, b_OJ, c_OJ, d_OJ = convert_4(c_OJ, KIND, ASM, DTYPE)
    else:
        a_OJ, b_OJ = convert_8(c_OJ, KIND, ASM, DTYPE)
    if HAS_ZEROS:
        a_OJ -= _zero(zeros_O, at, I, GROUP).to(DTYPE)[:, None]
        b_OJ -= _zero(zeros_O, at + 32, I, GROUP).to(DTYPE)[:, None]
        if FOUR:
            c_OJ -= _zero(zeros_O, at + 64, I, GROUP).to(DTYPE)[:, None]
            d_OJ -= _zero(zeros_O, at + 96, I, GROUP).to(DTYPE)[:, None]
    if SCALES == "row":
        acc_OT = tl.dot(a_OJ, tl.trans(a_TJ), acc_OT, input_precision="ieee")
        acc_OT = tl.dot(b_OJ, tl.trans(b_TJ), acc_OT, input_precision="ieee")
        if FOUR:
            acc_OT = tl.dot(c_OJ, tl.trans(c_TJ), acc_OT, input_precision="ieee")
            acc_OT = tl.dot(d_OJ, tl.trans(d_TJ), acc_OT, input_precision="ieee")
    elif SCALES == "step":
        part_OT = tl.dot(a_OJ, tl.trans(a_TJ), input_precision="ieee")
        part_OT = tl.dot(b_OJ, tl.trans(b_TJ), part_OT, input_precision="ieee")
        if FOUR:
            part_OT = tl.dot(c_OJ, tl.trans(c_TJ), part_OT, input_precision="ieee")
            part_OT = tl.dot(d_OJ, tl.trans(d_TJ), part_OT, input_precision="ieee")
        acc_OT += part_OT * now_O.to(tl.float32)[:, None]
    elif SCALES == "powers":
        acc_OT += tl.dot(a_OJ, tl.trans(a_TJ), input_precision="ieee") * _power(now_O)[:, None]
        acc_OT += tl.dot(b_OJ, tl.trans(b_TJ), input_precision="ieee") * _power(now_O >> 8)[:, None]
        acc_OT += tl.dot(c_OJ, tl.trans(c_TJ), input_precision="ieee") * _power(now_O >> 16)[:, None]
        acc_OT += tl.dot(d_OJ, tl.trans(d_TJ), input_precision="ieee") * _power(now_O >> 24)[:, None]
    else:
        acc_OT += tl.dot(a_OJ, tl.trans(a_TJ), input_precision="ieee") * now_O.to(tl.float32)[:, None]
        b_O = _scale(scales_O, at + 32, I, GROUP, SCALES).to(tl.float32)
        acc_OT += tl.dot(b_OJ, tl.trans(b_TJ), input_precision="ieee") * b_O[:, None]
        c_O = _scale(scales_O, at + 64, I, GROUP, SCALES).to(tl.float32)
        acc_OT += tl.dot(c_OJ, tl.trans(c_TJ), input_precision="ieee") * c_O[:, None]
        d_O = _scale(scales_O, at + 96, I, GROUP, SCALES).to(tl.float32)
        acc_OT += tl.dot(d_OJ, tl.trans(d_TJ), input_precision="ieee") * d_O[:, None]
    return acc_OT


@triton.jit
def _columns(x_T, at_J, ok_T, I: tl.constexpr, EVEN_I: tl.constexpr, ENLARGES: tl.constexpr):
    """These columns of x, [T, J]; 0 beyond the last one."""
    ok_TJ = ok_T[:, None] if EVEN_I else ok_T[:, None] & (at_J < I)[None, :]
    x_TJ = tl.load(x_T[:, None] + at_J[None, :], mask=ok_TJ, other=0.0)
    return enlarged(x_TJ) if ENLARGES else x_TJ


@triton.jit
def _scale(scales_O, column, I: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr):
    """The scale of a column's group, or a step's word of exponents; of a column that is not there, any."""
    if SCALES == "powers":
        return tl.load(scales_O + column // 128)
    if SCALES == "row":
        return tl.load(scales_O)
    return tl.load(scales_O + tl.minimum(column, I - 1) // GROUP)


@triton.jit
def _zero(zeros_O, column, I: tl.constexpr, GROUP: tl.constexpr):
    return tl.load(zeros_O + (tl.minimum(column, I - 1) // GROUP if GROUP > 0 else 0)).to(tl.float32)


@triton.jit
def _power(word_O):
    """2^(e - 127) of the exponent in the lowest 8 bits; 0 in place of 2^-127, which float32 has no normal number for."""
    return ((word_O & 0xFF) << 23).to(tl.float32, bitcast=True)


def launch_quantised_experts(
    x: Tensor,
    weight: QuantisedStack,
    bias_EO: Tensor | None,
    chosen_P: Tensor,
    counts_E: Tensor | None,
    chosen: int,
    gate: SwiGlu | None,
    tiles: ExpertTiles,
) -> Tensor:
    """[P, O]: each pair's product with its expert's matrix, in the order of the pairs' numbers.

    chosen_P: the pairs' experts; with counts_E, the numbers of pairs sorted by expert.  chosen: K.
    gate: of the first product of an MLP, from x [T, I]; None: of the second one, from x [P, I].
    """
    P, rows, I = chosen_P.shape[0], weight.rows, weight.columns
    O = rows // 2 if gate else rows
    assert x.stride(1) == 1 and x.shape[1] == I and chosen_P.is_contiguous() and P
    assert counts_E is not None or P <= MAX_READ
    assert bias_EO is None or (bias_EO.shape == (weight.experts, rows) and bias_EO.is_contiguous())
    y_PO = x.new_empty(P, O)
    scales = weight.scales_RG.view(torch.int32) if weight.has_powers else weight.scales_RG
    programs = P if counts_E is None else min(P, weight.experts) + P // tiles.block_m  # the most tiles of rows there can be
    quantised_experts_kernel[(triton.cdiv(O, tiles.block_n // 2 if gate else tiles.block_n), programs)](
        x, weight.qweight_RJ.view(torch.int16), scales, scales if weight.zero_points_RG is None else weight.zero_points_RG,
        x if bias_EO is None else bias_EO, chosen_P, chosen_P if counts_E is None else counts_E, y_PO,
        P, x.stride(0), O=O, I=I, J=weight.qweight_RJ.shape[1] // 2, G=scales.shape[1], CHOSEN=chosen,
        EXPERTS=weight.experts, PADDED_EXPERTS=triton.next_power_of_2(weight.experts),
        PADDED_PAIRS=next((size for size in READ if counts_E is None and P <= size), READ[0]),
        SORTED=counts_E is not None, ALONE=counts_E is None and P == chosen,
        KIND=weight.kind, GROUP=weight.group, SCALES=scales_form(weight.kind, weight.group),
        HAS_ZEROS=weight.zero_points_RG is not None, HAS_BIAS=bias_EO is not None, GATED=gate is not None,
        ALPHA=gate.alpha if gate else 1.0, LIMIT=gate.limit if gate else 0.0, ASM=x.dtype == torch.bfloat16 and x.is_cuda,
        BLOCK_T=tiles.block_m, BLOCK_O=tiles.block_n, UNROLL=tiles.unroll, STAGES=tiles.stages, AHEAD=AHEAD,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x.device),
    )  # fmt: skip
    return y_PO
