"""The kernels of norm.py: one program for each row, which is read once and held in registers.

Shapes: T tokens, H hidden, V vocabulary, C rows below, X width of a row, P = 2 of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.partials import Delta, NormedProduct, Partials, TwoProducts

MANY = tl.constexpr(4)  # threshold in partials: of more, the compiler would let a few loads at a time wait for sums


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    ids,  # [T] int64: rows of x, if EMBEDS
    x,
    delta,  # [T, H], or [PARTIALS, T, H] float32, whose sum is rounded first, and then multiplied if HAS_TIMES
    second,  # as delta, if PARTIALS_2 is not 0: their rounded sum is added
    weight,  # of the total's norm, if NORMS_TOTAL
    inner,  # of delta's norm before it is added, if NORMS_DELTA
    scale,  # [1]: what the total is multiplied with, if HAS_SCALE
    below,  # [C, H]
    total,
    normed,  # [T + C, H], if the total is normed
    rows,  # T
    stride_x,
    stride_delta,
    stride_partial,
    stride_below,
    stride_total,
    stride_second,
    stride_partial_2,
    eps,
    inner_eps,
    times,
    times_2,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    EMBEDS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PARTIALS: tl.constexpr,
    PADDED_PARTIALS: tl.constexpr,
    PARTIALS_2: tl.constexpr,
    PADDED_PARTIALS_2: tl.constexpr,
    HAS_BELOW: tl.constexpr,
    HAS_TIMES: tl.constexpr,
    HAS_TIMES_2: tl.constexpr,
    NORMS_DELTA: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    NORMS_TOTAL: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, PADDED)
    ok = h < SIZE
    if NORMS_TOTAL:  # no kernel writes weights, so they may be read before the wait
        weight_H = tl.load(weight + h, mask=ok, other=0.0).to(tl.float32)
    if NORMS_DELTA:
        inner_H = tl.load(inner + h, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if HAS_BELOW:
        if row >= rows:
            tl.store(normed + row * SIZE + h, tl.load(below + (row - rows) * stride_below + h, mask=ok), mask=ok)
            return
    source = row
    if EMBEDS:
        source = tl.load(ids + row)
    value = tl.load(x + source * stride_x + h, mask=ok, other=0.0)
    if HAS_DELTA:
        added = row_of_product(
            delta + row * stride_delta, h, ok, stride_partial, times, value.dtype, PARTIALS, PADDED_PARTIALS, HAS_TIMES
        )
        if PARTIALS_2 > 0:
            added += row_of_product(
                second + row * stride_second, h, ok, stride_partial_2, times_2, value.dtype, PARTIALS_2, PADDED_PARTIALS_2,
                HAS_TIMES_2,
            )  # fmt: skip
            added = added.to(value.dtype).to(tl.float32)
        if NORMS_DELTA:
            rms = tl.rsqrt(tl.sum(added * added, 0) / SIZE + inner_eps)
            added = (added * rms * inner_H).to(value.dtype).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
        if HAS_SCALE:
            value = (value.to(tl.float32) * tl.load(scale).to(tl.float32)).to(value.dtype)
    if HAS_DELTA or EMBEDS:
        tl.store(total + row * stride_total + h, value, mask=ok)
    if NORMS_TOTAL:
        value = value.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * weight_H
        tl.store(normed + row * SIZE + h, value.to(normed.dtype.element_ty), mask=ok)


@triton.jit
def row_of_product(
    at, h, ok, stride_partial, times, DTYPE: tl.constexpr, PARTIALS: tl.constexpr, PADDED_PARTIALS: tl.constexpr,
    HAS_TIMES: tl.constexpr,
):  # fmt: skip
    """A row of a product, in float32: the sum of its partials, rounded to DTYPE; then times a number, and rounded again."""
    if PARTIALS <= MANY:
        added = tl.load(at + h, mask=ok, other=0.0)
        for s in tl.static_range(1, PARTIALS):
            added += tl.load(at + s * stride_partial + h, mask=ok, other=0.0)
    else:
        s = tl.arange(0, PADDED_PARTIALS)
        ok_SH = (s < PARTIALS)[:, None] & ok[None, :]
        added = tl.sum(tl.load(at + s[:, None] * stride_partial + h[None, :], mask=ok_SH, other=0.0), 0)
    added = added.to(DTYPE).to(tl.float32)
    if HAS_TIMES:
        added = (added * times).to(DTYPE).to(tl.float32)
    return added


@triton.jit
def pair_rms_norm_kernel(
    ids, table, table_weight, x, weight, normed, stride_x, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, PADDED)
    ok = h < SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if tl.program_id(1) == 0:
        value = tl.load(table + tl.load(ids + row).to(tl.int64) * SIZE + h, mask=ok, other=0.0).to(tl.float32)
        scale = tl.load(table_weight + h, mask=ok, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + row * stride_x + h, mask=ok, other=0.0).to(tl.float32)
        scale = tl.load(weight + h, mask=ok, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * scale
    at = normed + (row * 2 + tl.program_id(1)) * SIZE + h
    tl.store(at, value.to(normed.dtype.element_ty), mask=ok)


@triton.jit
def norm_parts_kernel(
    x,  # [T, X]
    weight, weight_2,  # of the two parts that are normed, which come first in a row
    squares,  # [T, 2] float32
    stride_x, eps, SIZE: tl.constexpr, SIZE_2: tl.constexpr, SHARERS: tl.constexpr, PADDED: tl.constexpr,
    PADDED_2: tl.constexpr, HAS_SQUARES: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _norm_part(x + row * stride_x, weight, squares + row * 2, eps, SIZE, SHARERS, PADDED, HAS_SQUARES, NORMS)
    else:
        _norm_part(
            x + row * stride_x + SIZE, weight_2, squares + row * 2 + 1, eps, SIZE_2, SHARERS, PADDED_2, HAS_SQUARES, NORMS
        )


@triton.jit
def _norm_part(
    x, weight, squares, eps, SIZE: tl.constexpr, SHARERS: tl.constexpr, PADDED: tl.constexpr, HAS_SQUARES: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """Norms a part where it lies, or stores its sum of squares."""
    h = tl.arange(0, PADDED)
    ok = h < SIZE
    value = tl.load(x + h, mask=ok, other=0.0).to(tl.float32)
    square = tl.load(squares) if HAS_SQUARES else tl.sum(value * value, 0)
    if NORMS:
        scale = tl.load(weight + h, mask=ok, other=0.0).to(tl.float32)
        value = value * tl.rsqrt(square / (SIZE * SHARERS) + eps) * scale
        tl.store(x + h, value.to(x.dtype.element_ty), mask=ok)
    else:
        tl.store(squares, square)


def launch_part_squares(x_TX: Tensor, sizes: Sequence[int]) -> Tensor:
    """`norm.part_squares`, of two parts."""
    squares_TP = torch.empty(len(x_TX), 2, dtype=torch.float32, device=x_TX.device)
    _launch_parts(x_TX, [x_TX, x_TX], sizes, squares_TP, 0.0, 1, has_squares=False, norms=False)
    return squares_TP


def launch_norm_parts(
    x_TX: Tensor, weights: Sequence[Tensor], eps: float, squares_TP: Tensor | None = None, sharers: int = 1
) -> Tensor:  # fmt: skip
    """`norm.norm_parts`, of two parts, in x's memory."""
    assert all(weight.is_contiguous() for weight in weights) and (squares_TP is None or squares_TP.dtype == torch.float32)
    given = x_TX if squares_TP is None else squares_TP.contiguous()
    sizes = [len(weight) for weight in weights]
    _launch_parts(x_TX, weights, sizes, given, eps, sharers, has_squares=squares_TP is not None, norms=True)
    return x_TX


