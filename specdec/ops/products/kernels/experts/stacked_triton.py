"""Products with stacks of matrices whose sums have one order, whatever the rows: experts' MLPs, and heads' projections.

Each element of a result is a sum over columns, which a program adds up step by step from the first column to the last, with the
tensor cores' instruction of dense/stream_triton.py's kernel: at least 64 weight rows, 16 rows of x and 4 warps.  Sizes of tiles
don't matter then, so they may follow the number of rows.

Experts' rows come in no order: `order` lists pairs of a token and an expert, sorted by expert, and `counts` says how many each
expert has.  A program finds its expert and its rows from the counts, on the device.

Order of chained launches (specdec/ops/launch.py): all kernels ask for weights alone before their wait, and trigger after it.

Shapes: M tokens, E experts, A experts of a token (top_k), P = M * A pairs, K in, N out, B matrices of a stack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import prefetch, relu2, rows_of_tile
from specdec.ops.products.tiles.experts import StackedTiles

if TYPE_CHECKING:
    from specdec.ops.products.experts import Activation


MOST_AHEAD = 512  # columns of few rows' matrices that are prefetched


@triton.jit
def add_columns(
    x_M, weight_N, ok_M, ok_N, columns, stride_k,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN_K: tl.constexpr, ALONG_K: tl.constexpr,
):  # fmt: skip
    """[N, M] float32: the products of weight rows and rows of x.

    ALONG_K: a weight's row is contiguous; otherwise neighbouring rows are, and a row's values lie stride_k apart.
    """
    acc_NM = tl.zeros([weight_N.shape[0], x_M.shape[0]], tl.float32)
    for first in tl.range(0, columns, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        ok_K = k < columns if not EVEN_K else k >= 0
        if ALONG_K:
            w_NK = tl.load(weight_N[:, None] + k[None, :], mask=ok_N[:, None] & ok_K[None, :], other=0.0)
        else:
            at_KN = weight_N[None, :] + (k * stride_k)[:, None]
            w_NK = tl.trans(tl.load(at_KN, mask=ok_K[:, None] & ok_N[None, :], other=0.0))
        x_MK = tl.load(x_M[:, None] + k[None, :], mask=ok_M[:, None] & ok_K[None, :], other=0.0)
        acc_NM = tl.dot(w_NK, tl.trans(x_MK), acc_NM, input_precision="ieee")
    return acc_NM


@triton.jit
def rows_of_expert(counts, tile, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(a tile's expert, its first pair, the end of the expert's pairs).  Beyond the last tile the expert is EXPERTS or more."""
    e = tl.arange(0, PADDED_EXPERTS)
    count_E = tl.load(counts + e, mask=e < EXPERTS, other=0)
    tiles_E = (count_E + BLOCK_M - 1) // BLOCK_M
    is_before_E = tl.cumsum(tiles_E, 0) <= tile
    expert = tl.sum(is_before_E.to(tl.int32), 0)
    begin = tl.sum(tl.where(is_before_E, count_E, 0), 0)
    first = begin + (tile - tl.sum(tl.where(is_before_E, tiles_E, 0), 0)) * BLOCK_M
    return expert, first, begin + tl.sum(tl.where(e == expert, count_E, 0), 0)


