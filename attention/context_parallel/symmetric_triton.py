"""The all-to-all of partial states and their merge in one kernel, for GPUs that reach each other's memory (symmetric memory).

The result equals, bit for bit, that of packing, an all-to-all and a merge in three launches (all_to_all_triton.py).
specdec/parallel/symmetric/messages_triton.py defines how words are sent.

Order of chained launches (specdec/ops/launch.py): as of the kernels in all_to_all_triton.py.

Shapes: T queries, H heads of one rank, N ranks, E value dim; R = T * H rows, each a query and a head.  A row travels as P pairs
of words, and one more pair, which holds its lse.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specdec.attention.state import AttentionState
from specdec.ops.launch import KERNEL_DTYPES, chained
from specdec.parallel.symmetric.inbox import BLOCK, Inbox
from specdec.parallel.symmetric.messages_triton import (
    DTYPES,
    call_number,
    lanes,
    next_count,
    pack,
    place,
    receive,
    send,
    unpack,
)  # fmt: skip

# The most blocks of rows that a program exchanges one after the other.  With six, three launches took less time.
# Measured: benchmarks/layers/README.md.
MAX_BLOCKS = 2


@triton.jit
def lse_of(words):
    """The float32 in the first word of each pair."""
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["rows", "heads"])
def all_to_all_states_kernel(
    states,  # [T, N * H, E], in pairs of words
    lses,  # [T, N * H] float32
    out,  # [R, E], in pairs of words
    lse,  # [R] float32
    table, counts, patience, rows, heads,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, PAIRS: tl.constexpr, BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr, SYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    programs = tl.num_programs(0)
    index = lanes(BLOCK_R * PAIRS, SYS)
    own_row = index // PAIRS
    pair = index % PAIRS
    fault = tl.load(table + RANKS).to(tl.pointer_type(tl.int32))
    own_inbox = tl.load(table + RANK).to(tl.pointer_type(tl.int64))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(counts + channel)
    number = call_number(count)
    turns = ((rows + BLOCK_R - 1) // BLOCK_R - channel + programs - 1) // programs
    for turn in range(turns):
        row = tl.minimum((channel + turn * programs) * BLOCK_R + own_row, rows - 1).to(tl.int64)
        message = (turn * BLOCK_R + own_row) * (PAIRS + 1)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                source = (row // heads * RANKS + peer) * heads + row % heads
                area = tl.load(table + peer).to(tl.pointer_type(tl.int64)) + place(channel, count, RANK, peer, RANKS, CAPACITY)
                send(area + (message + pair) * 2, tl.load(states + source * PAIRS + pair), number, SYS)
                bits = tl.load(lses + source).to(tl.int32, bitcast=True)
                send(area + (message + PAIRS) * 2, bits.to(tl.int64), number, SYS)
    for turn in range(turns):
        row = tl.minimum((channel + turn * programs) * BLOCK_R + own_row, rows - 1).to(tl.int64)
        message = (turn * BLOCK_R + own_row) * (PAIRS + 1)
        source = (row // heads * RANKS + RANK) * heads + row % heads
        own_lse = tl.load(lses + source)
        own_words = tl.load(states + source * PAIRS + pair)
        top = own_lse
        for sender in tl.static_range(RANKS):
            if sender != RANK:
                at = own_inbox + place(channel, count, sender, RANK, RANKS, CAPACITY) + (message + PAIRS) * 2
                top = tl.maximum(top, lse_of(receive(at, number, index, fault, patience, sender, False, SYS)))
        shift = tl.where(top == -float("inf"), 0.0, top)  # -inf: no rank keeps a key
        total = tl.zeros_like(top)
        for sender in tl.static_range(RANKS):
            if sender == RANK:
                its_lse = own_lse
                words = own_words
            else:
                area = own_inbox + place(channel, count, sender, RANK, RANKS, CAPACITY)
                its_lse = lse_of(
                    receive(area + (message + PAIRS) * 2, number, index, fault, patience, sender, False, SYS)
                )  # it is there already
                words = receive(area + (message + pair) * 2, number, index, fault, patience, sender, False, SYS)
            weight = tl.exp(its_lse - shift)
            total += weight
            values = unpack(words, DTYPE, SYS)
            if DTYPE.primitive_bitwidth == 16:
                term = tl.where((its_lse == -float("inf"))[:, None, None], 0.0, values * weight[:, None, None])
            else:
                term = tl.where((its_lse == -float("inf"))[:, None], 0.0, values * weight[:, None])
            if sender == 0:
                value = term
            else:
                value += term
        none = total == 0
        safe = tl.where(none, 1.0, total)
        if DTYPE.primitive_bitwidth == 16:
            value = value / safe[:, None, None]
        else:
            value = value / safe[:, None]
        tl.store(out + row * PAIRS + pair, pack(value, DTYPE, SYS))
        tl.store(lse + row, tl.where(none, -float("inf"), shift + tl.log(safe)))
    tl.store(counts + channel, next_count(count))


def can_exchange(inbox: Inbox, partial: AttentionState) -> bool:
    """Whether `launch_all_to_all_states` can exchange these states, [T, N * H, E]."""
    out, pairs = partial.out_THD, partial.out_THD.shape[2] * partial.out_THD.itemsize // 8
    if out.dtype not in KERNEL_DTYPES or not out.numel() or out.device != inbox.counts_C.device:
        return False
    if pairs & (pairs - 1) or not 0 < pairs <= BLOCK or out.shape[2] * out.itemsize % 8:
        return False
    rows = out.shape[0] * out.shape[1] // inbox.layout.ranks
    block, programs = _blocks(inbox, rows, pairs)
    turns = triton.cdiv(triton.cdiv(rows, block), programs)
    return turns <= MAX_BLOCKS and turns * block * (pairs + 1) * 2 <= inbox.layout.capacity


def launch_all_to_all_states(inbox: Inbox, rank: int, patience: int, partial: AttentionState) -> AttentionState:
    """`all_to_all_states`.  patience: in nanoseconds.  partial: see `can_exchange`."""
    out, lse = partial.out_THD.contiguous(), partial.lse_TH.contiguous()
    (T, heads, E), N = out.shape, inbox.layout.ranks
    rows, pairs = T * heads // N, E * out.itemsize // 8
    block, programs = _blocks(inbox, rows, pairs)
    merged = AttentionState.empty((T, heads // N, E), out.dtype, out.device)
    all_to_all_states_kernel[(programs,)](
        out.view(torch.int64), lse, merged.out_THD.view(torch.int64), merged.lse_TH, inbox.table_X, inbox.counts_C, patience,
        rows, heads // N, RANK=rank, RANKS=N, CAPACITY=inbox.layout.capacity, PAIRS=pairs, BLOCK_R=block,
        DTYPE=DTYPES[out.dtype], SYS=out.is_cuda, num_warps=max(1, block * pairs // 128), **chained(out.device),
    )  # fmt: skip
    return merged


def _blocks(inbox: Inbox, rows: int, pairs: int) -> tuple[int, int]:
    """Rows that a program exchanges at once, and the number of programs: as many as there are channels, if rows are many."""
    spread = triton.next_power_of_2(triton.cdiv(rows, inbox.layout.channels))
    block = min(max(1, BLOCK // pairs), spread)
    return block, min(inbox.layout.channels, triton.cdiv(rows, block))
