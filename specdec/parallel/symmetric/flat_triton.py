"""The kernel for sums, all-gathers and all-to-alls of small tensors of any shape: best tokens, totals, the sums of a few rows.

A program takes blocks of BLOCK pairs of words of the tensor, wherever rows begin and end.  It sends all of them before it waits
for the first.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
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


@triton.jit(do_not_specialize=["word_count", "row_words"])
def flat_kernel(
    x, out, table, counts, patience, word_count, row_words,
    RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    TURNS: tl.constexpr, KIND: tl.constexpr, SYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0)
    programs = tl.num_programs(0)
    index = lanes(BLOCK, SYS)
    fault = tl.load(table + RANKS).to(tl.pointer_type(tl.int32))
    own_inbox = tl.load(table + RANK).to(tl.pointer_type(tl.int64))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = tl.load(counts + channel)
    number = call_number(count)
    piece = word_count.to(tl.int64) if KIND == "all_to_all" else 0  # what lies between the words for two ranks
    for turn in range(TURNS):
        first = (channel + turn * programs) * BLOCK  # in pairs
        if first * 2 < word_count:
            low = (first + index) * 2
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    words = load_pairs(x + peer * piece, low, word_count)
                    inbox = tl.load(table + peer).to(tl.pointer_type(tl.int64))
                    area = inbox + place(channel, count, RANK, peer, RANKS, CAPACITY)
                    send(area + (turn * BLOCK + index) * 2, words, number, SYS)
    for turn in range(TURNS):
        first = (channel + turn * programs) * BLOCK
        if first * 2 < word_count:
            low = (first + index) * 2
            own = load_pairs(x + RANK * piece, low, word_count)
            for sender in tl.static_range(RANKS):
                if sender == RANK:
                    words = own
                else:
                    area = own_inbox + place(channel, count, sender, RANK, RANKS, CAPACITY)
                    words = receive(area + (turn * BLOCK + index) * 2, number, index, fault, patience, sender, False, SYS)
                if KIND == "gather":  # each row of all ranks, one after the other
                    beyond = (low // row_words).to(tl.int64) * (RANKS - 1) + sender
                    store_pairs(out + beyond * row_words, words, low, word_count)
                elif KIND == "all_to_all":
                    store_pairs(out + sender * word_count.to(tl.int64), words, low, word_count)
                elif sender == 0:
                    value = unpack(words, DTYPE, SYS)
                else:
                    value += unpack(words, DTYPE, SYS)
            if KIND == "sum":
                store_pairs(out, pack(value, DTYPE, SYS), low, word_count)
    tl.store(counts + channel, next_count(count))


@triton.jit
def load_pairs(x, low, word_count):
    second = tl.load(x + low + 1, mask=low + 1 < word_count, other=0).to(tl.int64) << 32
    return (tl.load(x + low, mask=low < word_count, other=0).to(tl.int64) & 0xFFFFFFFF) | second


@triton.jit
def store_pairs(out, words, low, word_count):
    """Stores the words of pairs that lie within a tensor, which may end between the two of a pair."""
    tl.store(out + low, words.to(tl.int32), mask=low < word_count)
    tl.store(out + low + 1, (words >> 32).to(tl.int32), mask=low + 1 < word_count)


def launch_flat(
    inbox: Inbox, rank: int, patience: int, x: Tensor, kind: Literal["sum", "gather", "all_to_all"], rows: int = 1
) -> Tensor:
    """The sum of all ranks' x; or x of all ranks, [N, *x.shape]; or what each rank has for this one, where x is [N, ...].

    rows: into how many x is cut for a gather, which then has the first row of every rank, the second of every rank, and so on.
    A row has an even number of words, or is all.
    patience: in nanoseconds.  x: whole words, at most as many as the channels' messages; with "all_to_all" for each rank.
    """
    x, layout = x.contiguous(), inbox.layout
    words = x.flatten().view(torch.int32)
    out = torch.empty((layout.ranks, *x.shape) if kind == "gather" else x.shape, dtype=x.dtype, device=x.device)
    count = len(words) // layout.ranks if kind == "all_to_all" else len(words)
    pairs = triton.cdiv(count, 2)
    block = max(32, min(BLOCK, triton.next_power_of_2(pairs)))
    blocks = triton.cdiv(pairs, block)
    turns = triton.next_power_of_2(triton.cdiv(blocks, layout.channels))
    assert turns * block * 2 <= layout.capacity
    flat_kernel[(min(blocks, layout.channels),)](
        words, out.flatten().view(torch.int32), inbox.table_X, inbox.counts_C, patience, count, count // rows,
        RANK=rank, RANKS=layout.ranks, CAPACITY=layout.capacity, BLOCK=block, TURNS=turns, KIND=kind, SYS=x.is_cuda,
        DTYPE=DTYPES[x.dtype] if kind == "sum" else tl.int32, num_warps=max(1, block // 128), **chained(x.device),
    )  # fmt: skip
    return out