def _launch_parts(
    x_TX: Tensor, weights: Sequence[Tensor], sizes: Sequence[int], squares_TP: Tensor, eps: float, sharers: int, *,
    has_squares: bool, norms: bool,
) -> None:  # fmt: skip
    (T, X), (first, second) = x_TX.shape, sizes
    assert x_TX.stride(1) == 1 and first + second <= X
    if T:
        norm_parts_kernel[(T, 2)](
            x_TX, *weights, squares_TP, x_TX.stride(0), eps, SIZE=first, SIZE_2=second, SHARERS=sharers,
            PADDED=triton.next_power_of_2(first), PADDED_2=triton.next_power_of_2(second), HAS_SQUARES=has_squares, NORMS=norms,
            num_warps=_warps(first), **chained(x_TX.device),
        )  # fmt: skip


def launch_add_rms_norm(
    x: Tensor,
    delta: Delta | NormedProduct | None,
    weight_H: Tensor,
    eps: float,
    *,
    ids_T: Tensor | None = None,
    out_TH: Tensor | None = None,
    below_CH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm); without delta, (x, its norm).  Rows may be strided.

    ids_T: int64; x is a table, of which the rows with these ids are read.  out_TH, below_CH: see `norm.add_rms_norm`.
    """
    H = x.shape[-1]
    shape = x.shape if ids_T is None else (*ids_T.shape, H)
    normed = x.new_empty(shape if below_CH is None else (math.prod(shape[:-1]) + len(below_CH), H))
    total = x
    if delta is not None or ids_T is not None:
        total = x.new_empty(shape) if out_TH is None else out_TH
    assert out_TH is None or out_TH.dim() == 2, "rows of more dimensions might be copied, and the sum be lost"
    assert total.shape == shape and total.stride(-1) == 1 and total.dtype == x.dtype
    assert ids_T is None or ids_T.is_contiguous()
    _launch_rows(x, delta, weight_H, eps, ids_T, total, normed, below_CH)
    return total, normed


def launch_add_normed(x_TH: Tensor, delta: Delta, weight_H: Tensor | None, eps: float) -> Tensor:
    """`norm.add_normed`."""
    total = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    added = delta if weight_H is None else NormedProduct(delta, weight_H, eps)
    _launch_rows(x_TH, added, None, eps, None, total, total, None)
    return total


def _launch_rows(
    x: Tensor, delta: Delta | NormedProduct | None, weight_H: Tensor | None, eps: float, ids_T: Tensor | None, total: Tensor,
    normed: Tensor, below_CH: Tensor | None,
) -> None:  # fmt: skip
    """The first kernel, of whatever there is.  total, normed: what it writes; without delta and ids only the latter.

    weight_H: of the total's norm; None: it is not normed.
    """
    inner_H, inner_eps, scale_1 = None, 0.0, None
    if isinstance(delta, NormedProduct):
        delta, inner_H, inner_eps, scale_1, _ = delta
    x_TH, H, total_TH = _rows(x), x.shape[-1], _rows(total)
    T, C, below = len(total_TH), 0 if below_CH is None else len(below_CH), x_TH if below_CH is None else below_CH
    first, second = delta if isinstance(delta, TwoProducts) else (x_TH if delta is None else delta, None)
    one, two = terms_of(first, x_TH), terms_of(first if second is None else second, x_TH)
    assert delta is None or one.sums_SMN.shape[1:] == two.sums_SMN.shape[1:] == x_TH.shape
    assert all(weight is None or weight.shape == (H,) for weight in (weight_H, inner_H))
    assert below.shape[1] == H and below.stride(1) == 1 and below.dtype == x.dtype
    if T + C:
        add_rms_norm_kernel[(T + C,)](
            x_TH if ids_T is None else ids_T, x_TH, one.sums_SMN, two.sums_SMN, x_TH if weight_H is None else weight_H,
            x_TH if inner_H is None else inner_H, x_TH if scale_1 is None else scale_1, below, total_TH, normed, T,
            x_TH.stride(0), *one.sums_SMN.stride()[1::-1], below.stride(0), total_TH.stride(0),
            *two.sums_SMN.stride()[1::-1], eps, inner_eps, one.times, two.times,
            SIZE=H, PADDED=triton.next_power_of_2(H), EMBEDS=ids_T is not None, HAS_DELTA=delta is not None,
            PARTIALS=len(one.sums_SMN), PADDED_PARTIALS=triton.next_power_of_2(len(one.sums_SMN)),
            PARTIALS_2=0 if second is None else len(two.sums_SMN), PADDED_PARTIALS_2=triton.next_power_of_2(len(two.sums_SMN)),
            HAS_BELOW=below_CH is not None, HAS_TIMES=one.times != 1, HAS_TIMES_2=two.times != 1,
            NORMS_DELTA=inner_H is not None, HAS_SCALE=scale_1 is not None, NORMS_TOTAL=weight_H is not None,
            num_warps=_warps(H, len(one.sums_SMN)), **chained(x.device),
        )  # fmt: skip


def terms_of(product: Tensor | Partials, x_TH: Tensor) -> Partials:
    """As the kernel reads a product: partials, or one term in x's dtype.  Where there is none, x stands in its place."""
    if isinstance(product, Tensor):
        product = Partials(_rows(product)[None], product.dtype)
    sums_SMN, split = product.sums_SMN, len(product.sums_SMN) > 1
    assert product.dtype == x_TH.dtype and (sums_SMN.is_contiguous() if split else sums_SMN.stride(2) == 1)
    assert sums_SMN.dtype == torch.float32 or (not split and sums_SMN.dtype == x_TH.dtype)
    return product


