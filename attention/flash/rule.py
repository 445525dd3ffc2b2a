"""Where a flash-attn library shape a prefix faster than specdec's kernel, decided by shapes that the host knows.

Each rule holds for the kind of GPU on which it was measured, with heads of 128 (benchmarks/layers/README.md, "Why the tiles and
rules are what they are").  On other GPUs, and for other heads, `auto` takes no library.  This module imports no library.
"""

from __future__ import annotations

from typing import NamedTuple

MEASURED_HEAD_DIM = 128
MEASURED = {"H100": "fa4", "H200": "fa3"}  # the library whose rule was measured on each kind of GPU

# flash-attn 4 on an H100.  A program handles a tile of TILE queries x heads (packed GQA) and all keys of a row: the GPU
# idles where there are fewer programs than SMs, and a program is half empty where a row has fewer queries x heads.
TILE = 128
MIN_TILES = 128  # threshold: about as many programs as an H100 has SMs (132)
LONG = 4096  # threshold in tokens: shorter sequences never win a library's start-up time back

# flash-attn 3 on an H200.  It has more to do before its first product than our kernel, and more products a second after it.
MIN_SEQLEN_Q_PACKGQA = 240  # threshold in queries x heads: with 64, both libraries wait for memory
MIN_PRODUCTS = 2**22  # threshold in pairs of a key and a query x head
MIN_WINDOW_PRODUCTS = 2**20  # the same where a query reads no more keys than a window has: those that are skipped cost too
MIN_SHARED_PACKGQA = 2048  # of a prefix that rows share, threshold in all rows' queries x heads: with 768 the GPU idles


class AttentionShape(NamedTuple):
    """A call's shape: `rows` sequences of `keys` keys.

    seqlen_q_packgqa: flash-attn's name for a row's queries x query heads of a kv head, which share that head's keys in one tile
        (packed GQA).

    keys: where the queries read their own keys too, causally, what a row is known to hold; else an upper bound.
    window: whether each query reads the last `keys` keys up to its own.
    shared: whether the one row is a prefix that several sequences share; its queries are those of all of them.
    """

    rows: int
    kv_heads: int
    seqlen_q_packgqa: int
    keys: int
    window: bool = False
    shared: bool = False


def is_faster(library: str, gpu: str, shape: AttentionShape) -> bool:
    """Whether the library has measured faster than specdec's kernel for such a call on that kind of GPU."""
    if MEASURED.get(gpu) != library:
        return False
    if library == "fa4":
        if shape.window or shape.shared:
            return False  # nobody measured them
        return shape.seqlen_q_packgqa > TILE and shape.rows * shape.kv_heads * -(-shape.seqlen_q_packgqa // TILE) >= MIN_TILES
    min_packgqa = MIN_SHARED_PACKGQA if shape.shared else MIN_SEQLEN_Q_PACKGQA
    min_products = MIN_WINDOW_PRODUCTS if shape.window else MIN_PRODUCTS
    return shape.seqlen_q_packgqa >= min_packgqa and shape.rows * shape.keys * shape.seqlen_q_packgqa >= min_products


def why(gpu: str, shape: AttentionShape, tree: bool) -> str:
    """The reason for which `auto` takes the library that was measured on this GPU; the empty string if it takes none.

    shape: the most sequences, the most tokens of one, and a row's queries x heads of a kv head in a pass of the target.
    tree: whether that pass answers a draft tree.  flash-attn 4 is taken for trees alone, and then reads prompts too: it
        takes seconds to import and to compile.
    """
    library = MEASURED.get(gpu)
    if library is None:
        return ""
    is_long, read = shape.keys >= LONG, f"prefixes of up to {shape.rows} trees ({shape.seqlen_q_packgqa} queries x heads a key)"
    if tree and is_faster(library, gpu, shape) and (is_long or library == "fa3"):
        read += " and long prompts"
    elif is_long and library == "fa3":
        read = "long prompts"
    else:
        return ""
    return f"flash-attn {library[2:]} reads {read}; specdec's kernels read the rest"
