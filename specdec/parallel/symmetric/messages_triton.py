"""How programs of two GPUs pass words to each other: what every kernel of this folder is made of.

Each rank holds an inbox, memory that all ranks' GPUs can write.  A message is one store of 64 bits: a word of 32 bits and,
above it, the number of the call it belongs to.  Who finds the right number therefore has the word too, so that a message needs
no fence, no second trip, and no clearing.

Programs exchange by channels.  Channel c of a rank talks to channel c of each other rank, and counts its calls in memory of its
own (`counts`), so that eager calls and replays of CUDA graphs follow each other in any order.  Calls alternate between two
halves of the inbox.  One rank may be a call ahead of another, but not two: a call ends only after all ranks have begun it, and
a rank begins a call only after its last one has ended.  So when a rank writes into a half, its owner has read what the half
held before.

A rank that never comes must not hold the GPU for ever.  After `patience` nanoseconds of waiting a program writes the missing
rank's number + 1 into `fault`, a word of the host's memory, and goes on with whatever it found.  Once fault is set, by a
program or by the host, no program waits for long.

SYS: whether the ranks are GPUs.  If not, the same kernels run in Triton's interpreter, over memory that processes share.

Numbers that all ranks must choose alike: RANKS; CAPACITY, words of a channel's message area for each sender.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
LOOK = tl.constexpr(256)  # a program that waits looks at the clock and at `fault` once in this many tries


@triton.jit
def lanes(COUNT: tl.constexpr, SYS: tl.constexpr):
    """0 ... COUNT - 1, neighbours in neighbouring lanes.

    The compiler must not see that they are consecutive: it would give each thread several neighbours, so as to load 16 bytes at
    once, and a warp's messages, 8 bytes each, would lie apart.  Over NVLink whole lines count.
    """
    index = tl.arange(0, COUNT)
    if SYS:
        index = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=True, pack=1)
    return index


@triton.jit
def call_number(count):
    """What the messages of a channel's next call are marked with: never 0, which new memory holds."""
    return count.to(tl.int64) + 1


@triton.jit
def next_count(count):
    return (count + 1) & 0x7FFFFFFF  # an even number of calls until it starts again, so the halves keep alternating


@triton.jit
def place(channel, count, SENDER: tl.constexpr, RECEIVER: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Where in the receiver's inbox the words of a sender lie.  A rank sends nothing to itself, so RANKS - 1 areas do."""
    area: tl.constexpr = SENDER - 1 if SENDER > RECEIVER else SENDER
    return ((channel * 2 + (count & 1)) * (RANKS - 1) + area).to(tl.int64) * CAPACITY


@triton.jit
def send(at, words, number, SYS: tl.constexpr):
    """Stores messages: at: pointers to int64; words: int32."""
    message = (words.to(tl.int64) & 0xFFFFFFFF) | (number << 32)
    if SYS:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;", "=r,l,l", [at, message],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, message)


@triton.jit
def send_last(at, number, SYS: tl.constexpr):
    """Stores one message, without a word, that is seen only after everything the program has stored before.  at: a scalar."""
    if SYS:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.b32 thread, %tid.x;
            setp.eq.b32 first, thread, 0;
            @first st.release.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l", [at, number << 32], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at, number << 32)


@triton.jit
def look(at, ACQUIRE: tl.constexpr, SYS: tl.constexpr):
    """The messages as they are now.  ACQUIRE: what the sender stored before them may be read after them."""
    if SYS:
        load: tl.constexpr = "ld.acquire.sys.global.b64 $0, [$1];" if ACQUIRE else "ld.relaxed.sys.global.b64 $0, [$1];"
        message = tl.inline_asm_elementwise(load, "=l,l", [at], dtype=tl.int64, is_pure=False, pack=1)
    else:
        message = tl.load(at)
    return message


@triton.jit
def clock(at, SYS: tl.constexpr):
    """Nanoseconds, for each element of `at`."""
    if SYS:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,l", [at], dtype=tl.int64, is_pure=False, pack=1)
    else:
        now = tl.zeros_like(at.to(tl.int64))
    return now


@triton.jit
def receive(at, number, fault, patience, SENDER: tl.constexpr, ACQUIRE: tl.constexpr, SYS: tl.constexpr):
    """The words of a sender's messages, as soon as all of them are there.  at: pointers to int64, one or more for each thread.

    Threads must leave the loop together, so whatever they decide by is reduced over all of them.
    """
    message = look(at, ACQUIRE, SYS)
    waiting = tl.max(((message >> 32) != number).to(tl.int32), 0)
    tries = 0
    began = tl.full([], 0, tl.int64)
    while waiting > 0:
        message = look(at, ACQUIRE, SYS)
        waiting = tl.max(((message >> 32) != number).to(tl.int32), 0)
        tries += 1
        if waiting > 0 and tries % LOOK == 0:
            now = tl.max(clock(at, SYS), 0)
            if tries == LOOK:
                began = now
            stopped = tl.max(tl.load(fault + tl.zeros_like(message), volatile=True), 0)
            if stopped != 0:
                waiting = 0
            elif now - began > patience:
                tl.store(fault, SENDER + 1)
                waiting = 0
    return message.to(tl.int32)


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """The numbers that words hold, in float32: one for each word of 32 bits, or [words, 2]."""
    if DTYPE.primitive_bitwidth == 32:
        numbers = words.to(tl.float32, bitcast=True)
    else:
        numbers = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(DTYPE, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def pack(numbers, DTYPE: tl.constexpr):
    """The words that hold these numbers, rounded."""
    if DTYPE.primitive_bitwidth == 32:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(numbers.to(DTYPE).to(tl.int16, bitcast=True))
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return words