def launch_pair_rms_norm(
    ids_T: Tensor, table_VH: Tensor, table_weight_H: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float
) -> Tensor:
    """`norm.pair_rms_norm`: [T, 2H]."""
    T, H = x_TH.shape
    assert table_VH.shape[1] == H and table_VH.is_contiguous() and x_TH.stride(1) == 1 and ids_T.shape == (T,)
    normed = torch.empty(T, 2 * H, dtype=x_TH.dtype, device=x_TH.device)
    if T:
        pair_rms_norm_kernel[(T, 2)](
            ids_T.contiguous(), table_VH, table_weight_H, x_TH, weight_H, normed, x_TH.stride(0), eps,
            SIZE=H, PADDED=triton.next_power_of_2(H), num_warps=_warps(H), **chained(x_TH.device),
        )  # fmt: skip
    return normed


def _rows(x: Tensor) -> Tensor:
    """x as rows [T, H], copied only if a row is not contiguous."""
    x_TH = x.reshape(-1, x.shape[-1])
    return x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()


def _warps(H: int, partials: int = 1) -> int:
    """Enough warps that a thread loads sixteen bytes at a time, where the row is long enough for that.

    Of many partials more: a thread has few loads in flight, and one program reads them all.
    """
    return 32 if partials > MANY.value and H >= 1024 else max(1, min(16, triton.next_power_of_2(H) // 256))
