"""How programs of two GPUs pass words to each other: what every kernel of this folder is made of.

Each rank holds an inbox, memory that all ranks' GPUs can write.  A message is 64 bits that are written at once: a word of 32
bits and, above it, the number of the call it belongs to.  Who finds the right number therefore has the word too, so that a
message needs no fence, no second trip, and no clearing.  Messages go in pairs, 16 bytes a thread.

Programs exchange by channels.  Channel c of a rank talks to channel c of each other rank, and counts its calls in memory of its
own (`counts`), so that eager calls and replays of CUDA graphs follow each other in any order.  Calls alternate between two
halves of the inbox.  One rank may be a call ahead of another, but not two: a call ends only after all ranks have begun it, and
a rank begins a call only after its last one has ended.  So when a rank writes into a half, its owner has read what the half
held before.

A rank that never comes must not hold the GPU for ever.  After `patience` nanoseconds of waiting a program writes the missing
rank's number + 1 into `fault`, a word of the host's memory, and goes on with words of ones, which are NaN in every dtype; so
nobody takes what follows for numbers, on other ranks either.  Once fault is set, by a program or by the host, no program waits
for long.

SYS: whether the ranks are GPUs.  If not, the same kernels run in Triton's interpreter, over memory that processes share.

Numbers that all ranks must choose alike: RANKS; CAPACITY, words of a channel's message area for each sender.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LOOK = tl.constexpr(1024)  # a program that waits looks at the clock and at `fault` once in this many tries


@triton.jit
def lanes(COUNT: tl.constexpr, SYS: tl.constexpr):
    """0 ... COUNT - 1, neighbours in neighbouring lanes.

    The compiler must not see that they are consecutive: it would give each thread several neighbours, so as to load 16 bytes at
    once, and a warp's messages, which are twice as long, would lie apart.  Over NVLink whole lines count.
    """
    index = tl.arange(0, COUNT)
    if SYS:
        index = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)
    return index


@triton.jit
def call_number(count):
    """What the messages of a channel's next call are marked with: never 0, which new memory holds."""
    return count + 1


@triton.jit
def next_count(count):
    return (count + 1) & 0x3FFFFFFF  # an even number of calls until it starts again, so the halves keep alternating


