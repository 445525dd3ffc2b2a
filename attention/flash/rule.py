"""Where flash-attn 4 measured faster than our kernel, by shapes that the host knows.  Imports no library.

benchmarks/flash.py on an H100 (benchmarks/results/flash_h100.json; bf16, 32/8 heads of 128, pages of 16), 107 cells with our
suffix and merge on both sides.  A program of flash-attn 4 holds 128 queries x heads of all a row's keys: the GPU idles where
there are fewer programs than its 132 SMs, and they are half empty where rows hold fewer queries.  From 128 programs on, with
more than one to a row, it ran 1.04 to 1.43 times as fast as ours for trees, 0.98 to 1.74 times for prompts; elsewhere 0.12 to
1.04 times (1.17 in one cell of 4 M tokens).

Whole rounds of the Llama-3.1-8B shape, 64 nodes: batch 8 at 8k tokens 21.5 to 19.8 ms, batch 32 at 2k 60.4 to 58.1, batch 8 at
1k no change; a prompt of 8k tokens 234 to 213 ms.  It costs seconds at the start: 6 s to import, and 2.1 to 2.9 s to compile
each of two kinds of call, which 6,000 of those first rounds win back.  So `auto` takes it for trees of that size over long
sequences, and then for prompts too; for prompts alone it does not.
"""

from __future__ import annotations

TILE = 128  # queries x heads
LEAST_TILES = 128
MEASURED_HEAD_DIM = 128  # the rule speaks of no other
LONG = 4096  # tokens: shorter sequences never win the start-up back


def fa4_is_faster(rows: int, kv_heads: int, packed: int) -> bool:
    """rows: sequences.  packed: queries x heads of a group, which read the same keys."""
    return packed > TILE and rows * kv_heads * -(-packed // TILE) >= LEAST_TILES


def why_fa4(rows: int, kv_heads: int, packed: int, tokens: int) -> str:
    """Why `auto` takes it, for up to so many sequences of so many tokens and a tree's packed queries; empty if it does not."""
    if tokens < LONG or not fa4_is_faster(rows, kv_heads, packed):
        return ""
    return f"flash-attn 4 reads prefixes of up to {rows} trees, {packed} queries x heads a key, and long prompts; ours the rest"
