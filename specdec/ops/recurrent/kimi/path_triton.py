"""What the accepted nodes of the pending path add to a state of Kimi's rule, each of whose rows fades by itself.

As trees/path_triton.py has it, where a head fades as a whole: all was written a round ago, and all loads are on their way
before the first number is needed.

Shapes: as of states.py, with G = H.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_kimi_path(
    k_left, u_left_V, decay_left, path, first, accepted,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(log-decays [K], u [V], keys [K]) of GROUP accepted nodes from number `first` on, and the last one's log-decays [K].

    All [K] in blocks.  Zeros, and infinite decays, of nodes that are not accepted.  The pointers: at their number, head and
    columns.
    """
    nodes, decays, added, keys, last, k = (), (), (), (), (), tl.arange(0, BLOCK_K)
    end = tl.load(path + accepted - 1, mask=accepted > 0, other=0, cache_modifier=".cg")
    for e in tl.static_range(GROUP):
        nodes = nodes + (tl.load(path + first + e, mask=first + e < accepted, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
    for step in tl.static_range(K // BLOCK_K):
        from_last = decay_left + end * H * K + step * BLOCK_K + k
        last = last + (tl.load(from_last, mask=accepted > 0, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    for e in tl.static_range(GROUP):
        ok = first + e < accepted
        added = added + (tl.load(u_left_V + nodes[e] * H * V, mask=ok, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        for step in tl.static_range(K // BLOCK_K):
            at = nodes[e] * H * K + step * BLOCK_K + k
            keys = keys + (tl.load(k_left + at, mask=ok, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
            decay = tl.load(decay_left + at, mask=ok, other=float("inf"), cache_modifier=".cg")
            decays = decays + (decay,)  # type: ignore[assignment]
    return decays, added, keys, last


@triton.jit
def add_kimi_path(tiles, decays, added, keys, last, STEPS: tl.constexpr, GROUP: tl.constexpr):
    """The blocks with what those nodes add, faded to the end of the path."""
    for e in tl.static_range(GROUP):
        grown = ()
        for step in tl.static_range(STEPS):
            k_K = keys[e * STEPS + step] * tl.exp(last[step] - decays[e * STEPS + step])
            grown = grown + (tiles[step] + k_K[:, None] * added[e][None, :],)  # type: ignore[assignment]
        tiles = grown
    return tiles


@triton.jit
def kimi_faded(tiles, last, STEPS: tl.constexpr):
    """The blocks, as they fade along the pending path."""
    less = ()
    for step in tl.static_range(STEPS):
        less = less + (tiles[step] * tl.exp(last[step])[:, None],)  # type: ignore[assignment]
    return less


@triton.jit
def add_kimi_rest(
    tiles, k_left, u_left_V, decay_left, path, accepted,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The blocks with what accepted nodes after the first GROUP add."""
    for first in range(GROUP, accepted, GROUP):
        decays, added, keys, last = read_kimi_path(
            k_left, u_left_V, decay_left, path, first, accepted, H, K, V, GROUP, BLOCK_K
        )  # fmt: skip
        tiles = add_kimi_path(tiles, decays, added, keys, last, K // BLOCK_K, GROUP)
    return tiles
