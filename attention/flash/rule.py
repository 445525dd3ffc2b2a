"""Where flash-attn 4 reads a prefix faster than specdec's kernel, decided by shapes that the host knows.

A program of flash-attn 4 handles 128 packed rows (queries x heads) and all keys of a row.  The GPU idles where there are fewer
programs than SMs, and a program is half empty where a row packs fewer queries.  `auto` takes flash-attn 4 for large trees over
long sequences, and then for prompts too; it does not for prompts alone, because its start-up costs seconds.  Measured on an
H100: benchmarks/README.md, "Why the tiles and rules are what they are".  This module imports no library.
"""

from __future__ import annotations

TILE = 128  # packed queries x heads of one program
LEAST_TILES = 128  # threshold: about as many programs as an H100 has SMs (132)
MEASURED_HEAD_DIM = 128  # the rule was measured for this head dim only
LONG = 4096  # threshold in tokens: rounds over shorter sequences never win the start-up time back


def fa4_is_faster(rows: int, kv_heads: int, packed: int) -> bool:
    """rows: sequences.  packed: a row's queries times the heads of a group, all of which read the same keys."""
    return packed > TILE and rows * kv_heads * -(-packed // TILE) >= LEAST_TILES


def why_fa4(rows: int, kv_heads: int, packed: int, tokens: int) -> str:
    """The reason for which `auto` takes flash-attn 4; the empty string if it does not.

    rows, tokens: the most sequences, and the most tokens of one.
    packed: a tree's queries times the heads of a group.
    """
    if tokens < LONG or not fa4_is_faster(rows, kv_heads, packed):
        return ""
    read = f"prefixes of up to {rows} trees ({packed} queries x heads a key) and long prompts"
    return f"flash-attn 4 reads {read}; specdec's kernels read the rest"
