"""Products with stacks of matrices whose sums have one order, whatever the rows: experts' MLPs, and heads' projections.

Each element of a result is a sum over columns, which a program adds up step by step from the first column to the last, with the
tensor cores' instruction of dense/stream_triton.py's kernel: at least 64 weight rows, 16 rows of x and 4 warps.  Sizes of tiles
don't matter then, so they may follow the number of rows.

Experts' rows come in no order: `order` lists pairs of a token and an expert, sorted by expert, and `counts` says how many each
expert has.  A program finds its expert and its rows from the counts, on the device.

Order of chained launches (specdec/ops/launch.py): all kernels read weights alone before their wait, and trigger after it.

Shapes: T tokens, E experts, K experts of a token, P = T * K pairs, I in, O out, B matrices of a stack.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import rows_of_tile
from specdec.ops.products.tiles.experts import StackedTiles


@triton.jit
def add_columns(
    x_T, weight_O, ok_T, ok_O, columns, stride_i,
    BLOCK_I: tl.constexpr, STAGES: tl.constexpr, EVEN_I: tl.constexpr, ALONG_I: tl.constexpr,
):  # fmt: skip
    """[O, T] float32: the products of weight rows and rows of x.

    ALONG_I: a weight's row is contiguous; otherwise neighbouring rows are, and a row's numbers lie stride_i apart.
    """
    acc_OT = tl.zeros([weight_O.shape[0], x_T.shape[0]], tl.float32)
    for first in tl.range(0, columns, BLOCK_I, num_stages=STAGES):
        i = first + tl.arange(0, BLOCK_I)
        ok_I = i < columns if not EVEN_I else i >= 0
        if ALONG_I:
            w_OI = tl.load(weight_O[:, None] + i[None, :], mask=ok_O[:, None] & ok_I[None, :], other=0.0)
        else:
            at_IO = weight_O[None, :] + (i * stride_i)[:, None]
            w_OI = tl.trans(tl.load(at_IO, mask=ok_I[:, None] & ok_O[None, :], other=0.0))
        x_TI = tl.load(x_T[:, None] + i[None, :], mask=ok_T[:, None] & ok_I[None, :], other=0.0)
        acc_OT = tl.dot(w_OI, tl.trans(x_TI), acc_OT, input_precision="ieee")
    return acc_OT


@triton.jit
def rows_of_expert(counts, tile, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """(a tile's expert, its first pair, the end of the expert's pairs).  Beyond the last tile the expert is EXPERTS or more."""
    e = tl.arange(0, PADDED_EXPERTS)
    count_E = tl.load(counts + e, mask=e < EXPERTS, other=0)
    tiles_E = (count_E + BLOCK_T - 1) // BLOCK_T
    is_before_E = tl.cumsum(tiles_E, 0) <= tile
    expert = tl.sum(is_before_E.to(tl.int32), 0)
    begin = tl.sum(tl.where(is_before_E, count_E, 0), 0)
    first = begin + (tile - tl.sum(tl.where(is_before_E, tiles_E, 0), 0)) * BLOCK_T
    return expert, first, begin + tl.sum(tl.where(e == expert, count_E, 0), 0)


@triton.jit(do_not_specialize=["tiles"])
def experts_linear_kernel(
    x,  # [T, I] if GATED, else [P, I]
    weight,  # [E, O, I], or [E, 2 * O, I] if GATED
    order,  # [P] int64: numbers of pairs, sorted by expert
    counts,  # [E] int32
    y,  # [P, O], in the order of `order` if GATED, else by the pairs' numbers
    tiles,  # of rows
    stride_x,
    O: tl.constexpr, I: tl.constexpr, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) % tiles
    expert, first, end = rows_of_expert(counts, tile, EXPERTS, PADDED_EXPERTS, BLOCK_T)
    if expert < EXPERTS:
        p = first + tl.arange(0, BLOCK_T)
        ok_T = p < end
        pair_T = tl.load(order + p, mask=ok_T, other=0)
        out_O, row_O = rows_of_tile(tl.program_id(0) // tiles, O, BLOCK_O, GATED)
        x_T = x + (pair_T // CHOSEN if GATED else p.to(tl.int64)) * stride_x
        ok_O = out_O < O
        weight_O = weight + expert.to(tl.int64) * ((2 * O if GATED else O) * I) + row_O.to(tl.int64) * I
        acc_OT = add_columns(x_T, weight_O, ok_T, ok_O, I, 1, BLOCK_I, STAGES, I % BLOCK_I == 0, True)
        if GATED:
            HALF: tl.constexpr = BLOCK_O // 2
            gate_FT, up_FT = tl.split(tl.permute(tl.reshape(acc_OT, [2, HALF, BLOCK_T]), [1, 2, 0]))
            out_FT = gate_FT / (1 + tl.exp(-gate_FT)) * up_FT
            out_F = tl.program_id(0) // tiles * HALF + tl.arange(0, HALF)
            at_FT = y + p.to(tl.int64)[None, :] * O + out_F[:, None]
            tl.store(at_FT, out_FT.to(y.dtype.element_ty), mask=(out_F < O)[:, None] & ok_T[None, :])
        else:
            at_OT = y + pair_T[None, :] * O + out_O[:, None]
            tl.store(at_OT, acc_OT.to(y.dtype.element_ty), mask=ok_O[:, None] & ok_T[None, :])


@triton.jit(do_not_specialize_on_alignment=["weights"])
def weighted_sum_kernel(
    x,  # [T, K, O]
    weights,  # [T, K] float32
    y,  # [T, O]
    O: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total_O = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(CHOSEN):
        x_O = tl.load(x + (token * CHOSEN + k) * O + o, mask=o < O, other=0.0).to(tl.float32)
        total_O = tl.fma(x_O, tl.zeros_like(x_O) + tl.load(weights + token * CHOSEN + k), total_O)
    tl.store(y + token * O + o, total_O.to(y.dtype.element_ty), mask=o < O)


@triton.jit(do_not_specialize=["T"])
def each_linear_kernel(
    x,  # [T, B, I]
    weight,  # [B, O, I]
    y,  # [T, B, O]
    T, stride_xt, stride_xb, stride_wb, stride_wo, stride_wi, stride_yt, stride_yb,
    O: tl.constexpr, I: tl.constexpr, ALONG_I: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    of_t = tl.cdiv(T, BLOCK_T)
    t = tl.program_id(0) % of_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(0) // of_t * BLOCK_O + tl.arange(0, BLOCK_O)
    b, token_T = tl.program_id(1).to(tl.int64), t.to(tl.int64)
    ok_T, ok_O = t < T, o < O
    x_T = x + token_T * stride_xt + b * stride_xb
    weight_O = weight + b * stride_wb + o * stride_wo
    acc_OT = add_columns(x_T, weight_O, ok_T, ok_O, I, stride_wi, BLOCK_I, STAGES, I % BLOCK_I == 0, ALONG_I)
    at_OT = y + (token_T * stride_yt)[None, :] + b * stride_yb + o[:, None]
    tl.store(at_OT, acc_OT.to(y.dtype.element_ty), mask=ok_O[:, None] & ok_T[None, :])


def launch_experts_linear(
    x: Tensor, weight_EOI: Tensor, order_P: Tensor, counts_E: Tensor, chosen: int, gated: bool, tiles: StackedTiles
) -> Tensor:
    """[P, O]: each pair's product with its expert's matrix, as stacked.py's function describes it."""
    (E, rows, I), P = weight_EOI.shape, order_P.shape[0]
    O = rows // 2 if gated else rows
    assert x.stride(1) == 1 and x.shape[1] == I and weight_EOI.is_contiguous() and x.dtype == weight_EOI.dtype
    y_PO = x.new_empty(P, O)
    outs = tiles.block_n // 2 if gated else tiles.block_n
    of_rows = min(P, E) + P // tiles.block_m  # the most tiles of rows that P pairs can have
    experts_linear_kernel[(of_rows * triton.cdiv(O, outs),)](
        x, weight_EOI, order_P, counts_E, y_PO, of_rows, x.stride(0), O=O, I=I, CHOSEN=chosen, EXPERTS=E,
        PADDED_EXPERTS=triton.next_power_of_2(E), BLOCK_T=tiles.block_m, BLOCK_O=tiles.block_n, BLOCK_I=tiles.block_k,
        STAGES=tiles.stages, GATED=gated, num_warps=tiles.warps, num_stages=tiles.stages, **chained(x.device),
    )  # fmt: skip
    return y_PO


