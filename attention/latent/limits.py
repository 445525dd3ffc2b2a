"""How large a pass of latent attention has to be before it is computed in another form, and how much of it at once.

This module knows no form.  (Measured: benchmarks/latent/README.md, "Why the tiles and rules are what they are".)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """expand_above: queries a row above which a prompt's latents are expanded.  Prompts in captured graphs must not pass it
        (`most_captured_cost`): the host decides into how many chunks the cached part of a row is cut, and a graph would freeze
        that number.
    expanded_tokens: cached latents expanded at once, over all rows: with DeepSeek's 128 heads they take 400 MB in bf16.
    convert_from: queries a row from which on latents in 8 bits are converted first.
    workspace_tokens: latents converted at once; with DeepSeek's dims they take 75 MB in bf16.  A single row may be longer.
    absorbed: numbers of absorbed queries at once where each token reads keys of its own.  They are four times as wide as the
        queries that they are made from, so a long prompt's take turns: at DeepSeek's dims 910 tokens, in 134 MB.
    """

    expand_above: int = 512
    expanded_tokens: int = 4096
    convert_from: int = 32
    workspace_tokens: int = 65536
    absorbed: int = 1 << 26


LIMITS = Limits()
