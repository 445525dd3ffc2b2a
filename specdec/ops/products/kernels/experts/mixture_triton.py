"""The kernel of a mixture of experts over weights in 8 or 4 bits: each pair's product with its expert's matrix.

A tile of quantised values is converted in registers to x's dtype, in which each is exact (convert_triton.py), and multiplied;
scales multiply float32 sums over their columns.  So nothing is rounded before the end, and a dequantised matrix is never
written to memory.

A program takes a tile of one expert's rows and some of this expert's pairs.  There are two ways to find them:
- Of few pairs, each program reads all topk_ids.  There is a program for each pair, which works if its pair is the first of the
  expert's pairs (or number BLOCK_M, 2 * BLOCK_M, ...); so an expert's weights are read once for BLOCK_M pairs.  With one token
  (ONE_TOKEN) no two pairs have the same expert, and there is nothing to find.
- Of many (SORTED), topk_ids lists the indices of pairs sorted by expert instead, as vLLM's sorted_token_ids does, and `counts`
  says how many pairs each expert has.

Order of chained launches (specdec/ops/launch.py): the kernel triggers after its wait.  The second product of an MLP comes
directly after the first one; so when it starts, topk_ids are complete, and it reads them, from L2, and asks for its first
words before its wait.

Shapes: M tokens or pairs, K in, N out, E experts, P = tokens * top_k pairs, J words of a row, G scales of a row, S steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.formats.experts import scales_form
from specdec.ops.products.kernels.dense.stream_triton import prefetch, rows_of_tile
from specdec.ops.products.kernels.experts.convert_triton import LARGE
from specdec.ops.products.kernels.experts.stacked_triton import activated, rows_of_expert
from specdec.ops.products.kernels.experts.step_triton import product
from specdec.ops.products.tiles.experts import MAX_READ

if TYPE_CHECKING:
    from specdec.ops.products.experts import Activation
    from specdec.ops.products.formats.experts import QuantisedStack
    from specdec.ops.products.tiles.experts import ExpertTiles

READ = 16, 128, MAX_READ  # pairs that programs read, padded: few sizes, for each of which the kernel is compiled
PREFETCH = 512  # bytes of each row that are prefetched into L2 before the wait


@triton.jit(do_not_specialize=["pairs"])
def quantised_experts_kernel(
    x,  # [M, K] of an MLP's first product, which an ACTIVATION follows, else [P, K]
    qweight,  # words [E * N, J], or [E * 2 * N, J] with gates
    scales,  # as qweight, [.., G]; words of POWERS exponents, [.., S], if SCALES is "powers"
    zero_points,  # as scales
    bias,  # as qweight, without columns
    topk_ids,  # [P] int64: each pair's expert, or EXPERTS: it is skipped; if SORTED the indices of pairs, sorted by expert
    counts,  # [E] int32, if SORTED
    y,  # [P, N]
    pairs, stride_x,
    N: tl.constexpr, K: tl.constexpr, J: tl.constexpr, G: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr, PADDED_PAIRS: tl.constexpr, SORTED: tl.constexpr, ONE_TOKEN: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    FIRST: tl.constexpr = ACTIVATION != "none"
    GATED: tl.constexpr = ACTIVATION == "swiglu" or ACTIVATION == "geglu"
    ROWS: tl.constexpr = 2 * N if GATED else N
    out_N, row_N = rows_of_tile(tl.program_id(0), N, BLOCK_N, GATED)
    row_N = tl.where(out_N < N, row_N, 0)  # a row that is not there reads row 0, and is not stored
    READS_EARLY: tl.constexpr = PDL and not FIRST and not SORTED
    if PDL and not READS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SORTED:
        expert, first, end = rows_of_expert(counts, tl.program_id(1), EXPERTS, PADDED_EXPERTS, BLOCK_M)
        works = expert < EXPERTS
        p_M = first + tl.arange(0, BLOCK_M)
        ok_M = p_M < end
        pair_M = tl.load(topk_ids + p_M, mask=ok_M, other=0).to(tl.int32)
    elif ONE_TOKEN:
        expert = tl.load(topk_ids + tl.program_id(1), cache_modifier=".cg").to(tl.int32)
        works = expert < EXPERTS  # EXPERTS stands for a pair that is skipped
        ok_M = tl.arange(0, BLOCK_M) == 0
        pair_M = tl.where(ok_M, tl.program_id(1), 0)
    else:
        expert, works, pair_M, ok_M = _pairs_of_program(topk_ids, pairs, EXPERTS, PADDED_PAIRS, BLOCK_M)
    row_N = tl.where(works, expert, 0).to(tl.int64) * ROWS + row_N
    qweight_N = qweight + row_N * J
    if READS_EARLY:
        ahead = tl.arange(0, PREFETCH // 128) * 64
        prefetch(qweight_N[:, None] + ahead[None, :], ((row_N >= 0) & works)[:, None] & (ahead < J)[None, :])
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if works:
        x_M = x + (pair_M // TOP_K if FIRST else pair_M).to(tl.int64) * stride_x
        acc_NM = product(
            x_M, ok_M, qweight_N, scales + row_N * G, zero_points + row_N * G, 0, K,
            KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, FIRST, BLOCK_M, BLOCK_N, UNROLL, 1, SLICES, STAGES,
        )  # fmt: skip
        if HAS_BIAS:
            acc_NM += tl.load(bias + row_N).to(tl.float32)[:, None]
        y_M = y + pair_M.to(tl.int64) * N
        if FIRST:
            OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
            out_FM = activated(acc_NM, ACTIVATION, ALPHA, LIMIT)
            if ASM and (KIND == "e2m1" or KIND == "e4m3"):  # the product that reads it, of values of the same kind, need not
                out_FM *= LARGE
            out_F = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
            tl.store(y_M[None, :] + out_F[:, None], out_FM.to(y.dtype.element_ty), mask=(out_F < N)[:, None] & ok_M[None, :])
        else:
            tl.store(y_M[None, :] + out_N[:, None], acc_NM.to(y.dtype.element_ty), mask=(out_N < N)[:, None] & ok_M[None, :])


@triton.jit
def _pairs_of_program(topk_ids, pairs, EXPERTS: tl.constexpr, PADDED_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(the expert, whether the program works, indices of its pairs, which of these exist), of a program for each pair."""
    pair = tl.program_id(1)
    p = tl.arange(0, PADDED_PAIRS)
    m = tl.arange(0, BLOCK_M)
    expert_P = tl.load(topk_ids + p, mask=p < pairs, other=-1, cache_modifier=".cg").to(tl.int32)
    expert = tl.sum(tl.where(p == pair, expert_P, 0), 0)
    same_P = (expert_P == expert).to(tl.int32)
    before = tl.sum(tl.where(p < pair, same_P, 0), 0)
    place_P = tl.where(same_P == 1, tl.cumsum(same_P, 0) - 1 - before, -1)  # among the pairs of this expert from this one on
    is_MP = place_P[None, :] == m[:, None]
    pair_M = tl.sum(tl.where(is_MP, p[None, :], 0), 1)
    works = (before % BLOCK_M == 0) & (expert < EXPERTS)
    return expert, works, pair_M, tl.sum(is_MP.to(tl.int32), 1) > 0