def launch_weighted_sum(x_TKO: Tensor, topk_weights_TK: Tensor) -> Tensor:
    """[T, O]: the sum of a token's K rows times their weights, added up in float32 from the first to the last."""
    (T, K, O), block = x_TKO.shape, min(1024, triton.next_power_of_2(x_TKO.shape[2]))
    assert x_TKO.is_contiguous() and topk_weights_TK.is_contiguous() and topk_weights_TK.shape == (T, K)
    y_TO = x_TKO.new_empty(T, O)
    weighted_sum_kernel[(T, triton.cdiv(O, block))](
        x_TKO, topk_weights_TK, y_TO, O=O, CHOSEN=K, BLOCK=block, num_warps=4, **chained(y_TO.device)
    )
    return y_TO


def launch_each_linear(x_TBI: Tensor, weight_BOI: Tensor, out_TBO: Tensor, tiles: StackedTiles) -> None:
    """Row b of each token times matrix b, into out_TBO, whose rows may lie anywhere.  One of a matrix's dims is contiguous."""
    (T, B, I), O = x_TBI.shape, weight_BOI.shape[1]
    assert weight_BOI.shape == (B, O, I) and out_TBO.shape == (T, B, O) and x_TBI.stride(2) == out_TBO.stride(2) == 1
    assert 1 in weight_BOI.stride()[1:] and x_TBI.dtype == weight_BOI.dtype
    each_linear_kernel[(triton.cdiv(O, tiles.block_n) * triton.cdiv(T, tiles.block_m), B)](
        x_TBI, weight_BOI, out_TBO, T, *x_TBI.stride()[:2], *weight_BOI.stride(), *out_TBO.stride()[:2], O=O, I=I,
        ALONG_I=weight_BOI.stride(2) == 1, BLOCK_T=tiles.block_m, BLOCK_O=tiles.block_n, BLOCK_I=tiles.block_k,
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_TBI.device),
    )  # fmt: skip
