"""Kernels that sum the ranks' partial sums of each row, add them to the residual stream and norm the result.

`few` rows: a program for each row sends its partial sum as messages, and reads the others'.  `many` rows: partial sums travel
as they are, half the bytes, and a mark after some rows tells that they are complete, which costs a fence.

With two ranks nothing moves fewer bytes than sending every partial sum to the other rank.  The kernels take any number of
ranks.

Shapes: T tokens, H hidden size.  Rows are read as pairs of words of 32 bits, each pair an int64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.parallel.symmetric.inbox import MARKS, Inbox
from specdec.parallel.symmetric.messages_triton import (
    DTYPES,
    call_number,
    lanes,
    load_two,
    next_count,
    pack,
    place,
    receive,
    send,
    send_last,
    store_two,
    unpack,
)  # fmt: skip

MAX_AT_ONCE = 4  # rows that a program of many_rows_kernel sends together, with one fence


@triton.jit
def finish_row(
    value, residual, scale, total, normed, row, at, ok, eps,
    PAIRS: tl.constexpr, DTYPE: tl.constexpr, HAS_X: tl.constexpr, HAS_NORM: tl.constexpr, SYS: tl.constexpr,
):  # fmt: skip
    """Rounds the sum of a row, adds them to its residual words, rounds, norms, and stores both.

    It is the same code for few and for many rows, so a row's bits do not depend on how many there are.
    """
    if HAS_X:
        value = unpack(residual, DTYPE, SYS) + unpack(pack(value, DTYPE, SYS), DTYPE, SYS)
    rounded = pack(value, DTYPE, SYS)
    tl.store(total + row * PAIRS + at, rounded)
    if HAS_NORM:
        value = unpack(rounded, DTYPE, SYS)
        squares = tl.sum(value * value, 1)
        if DTYPE.primitive_bitwidth == 16:
            squares = tl.sum(squares, 1)
        mean = tl.sum(tl.where(ok, squares, 0.0), 0) / (PAIRS * (64 // DTYPE.primitive_bitwidth))
        tl.store(normed + row * PAIRS + at, pack(value * tl.rsqrt(mean + eps) * scale, DTYPE, SYS))


@triton.jit
def load_scale(weight, at, DTYPE: tl.constexpr, WIDE: tl.constexpr, SYS: tl.constexpr):
    """The weights of pairs of words, as `unpack` gives these.  WIDE: whether they are float32 beside numbers of 16 bits."""
    if WIDE:
        first = unpack(tl.load(weight + at * 2), tl.float32, SYS)
        second = unpack(tl.load(weight + at * 2 + 1), tl.float32, SYS)
        scale = tl.permute(tl.join(first, second), (0, 2, 1))
    else:
        scale = unpack(tl.load(weight + at), DTYPE, SYS)
    return scale


@triton.jit
def few_rows_kernel(
    x, partial_sum, weight, total, normed, table, counts, stride_x, stride_partial, eps, patience,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr,
    DTYPE: tl.constexpr, HAS_X: tl.constexpr, HAS_NORM: tl.constexpr, WIDE: tl.constexpr, SYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = lanes(PADDED, SYS)
    ok = index < PAIRS
    at = tl.minimum(index, PAIRS - 1)  # lanes beyond the row repeat its last pair, which changes nothing
    scale = 0.0
    if HAS_NORM:  # no kernel writes weights, so they may be read before the wait
        scale = load_scale(weight, at, DTYPE, WIDE, SYS)
    fault = tl.load(table + RANKS).to(tl.pointer_type(tl.int32))
    own_inbox = tl.load(table + RANK).to(tl.pointer_type(tl.int64))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(counts + row)
    number = call_number(count)
    own = tl.load(partial_sum + row * stride_partial + at)
    residual = own
    if HAS_X:
        residual = tl.load(x + row * stride_x + at)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            inbox = tl.load(table + peer).to(tl.pointer_type(tl.int64))
            send(inbox + place(row, count, RANK, peer, RANKS, CAPACITY) + at * 2, own, number, SYS)
    for sender in tl.static_range(RANKS):
        if sender == RANK:
            words = own
        else:
            area = own_inbox + place(row, count, sender, RANK, RANKS, CAPACITY)
            words = receive(area + at * 2, number, at, fault, patience, sender, False, SYS)
        if sender == 0:
            value = unpack(words, DTYPE, SYS)
        else:
            value += unpack(words, DTYPE, SYS)
    finish_row(value, residual, scale, total, normed, row, at, ok, eps, PAIRS, DTYPE, HAS_X, HAS_NORM, SYS)
    tl.store(counts + row, next_count(count))


@triton.jit
def send_rows(
    partial_sum, stride, turn, turns, table, channel, programs, count, number, RANK: tl.constexpr, RANKS: tl.constexpr,
    AREA: tl.constexpr, MARKS: tl.constexpr, ROWS_AT: tl.constexpr, MARKS_AT: tl.constexpr, PAIRS: tl.constexpr,
    PADDED: tl.constexpr, GROUP: tl.constexpr, SYS: tl.constexpr,
):  # fmt: skip
    """Sends a channel's next GROUP rows to all other ranks, 16 bytes a thread, then the mark that tells that they are there.

    Where there are fewer rows, the last one goes several times, to the same place.
    """
    index = lanes(GROUP * PADDED // 2, SYS)
    turn_of = tl.minimum(turn + index // (PADDED // 2), turns - 1)
    at = tl.minimum(index % (PADDED // 2), PAIRS // 2 - 1) * 2
    first, second = load_two(partial_sum + (channel + turn_of.to(tl.int64) * programs) * stride + at, SYS)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            area = tl.load(table + peer) + ROWS_AT + place(channel, count, RANK, peer, RANKS, AREA)
            store_two(area.to(tl.pointer_type(tl.int64)) + turn_of * PAIRS + at, first, second, SYS)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            marks = (tl.load(table + peer) + MARKS_AT).to(tl.pointer_type(tl.int32))
            send_last(marks + place(channel, count, RANK, peer, RANKS, MARKS) + turn // GROUP, number, SYS)


@triton.jit(do_not_specialize=["row_count"])
def many_rows_kernel(
    x, partial_sum, weight, total, normed, table, counts, stride_x, stride_partial, eps, patience, row_count,
    RANK: tl.constexpr, RANKS: tl.constexpr, AREA: tl.constexpr, MARKS: tl.constexpr, ROWS_AT: tl.constexpr,
    MARKS_AT: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
    HAS_X: tl.constexpr, HAS_NORM: tl.constexpr, WIDE: tl.constexpr, SYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    programs = tl.num_programs(0)
    index = lanes(PADDED, SYS)
    ok = index < PAIRS
    at = tl.minimum(index, PAIRS - 1)
    scale = 0.0
    if HAS_NORM:
        scale = load_scale(weight, at, DTYPE, WIDE, SYS)
    fault = tl.load(table + RANKS).to(tl.pointer_type(tl.int32))
    rows = tl.load(table + RANK) + ROWS_AT
    marks = (tl.load(table + RANK) + MARKS_AT).to(tl.pointer_type(tl.int32))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(counts + channel)
    number = call_number(count)
    turns = (row_count - channel + programs - 1) // programs
    row = channel.to(tl.int64)
    lost = tl.zeros_like(at).to(tl.int64)
    send_rows(
        partial_sum, stride_partial, 0, turns, table, channel, programs, count, number,
        RANK, RANKS, AREA, MARKS, ROWS_AT, MARKS_AT, PAIRS, PADDED, GROUP, SYS,
    )  # fmt: skip
    for turn in range(turns):
        if turn % GROUP == 0:
            if turn + GROUP < turns:  # travels while these rows are finished
                send_rows(
                    partial_sum, stride_partial, turn + GROUP, turns, table, channel, programs, count, number,
                    RANK, RANKS, AREA, MARKS, ROWS_AT, MARKS_AT, PAIRS, PADDED, GROUP, SYS,
                )  # fmt: skip
            for sender in tl.static_range(RANKS):
                if sender != RANK:
                    mark = marks + place(channel, count, sender, RANK, RANKS, MARKS) + turn // GROUP
                    lost |= receive(mark + tl.zeros_like(at), number, at, fault, patience, sender, True, SYS)
        own = tl.load(partial_sum + row * stride_partial + at)
        residual = own
        if HAS_X:
            residual = tl.load(x + row * stride_x + at)
        for sender in tl.static_range(RANKS):
            if sender == RANK:
                words = own
            else:
                area = rows + place(channel, count, sender, RANK, RANKS, AREA)
                words = tl.load(area.to(tl.pointer_type(tl.int64)) + turn * PAIRS + at) | lost
            if sender == 0:
                value = unpack(words, DTYPE, SYS)
            else:
                value += unpack(words, DTYPE, SYS)
        finish_row(value, residual, scale, total, normed, row, at, ok, eps, PAIRS, DTYPE, HAS_X, HAS_NORM, SYS)
        row += programs
    tl.store(counts + channel, next_count(count))


def launch_rows(
    inbox: Inbox, rank: int, patience: int, x_TH: Tensor | None, partial_TH: Tensor, weight_H: Tensor | None, eps: float,
    few: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x + all ranks' partial sums, its norm).  Without x: their sum alone.  Without weight, the second is the first.

    weight_H: in x's dtype or float32.  patience: in nanoseconds.  few: partial sums travel as messages; at most a row a
    channel.  Rows of x may be strided.
    """
    (T, H), layout = partial_TH.shape, inbox.layout
    total_TH = torch.empty(T, H, dtype=partial_TH.dtype, device=partial_TH.device)
    normed_TH = total_TH if weight_H is None else torch.empty_like(total_TH)
    partial_TP, scale = _pairs(partial_TH), total_TH if weight_H is None else weight_H
    x_TP = partial_TP if x_TH is None else _pairs(x_TH)
    P = partial_TP.shape[1]
    shared: dict[str, Any] = {
        "RANK": rank, "RANKS": layout.ranks, "PAIRS": P, "PADDED": max(64, triton.next_power_of_2(P)),
        "DTYPE": DTYPES[total_TH.dtype], "HAS_X": x_TH is not None, "HAS_NORM": weight_H is not None,
        "WIDE": scale.dtype != total_TH.dtype, "SYS": total_TH.is_cuda, "num_warps": _warps(P), **chained(total_TH.device),
    }  # fmt: skip
    step = layout.channels * (1 if few else layout.slots(P * 8))
    for first in range(0, T, step):
        own = slice(first, first + step)
        tensors = x_TP[own], partial_TP[own], scale.view(torch.int64), total_TH[own].view(torch.int64)
        numbers = x_TP.stride(0), partial_TP.stride(0), eps, patience
        arguments = *tensors, normed_TH[own].view(torch.int64), inbox.table_X, inbox.counts_C, *numbers
        count = len(partial_TP[own])
        if few:
            few_rows_kernel[(count,)](*arguments, CAPACITY=layout.capacity, **shared)
        else:
            places = {"AREA": layout.area, "MARKS": MARKS, "ROWS_AT": layout.rows_at, "MARKS_AT": layout.marks_at}
            group = min(MAX_AT_ONCE, triton.next_power_of_2(triton.cdiv(count, layout.channels)))
            many_rows_kernel[(min(count, layout.channels),)](*arguments, count, GROUP=group, **places, **shared)
    return total_TH, normed_TH


def _pairs(x_TH: Tensor) -> Tensor:
    """Rows as pairs of words, copied only where they do not lie so, or begin at no multiple of 16 bytes."""
    if x_TH.stride(1) != 1 or x_TH.stride(0) * x_TH.element_size() % 16 or x_TH.data_ptr() % 16:
        x_TH = x_TH.contiguous()
    return x_TH.view(torch.int64)


def _warps(P: int) -> int:
    """Enough that a thread has four pairs of a row; each warp has some."""
    return max(1, min(16, triton.next_power_of_2(P) // 128))
