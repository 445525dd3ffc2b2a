"""Where a flash-attn library reads a prefix faster than specdec's kernel, decided by shapes that the host knows.

Each rule holds for the kind of GPU on which it was measured, with heads of 128 (benchmarks/layers/README.md, "Why the tiles and
rules are what they are").  On other GPUs, and for other heads, `auto` takes no library.  This module imports no library.
"""

from __future__ import annotations

from typing import NamedTuple

MEASURED_HEAD_DIM = 128
MEASURED = {"H100": "fa4", "H200": "fa3"}  # the library whose rule was measured on each kind of GPU

# flash-attn 4 on an H100.  A program handles TILE packed queries x heads and all keys of a row: the GPU idles where there are
# fewer programs than SMs, and a program is half empty where a row packs fewer queries.
TILE = 128
MIN_TILES = 128  # threshold: about as many programs as an H100 has SMs (132)
LONG = 4096  # threshold in tokens: shorter sequences never win a library's start-up time back

# flash-attn 3 on an H200.  It has more to do before its first product than our kernel, and more products a second after it.
MIN_PACKED = 128  # threshold in queries x heads: with fewer, both libraries wait for memory
MIN_PRODUCTS = 2**23  # threshold in pairs of a key and a query x head
MIN_PROMPT_PRODUCTS = 2**22  # the same for prompts, whose number of keys the host knows; of trees it knows an upper bound


class Reads(NamedTuple):
    """A call's shape: `rows` sequences of `keys` keys, and in each row `packed` queries x heads that share a kv head's keys.

    prompts: whether the queries read their own keys too, causally, as chunks of prompts do.  `keys` is then what a row is known
        to hold, and no upper bound.
    """

    rows: int
    kv_heads: int
    packed: int
    keys: int
    prompts: bool = False


def is_faster(library: str, gpu: str, reads: Reads) -> bool:
    """Whether the library has measured faster than specdec's kernel for such a call on that kind of GPU."""
    if MEASURED.get(gpu) != library:
        return False
    if library == "fa4":
        return reads.packed > TILE and reads.rows * reads.kv_heads * -(-reads.packed // TILE) >= MIN_TILES
    least = MIN_PROMPT_PRODUCTS if reads.prompts else MIN_PRODUCTS
    return reads.packed >= MIN_PACKED and reads.rows * reads.keys * reads.packed >= least


def why(gpu: str, reads: Reads, tree: bool) -> str:
    """The reason for which `auto` takes the library that was measured on this GPU; the empty string if it takes none.

    reads: the most sequences, the most tokens of one, and the packed queries of a pass of the target.
    tree: whether that pass answers a draft tree.  flash-attn 4 is taken for trees alone, and then reads prompts too: it
        takes seconds to import and to compile.
    """
    library = MEASURED.get(gpu)
    if library is None:
        return ""
    is_long, read = reads.keys >= LONG, f"prefixes of up to {reads.rows} trees ({reads.packed} queries x heads a key)"
    if tree and is_faster(library, gpu, reads) and (is_long or library == "fa3"):
        read += " and long prompts"
    elif is_long and library == "fa3":
        read = "long prompts"
    else:
        return ""
    return f"flash-attn {library[2:]} reads {read}; specdec's kernels read the rest"