@triton.jit
def activated(acc_NM, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """[N, M] of up rows, whose numbers become their activation, or [N / 2, M] of a tile whose first half holds gate rows and
    whose second half the up rows that belong to them: see Relu2, GeGLU and SwiGLU (experts.py)."""
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        HALF: tl.constexpr = acc_NM.shape[0] // 2
        gate_FM, up_FM = tl.split(tl.permute(tl.reshape(acc_NM, [2, HALF, acc_NM.shape[1]]), [1, 2, 0]))
        if LIMIT > 0:
            gate_FM = tl.minimum(gate_FM, LIMIT)
            up_FM = tl.minimum(tl.maximum(up_FM, -LIMIT), LIMIT) + 1
        if ACTIVATION == "geglu":  # gelu by tanh is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x**3))
            inner_FM = 1.5957691216057308 * (gate_FM + 0.044715 * gate_FM * gate_FM * gate_FM)
        else:
            inner_FM = ALPHA * gate_FM
        out_FM = gate_FM / (1 + tl.exp(-inner_FM)) * up_FM
    else:
        out_FM = relu2(acc_NM)
    return out_FM


@triton.jit(do_not_specialize=["tiles"])
def experts_linear_kernel(
    x,  # [M, K] of an MLP's first product, which an ACTIVATION follows, else [P, K]
    weight,  # [E, N, K], or [E, 2 * N, K] with gates
    bias,  # as weight, without columns, if HAS_BIAS
    order,  # [P] int64: indices of pairs, sorted by expert
    counts,  # [E] int32
    y,  # [P, N]: of a first product in the order of `order`, else in the order of the pairs
    tiles,  # of rows
    stride_x,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    FIRST: tl.constexpr = ACTIVATION != "none"
    GATED: tl.constexpr = ACTIVATION == "swiglu" or ACTIVATION == "geglu"
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) % tiles
    expert, first, end = rows_of_expert(counts, tile, EXPERTS, PADDED_EXPERTS, BLOCK_M)
    if expert < EXPERTS:
        p = first + tl.arange(0, BLOCK_M)
        ok_M = p < end
        pair_M = tl.load(order + p, mask=ok_M, other=0)
        out_N, row_N = rows_of_tile(tl.program_id(0) // tiles, N, BLOCK_N, GATED)
        x_M = x + (pair_M // TOP_K if FIRST else p.to(tl.int64)) * stride_x
        ok_N = out_N < N
        row_N = expert.to(tl.int64) * (2 * N if GATED else N) + row_N
        acc_NM = add_columns(x_M, weight + row_N * K, ok_M, ok_N, K, 1, BLOCK_K, STAGES, K % BLOCK_K == 0, True)
        if HAS_BIAS:
            acc_NM += tl.load(bias + row_N, mask=ok_N, other=0.0).to(tl.float32)[:, None]
        if FIRST:
            OUTS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
            out_FM = activated(acc_NM, ACTIVATION, ALPHA, LIMIT)
            out_F = tl.program_id(0) // tiles * OUTS + tl.arange(0, OUTS)
            at_FM = y + p.to(tl.int64)[None, :] * N + out_F[:, None]
            tl.store(at_FM, out_FM.to(y.dtype.element_ty), mask=(out_F < N)[:, None] & ok_M[None, :])
        else:
            at_NM = y + pair_M[None, :] * N + out_N[:, None]
            tl.store(at_NM, acc_NM.to(y.dtype.element_ty), mask=ok_N[:, None] & ok_M[None, :])


@triton.jit(do_not_specialize_on_alignment=["topk_weights"])
def weighted_sum_kernel(
    x,  # [M, A, N], or rows [.., N] if HAS_PLACES
    topk_weights,  # [M, A] float32
    places,  # [M, A] integers, if HAS_PLACES: at which row of x a pair's numbers lie
    y,  # [M, N]
    N: tl.constexpr, TOP_K: tl.constexpr, HAS_PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total_N = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(TOP_K):
        weight = tl.load(topk_weights + token * TOP_K + a)
        row = tl.load(places + token * TOP_K + a).to(tl.int64) if HAS_PLACES else token * TOP_K + a
        x_N = tl.load(x + row * N + n, mask=(n < N) & (row >= 0), other=0.0).to(tl.float32)
        x_N = tl.where(weight == 0, 0.0, x_N)  # of a skipped pair nobody has written x
        total_N = tl.fma(x_N, tl.zeros_like(x_N) + weight, total_N)
    tl.store(y + token * N + n, total_N.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def spread_rows_kernel(
    x,  # [M, K]
    places,  # [M, A] int32; -1: nowhere
    y,  # rows [.., K]
    stride_x, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_K = tl.load(x + token * stride_x + k, mask=k < K, other=0.0)
    for a in tl.static_range(TOP_K):
        row = tl.load(places + token * TOP_K + a).to(tl.int64)
        tl.store(y + row * K + k, x_K, mask=(k < K) & (row >= 0))


@triton.jit
def prefetch_rows(weight_N, ok_N, columns, stride_k, AHEAD: tl.constexpr, ALONG_K: tl.constexpr):
    """Prefetches the first AHEAD columns of a matrix's rows into L2.  ALONG_K: as in `add_columns`."""
    LINE: tl.constexpr = 1024 // weight_N.dtype.scalar.element_ty.primitive_bitwidth  # elements of 128 bytes
    if ALONG_K:
        k = tl.arange(0, AHEAD // LINE) * LINE
        prefetch(weight_N[:, None] + k[None, :], ok_N[:, None] & (k < columns)[None, :])
    else:
        k = tl.arange(0, AHEAD)
        first_N = ok_N & (tl.arange(0, weight_N.shape[0]) % LINE == 0)
        prefetch(weight_N[None, :] + (k * stride_k)[:, None], (k < columns)[:, None] & first_N[None, :])


@triton.jit(do_not_specialize=["M"])
def each_linear_kernel(
    x,  # [M, B, K]
    weight,  # [B, N, K]
    y,  # [M, B, N]
    M, stride_xm, stride_xb, stride_wb, stride_wn, stride_wk, stride_ym, stride_yb,
    N: tl.constexpr, K: tl.constexpr, ALONG_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """AHEAD: a program prefetches its rows of the matrix, at most AHEAD columns, into L2 before its wait."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    m = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    b, token_M = tl.program_id(1).to(tl.int64), m.to(tl.int64)
    ok_M, ok_N = m < M, n < N
    x_M = x + token_M * stride_xm + b * stride_xb
    weight_N = weight + b * stride_wb + n * stride_wn
    if PDL:
        if AHEAD > 0:
            prefetch_rows(weight_N, ok_N, K, stride_wk, AHEAD, ALONG_K)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc_NM = add_columns(x_M, weight_N, ok_M, ok_N, K, stride_wk, BLOCK_K, STAGES, K % BLOCK_K == 0, ALONG_K)
    at_NM = y + (token_M * stride_ym)[None, :] + b * stride_yb + n[:, None]
    tl.store(at_NM, acc_NM.to(y.dtype.element_ty), mask=ok_N[:, None] & ok_M[None, :])


def launch_experts_linear(
    x: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, order_P: Tensor, counts_E: Tensor, top_k: int,
    activation: Activation | None, tiles: StackedTiles,
) -> Tensor:  # fmt: skip
    """[P, N]: each pair's product with its expert's matrix, as stacked.py's function describes it."""
    from specdec.ops.products.experts import epilogue, inputs_of

    (E, rows, K), P, parts = weight_ENK.shape, order_P.shape[0], inputs_of(activation)
    N, outs = rows // parts, tiles.block_n // parts
    assert x.stride(1) == 1 and x.shape[1] == K and weight_ENK.is_contiguous() and x.dtype == weight_ENK.dtype
    assert bias_EN is None or (bias_EN.shape == (E, rows) and bias_EN.is_contiguous())
    y_PN = x.new_empty(P, N)
    of_rows = min(P, E) + P // tiles.block_m  # the most tiles of rows that P pairs can have
    experts_linear_kernel[(of_rows * triton.cdiv(N, outs),)](
        x, weight_ENK, x if bias_EN is None else bias_EN, order_P, counts_E, y_PN, of_rows, x.stride(0), N=N, K=K, TOP_K=top_k,
        EXPERTS=E, PADDED_EXPERTS=triton.next_power_of_2(E), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, STAGES=tiles.stages, HAS_BIAS=bias_EN is not None, **epilogue(activation),
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x.device),
    )  # fmt: skip
    return y_PN


def launch_weighted_sum(x: Tensor, topk_weights_MA: Tensor, places_P: Tensor | None) -> Tensor:
    """See `stacked.weighted_sum`."""
    (M, A), N = topk_weights_MA.shape, x.shape[-1]
    block = min(1024, triton.next_power_of_2(N))
    assert x.is_contiguous() and topk_weights_MA.is_contiguous() and (places_P is not None or x.shape == (M, A, N))
    assert places_P is None or (places_P.is_contiguous() and places_P.numel() == M * A)
    y_MN = x.new_empty(M, N)
    weighted_sum_kernel[(M, triton.cdiv(N, block))](
        x, topk_weights_MA, topk_weights_MA if places_P is None else places_P, y_MN, N=N, TOP_K=A,
        HAS_PLACES=places_P is not None, BLOCK=block, num_warps=4, **chained(y_MN.device),
    )  # fmt: skip
    return y_MN


def launch_spread_rows(x_MK: Tensor, places_P: Tensor, rows: int) -> Tensor:
    """See `stacked.spread_rows`."""
    (M, K), P = x_MK.shape, places_P.shape[0]
    block = min(1024, triton.next_power_of_2(K))
    assert x_MK.stride(1) == 1 and places_P.is_contiguous() and P % M == 0
    y_RK = x_MK.new_empty(rows, K)
    spread_rows_kernel[(M, triton.cdiv(K, block))](
        x_MK, places_P, y_RK, x_MK.stride(0), K=K, TOP_K=P // M, BLOCK=block, num_warps=4, **chained(x_MK.device)
    )
    return y_RK


def launch_each_linear(x_MBK: Tensor, weight_BNK: Tensor, out_MBN: Tensor, tiles: StackedTiles) -> None:
    """Row b of each token times matrix b, into out_MBN, whose rows may lie anywhere.  One of a matrix's dims is contiguous."""
    (M, B, K), N = x_MBK.shape, weight_BNK.shape[1]
    assert weight_BNK.shape == (B, N, K) and out_MBN.shape == (M, B, N) and x_MBK.stride(2) == out_MBN.stride(2) == 1
    assert 1 in weight_BNK.stride()[1:] and x_MBK.dtype == weight_BNK.dtype
    each_linear_kernel[(triton.cdiv(N, tiles.block_n) * triton.cdiv(M, tiles.block_m), B)](
        x_MBK, weight_BNK, out_MBN, M, *x_MBK.stride()[:2], *weight_BNK.stride(), *out_MBN.stride()[:2], N=N, K=K,
        ALONG_K=weight_BNK.stride(2) == 1, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        STAGES=tiles.stages, AHEAD=min(MOST_AHEAD, triton.next_power_of_2(max(K, 64))) if M <= tiles.block_m else 0,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_MBK.device),
    )  # fmt: skip