@triton.jit
def place(channel, count, SENDER: tl.constexpr, RECEIVER: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Where in the receiver's inbox the words of a sender lie.  A rank sends nothing to itself, so RANKS - 1 areas do."""
    area: tl.constexpr = SENDER - 1 if SENDER > RECEIVER else SENDER
    return ((channel * 2 + (count & 1)) * (RANKS - 1) + area).to(tl.int64) * CAPACITY


@triton.jit
def send(at, words, number, SYS: tl.constexpr):
    """Stores messages.  at: pointers to int64, two for each pair of words.  words: pairs, as int64."""
    if SYS:
        tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            .reg .b64 first, second;
            mov.b64 {low, high}, $2;
            mov.b64 first, {low, $3};
            mov.b64 second, {high, $3};
            st.relaxed.sys.global.v2.b64 [$1], {first, second};
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r", [at, words, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        mark = number.to(tl.int64) << 32
        tl.store(at, (words & 0xFFFFFFFF) | mark)
        tl.store(at + 1, ((words >> 32) & 0xFFFFFFFF) | mark)


@triton.jit
def send_last(at, number, SYS: tl.constexpr):
    """Stores a number that is seen only after everything the program has stored before.  at: a pointer to int32."""
    if SYS:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.b32 thread, %tid.x;
            setp.eq.b32 first, thread, 0;
            @first st.release.sys.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [at, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, number)


@triton.jit
def load_two(at, SYS: tl.constexpr):
    """The pairs at these pointers and at the next ones, in one load of 16 bytes."""
    if SYS:
        first, second = tl.inline_asm_elementwise(
            "ld.global.v2.b64 {$0, $1}, [$2];", "=l,=l,l", [at], dtype=(tl.int64, tl.int64), is_pure=False, pack=1
        )
    else:
        first, second = tl.load(at), tl.load(at + 1)
    return first, second


@triton.jit
def store_two(at, first, second, SYS: tl.constexpr):
    if SYS:
        tl.inline_asm_elementwise(
            "st.global.v2.b64 [$1], {$2, $3}; mov.b32 $0, 0;", "=r,l,l,l", [at, first, second],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, first)
        tl.store(at + 1, second)


@triton.jit
def look_last(at, SYS: tl.constexpr):
    """The numbers that `send_last` has stored.  What was stored before them may be read after them."""
    if SYS:
        number = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        number = tl.load(at)
    return number


@triton.jit
def look(at, SYS: tl.constexpr):
    """(pairs of words, the numbers they are marked with) as they are now.  A pair whose numbers differ has number 0."""
    if SYS:
        words, number = tl.inline_asm_elementwise(
            """{
            .reg .pred same;
            .reg .b32 low, high, mark, other;
            .reg .b64 first, second;
            ld.relaxed.sys.global.v2.b64 {first, second}, [$2];
            mov.b64 {low, mark}, first;
            mov.b64 {high, other}, second;
            mov.b64 $0, {low, high};
            setp.eq.b32 same, mark, other;
            selp.b32 $1, mark, 0, same;
            }""",
            "=l,=r,l", [at], dtype=(tl.int64, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        first, second = tl.load(at), tl.load(at + 1)
        words = (first & 0xFFFFFFFF) | (second << 32)
        number = tl.where((first >> 32) == (second >> 32), (first >> 32).to(tl.int32), 0)
    return words, number


@triton.jit
def clock(at, SYS: tl.constexpr):
    """Nanoseconds where the program's first thread is, 0 elsewhere.  at: says for which elements."""
    if SYS:
        now = tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.b32 thread, %tid.x;
            setp.eq.b32 first, thread, 0;
            mov.b64 $0, 0;
            @first mov.u64 $0, %globaltimer;
            }""",
            "=l,l", [at], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        now = tl.zeros_like(at.to(tl.int64))
    return now


@triton.jit
def receive(at, number, index, fault, patience, SENDER: tl.constexpr, LAST: tl.constexpr, SYS: tl.constexpr):
    """A sender's pairs of words, as soon as all of them are there.  at: pointers as of `send`.  index: the pairs' numbers.

    LAST: `at` are pointers to one number of `send_last` instead, and the words are 0.

    Threads must leave the loop together, so whatever they decide by is reduced over all of them.  One thread alone reads
    `fault`: the host's memory is far away, and ranks that are slow to look make each other wait, and so look again.
    """
    words = tl.zeros_like(index).to(tl.int64)
    waiting = 1
    tries = 0
    began = tl.full([], 0, tl.int64)
    lost = tl.full([], 0, tl.int64)
    while waiting > 0:
        if LAST:
            marks = look_last(at, SYS)
        else:
            words, marks = look(at, SYS)
        waiting = tl.max((marks != number).to(tl.int32), 0)
        tries += 1
        if waiting > 0 and tries % LOOK == 0:
            now = tl.max(clock(at, SYS), 0)
            if tries == LOOK:
                began = now
            stopped = tl.sum(tl.load(fault + index * 0, mask=index == 0, other=0, volatile=True), 0)
            if stopped != 0 or now - began > patience:
                if stopped == 0:
                    tl.store(fault, SENDER + 1)
                waiting = 0
                lost = tl.full([], -1, tl.int64)
    return words | lost


# On a GPU numbers of 16 bits are neither taken apart nor put together by conversions of Triton.  The compiler would make sums
# in bfloat16 of them, and then ptxas, as Triton 3.6 brings it, loses halves of words that it had put together.


@triton.jit
def unpack(words, DTYPE: tl.constexpr, SYS: tl.constexpr):
    """The numbers that pairs of words hold, in float32: [pairs, 2, 2], or [pairs, 2] for a dtype of 32 bits."""
    halves = tl.join(words.to(tl.int32), (words >> 32).to(tl.int32))
    if DTYPE.primitive_bitwidth == 32:
        numbers = halves.to(tl.float32, bitcast=True)
    elif SYS and DTYPE == tl.bfloat16:
        numbers = tl.join(halves << 16, halves & -65536).to(tl.float32, bitcast=True)
    elif SYS:
        low, high = tl.inline_asm_elementwise(
            "{.reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}",
            "=r,=r,r", [halves], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        numbers = tl.join(low, high)
    else:
        numbers = tl.join(halves.to(tl.int16), (halves >> 16).to(tl.int16)).to(DTYPE, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def pack(numbers, DTYPE: tl.constexpr, SYS: tl.constexpr):
    """The pairs of words that hold these numbers, rounded."""
    if DTYPE.primitive_bitwidth == 32:
        halves = numbers.to(tl.int32, bitcast=True)
    elif SYS:
        low, high = tl.split(numbers)
        convert: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == tl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
        halves = tl.inline_asm_elementwise(convert, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low, high = tl.split(numbers.to(DTYPE).to(tl.int16, bitcast=True))
        halves = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    first, second = tl.split(halves)
    return (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