def launch_quantised_experts(
    x: Tensor,
    weight: QuantisedStack,
    bias_EN: Tensor | None,
    topk_ids_P: Tensor,
    counts_E: Tensor | None,
    top_k: int,
    activation: Activation | None,
    tiles: ExpertTiles,
) -> Tensor:
    """[P, N]: each pair's product with its expert's matrix, in the order of the pairs.

    topk_ids_P: the pairs' experts; with counts_E, the indices of pairs sorted by expert.
    activation: of the first product of an MLP, from x [M, K]; None: of the second one, from x [P, K].
    """
    from specdec.ops.products.experts import epilogue, inputs_of

    P, rows, K, parts = topk_ids_P.shape[0], weight.rows, weight.columns, inputs_of(activation)
    N = rows // parts
    assert x.stride(1) == 1 and x.shape[1] == K and topk_ids_P.is_contiguous() and P
    assert counts_E is not None or P <= MAX_READ
    assert bias_EN is None or (bias_EN.shape == (weight.experts, rows) and bias_EN.is_contiguous())
    y_PN = x.new_empty(P, N)
    scales = weight.scales_RG.view(torch.int32) if weight.has_powers else weight.scales_RG
    programs = P if counts_E is None else min(P, weight.experts) + P // tiles.block_m  # the most tiles of rows there can be
    quantised_experts_kernel[(triton.cdiv(N, tiles.block_n // parts), programs)](
        x, weight.qweight_RJ.view(torch.int16), scales, scales if weight.zero_points_RG is None else weight.zero_points_RG,
        x if bias_EN is None else bias_EN, topk_ids_P, topk_ids_P if counts_E is None else counts_E, y_PN,
        P, x.stride(0), N=N, K=K, J=weight.qweight_RJ.shape[1] // 2, G=scales.shape[1], TOP_K=top_k,
        EXPERTS=weight.experts, PADDED_EXPERTS=triton.next_power_of_2(weight.experts),
        PADDED_PAIRS=next((size for size in READ if counts_E is None and P <= size), READ[0]),
        SORTED=counts_E is not None, ONE_TOKEN=counts_E is None and P == top_k,
        KIND=weight.kind, GROUP_SIZE=weight.group_size, SCALES=scales_form(weight.kind, weight.group_size),
        HAS_ZERO_POINTS=weight.zero_points_RG is not None, HAS_BIAS=bias_EN is not None, **epilogue(activation),
        ASM=x.dtype == torch.bfloat16 and x.is_cuda,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, UNROLL=tiles.unroll, SLICES=tiles.slices, STAGES=tiles.stages,
        PREFETCH=PREFETCH, num_warps=tiles.warps, num_stages=tiles.stages, **chained(x.device),
    )  # fmt: skip
    return y_PN
