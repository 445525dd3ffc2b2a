"""How large a pass of latent attention has to be before it is computed in another form, how much of it at once, and into how
many splits.

This module knows no form.  (Measured: benchmarks/latent/README.md, "Why the tiles and rules are what they are".)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Limits:
    """expand_above: queries a row above which a prompt's latents are expanded.  Prompts in captured graphs must not pass it
        (`max_captured_cost`): the host decides into how many chunks the cached part of a row is cut, and a graph would freeze
        that number.
    expanded_tokens: cached latents expanded at once, over all rows: with DeepSeek's 128 heads they take 400 MB in bf16.
    convert_from: queries a row from which on latents in 8 bits are converted first.
    workspace_tokens: latents converted at once; with DeepSeek's dims they take 75 MB in bf16.  A single row may be longer.
    selected_tokens: latents converted at most where queries select keys, of all rows at once; with DeepSeek's dims they take
        302 MB in bf16.
    converted_a_query: tokens converted at most for each query of the pass.  A short chunk of a long text would lose more by the
        conversion than its queries gain.
    absorbed: elements of absorbed queries at once where each token reads keys of its own.  They are four times as wide as the
        queries that they are made from, so a long prompt is processed in parts: at DeepSeek's dims of 910 tokens, in 134 MB.
    """

    expand_above: int = 512
    expanded_tokens: int = 4096
    convert_from: int = 32
    workspace_tokens: int = 65536
    selected_tokens: int = 1 << 18
    converted_a_query: int = 512
    absorbed: int = 1 << 26


LIMITS = Limits()


@lru_cache
def latent_splits(num_tiles: int, max_keys: int, min_split_keys: int, programs: int, max_splits: int = 64) -> int:
    """The number of splits that takes the least time by a simple model, counted in the time of one block of 64 keys.

    In the model a program's start and end take three blocks, the merge's launch takes one, and writing and reading one state of
    a tile takes 1 / 40.
    num_tiles: tiles of all rows.
    max_keys: the table's capacity in keys; only the device knows the rows' lengths.  A short row uses the first few splits.
    min_split_keys: the fewest keys of a split.  max_splits: the most splits.
    """

    def blocks(splits: int) -> float:
        waves = -(-num_tiles * splits // programs)
        merge = 0.0 if splits == 1 else 1 + num_tiles * splits / 40
        return waves * (-(-max_keys // (64 * splits)) + 3) + merge

    return min(range(1, max(1, min(-(-max_keys // min_split_keys), max_splits)) + 1), key=blocks)
