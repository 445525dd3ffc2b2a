"""The kernels of dense.py: a product with few rows, which streams the weight once, and SiLU-mul for many rows.

With few rows, only the time to read the weight's bytes matters.  So a tile of the weight is the first operand of every product,
and x, padded to BLOCK_T rows, is the second.  This module knows no model's shapes and chooses no tiles.

The kernel hides the start and the end of a launch (see specdec/ops/launch.py).
- Start: no kernel writes weights, so each program asks L2 for the first AHEAD elements of its rows before it waits for the
  kernel in front.
- End: each program lets the next kernel start when it is halfway through its rows, so that the next kernel's requests arrive
  while this kernel's slowest programs still run.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

AHEAD = 512  # elements of each row; measured: asking for more delays the requests that are needed first
ARRIVALS = 1024  # the most tiles of a split product


@triton.jit(do_not_specialize=["T"])  # T changes from call to call; Triton would compile again for 1 or a multiple of 16
def linear_kernel(
    x,  # [T, I]
    weight,  # [O, I], or [2 * O, I] if GATED
    bias,  # [O] or [2 * O]
    y,  # [T, O]
    partials,  # [tiles, SPLITS, BLOCK_O, BLOCK_T] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T, O, I, stride_x,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_O: tl.constexpr, EVEN_I: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    r = tl.arange(0, BLOCK_O)
    out_O, row_O = rows_of_tile(tile, O, BLOCK_O, GATED)
    ok_O, row_O = out_O < O, row_O.to(tl.int64)
    if not EVEN_O:
        row_O = tl.where(ok_O, row_O, 0)  # an out-of-range row reads row 0; its result is not stored
    per_split = tl.cdiv(tl.cdiv(I, BLOCK_I), SPLITS) * BLOCK_I
    low = split * per_split
    high = tl.minimum(low + per_split, I)
    weight_O = weight + row_O * I
    if PDL:
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
        ahead = low + tl.arange(0, AHEAD // LINE) * LINE
        prefetch(weight_O[:, None] + ahead[None, :], (r >= 0)[:, None] & (ahead < high)[None, :])
        tl.extra.cuda.gdc_wait()

    t = tl.arange(0, BLOCK_T)
    i = tl.arange(0, BLOCK_I)
    ok_T = t < T
    x_T = x + t * stride_x
    acc_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    halfway = low + (high - low) // BLOCK_I // 2 * BLOCK_I
    for k in tl.range(low, high, BLOCK_I, num_stages=STAGES):
        if PDL:
            if k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        at_I = k + i
        if EVEN_I:
            w_OI = tl.load(weight_O[:, None] + at_I[None, :])
            x_TI = tl.load(x_T[:, None] + at_I[None, :], mask=ok_T[:, None], other=0.0)
        else:
            ok_I = at_I < high
            w_OI = tl.load(weight_O[:, None] + at_I[None, :], mask=ok_I[None, :], other=0.0)
            x_TI = tl.load(x_T[:, None] + at_I[None, :], mask=ok_T[:, None] & ok_I[None, :], other=0.0)
        acc_OT = tl.dot(w_OI, tl.trans(x_TI), acc_OT, input_precision="ieee")

    complete(acc_OT, bias, y, partials, arrivals, tile, split, T, O, BLOCK_T, BLOCK_O, SPLITS, GATED, HAS_BIAS)


@triton.jit
def prefetch(at, ok):
    """Asks L2 for the 128 bytes around each address, and returns at once."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [at, ok.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def rows_of_tile(tile, O, BLOCK_O: tl.constexpr, GATED: tl.constexpr):
    """(where a tile's rows lie in the result, where in the weight).

    If gated, the tile's first half holds gate rows, its second half the up rows that belong to them.
    """
    r = tl.arange(0, BLOCK_O)
    if GATED:
        out_O = tile * (BLOCK_O // 2) + r % (BLOCK_O // 2)
        row_O = out_O + r // (BLOCK_O // 2) * O
    else:
        out_O = tile * BLOCK_O + r
        row_O = out_O
    return out_O, row_O


@triton.jit
def complete(
    acc_OT, bias, y, partials, arrivals, tile, split, T, O,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Stores the product.  The program of a tile that arrives last sums all partial results, in a fixed order."""
    if SPLITS == 1:
        store_product(acc_OT, bias, y, T, O, BLOCK_T, BLOCK_O, GATED, HAS_BIAS)
    else:
        SIZE: tl.constexpr = BLOCK_O * BLOCK_T
        cell_OT = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        mine = partials + tile * (SPLITS * SIZE)
        tl.store(mine + split * SIZE + cell_OT, acc_OT)
        tl.debug_barrier()  # all of this program's stores before its arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            acc_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
            for s in tl.static_range(SPLITS):  # from L2 (.cg), since this SM's L1 may hold old data
                acc_OT += tl.load(mine + s * SIZE + cell_OT, cache_modifier=".cg")
            store_product(acc_OT, bias, y, T, O, BLOCK_T, BLOCK_O, GATED, HAS_BIAS)


@triton.jit
def store_product(
    acc_OT, bias, y, T, O, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Adds the bias, applies SiLU-mul if gated, rounds once and stores."""
    t = tl.arange(0, BLOCK_T)
    y_T = y + t.to(tl.int64) * O
    out_O, row_O = rows_of_tile(tl.program_id(0), O, BLOCK_O, GATED)
    if HAS_BIAS:
        acc_OT += tl.load(bias + row_O, mask=out_O < O, other=0.0).to(tl.float32)[:, None]
    if GATED:
        HALF: tl.constexpr = BLOCK_O // 2
        out_F = tl.program_id(0) * HALF + tl.arange(0, HALF)
        gate_FT, up_FT = tl.split(tl.permute(tl.reshape(acc_OT, [2, HALF, BLOCK_T]), [1, 2, 0]))
        out_FT = gate_FT / (1 + tl.exp(-gate_FT)) * up_FT
        ok_FT = (out_F < O)[:, None] & (t < T)[None, :]
        tl.store(y_T[None, :] + out_F[:, None], out_FT.to(y.dtype.element_ty), mask=ok_FT)
    else:
        ok_OT = (out_O < O)[:, None] & (t < T)[None, :]
        tl.store(y_T[None, :] + out_O[:, None], acc_OT.to(y.dtype.element_ty), mask=ok_OT)


@triton.jit(do_not_specialize=["blocks"])
def silu_mul_kernel(gate_up, out, stride, blocks, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // blocks).to(tl.int64)
    f = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    ok = f < F
    gate = tl.load(gate_up + row * stride + f, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + F + f, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * F + f, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=ok)


def launch_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[T, O], or [T, F] if gated.  The rows of x may be strided; there are at most tiles.block_m of them.

    A split product counts its programs' arrivals in memory that all launches on a device share, so a device must run such
    products on one stream at a time.
    """
    (T, I), rows = x_TI.shape, weight_OI.shape[0]
    O = rows // 2 if gated else rows
    assert 0 < T <= tiles.block_m and weight_OI.shape[1] == I and weight_OI.is_contiguous() and x_TI.stride(1) == 1
    assert x_TI.dtype == weight_OI.dtype and (bias_O is None or bias_O.shape == (rows,))
    outs = tiles.block_n // 2 if gated else tiles.block_n
    num_tiles = triton.cdiv(O, outs)
    y_TO, partials, arrivals = result_of(x_TI, O, tiles.splits, num_tiles, tiles.block_n, tiles.block_m)
    linear_kernel[(num_tiles, tiles.splits)](
        x_TI, weight_OI, weight_OI if bias_O is None else bias_O, y_TO, partials, arrivals, T, O, I, x_TI.stride(0),
        BLOCK_T=tiles.block_m, BLOCK_O=tiles.block_n, BLOCK_I=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
        GATED=gated, HAS_BIAS=bias_O is not None, EVEN_O=O % outs == 0, EVEN_I=I % tiles.block_k == 0, AHEAD=AHEAD,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_TI.device),
    )  # fmt: skip
    return y_TO


def launch_silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2F]: [T, F]."""
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.stride(1) == 1
    out_TF = gate_up_T2F.new_empty(T, F)
    block = min(2048, triton.next_power_of_2(F))
    blocks = triton.cdiv(F, block)
    if T:
        silu_mul_kernel[(T * blocks,)](
            gate_up_T2F, out_TF, gate_up_T2F.stride(0), blocks, F, BLOCK=block, num_warps=8, **chained(out_TF.device)
        )
    return out_TF


def result_of(
    x_TI: Tensor, O: int, splits: int, num_tiles: int, block_n: int, block_m: int, store_partials: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(the result [T, O], or partials [splits, T, O] float32 with store_partials; a workspace for partials; arrival counters).

    All three are memory to be written.  Where programs add nothing up, the last two are never read.
    """
    if store_partials:
        y = x_TI.new_empty(splits, x_TI.shape[0], O, dtype=torch.float32)
        return y, y, y
    y = x_TI.new_empty(x_TI.shape[0], O)
    if splits == 1:
        return y, y, y
    assert num_tiles <= ARRIVALS
    partials = x_TI.new_empty(num_tiles, splits, block_n, block_m, dtype=torch.float32)
    return y, partials, arrivals_of(x_TI.device)


@cache
def arrivals_of(device: torch.device) -> Tensor:
    """A device's arrival counters.  The first call makes them, in a warm-up and not in a capture; each launch leaves them at
    zero.
    """
    return torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
