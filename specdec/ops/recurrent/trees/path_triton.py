"""What the kernels of rounds read of a state: its rows, and what the accepted nodes of the pending path add.

Everything here was written a round ago, so it is read before a kernel's wait, from L2.  Reading and adding are apart, so that
all loads are on their way before the first number is needed: a program waits for memory three times, whatever the path.

Shapes: as of states.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_state(state_KV, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Blocks of rows of a state, from the first row's pointers on."""
    tiles = ()
    for step in tl.static_range(K // BLOCK_K):
        tiles = tiles + (tl.load(state_KV + step * BLOCK_K * V, cache_modifier=".cg"),)  # type: ignore[assignment]
    return tiles


@triton.jit
def read_path(
    k_left, u_left_V, decay_left, path, first, accepted,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(log-decays, u [V], keys [K] in blocks) of GROUP accepted nodes from number `first` on, and the last one's log-decay.

    Zeros, and infinite decays, of nodes that are not accepted.  The pointers: at their number, head and columns.
    """
    nodes, decays, added, keys = (), (), (), ()
    end = tl.load(path + accepted - 1, mask=accepted > 0, other=0, cache_modifier=".cg")
    for e in tl.static_range(GROUP):
        nodes = nodes + (tl.load(path + first + e, mask=first + e < accepted, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
    last = tl.load(decay_left + end * H, mask=accepted > 0, other=0.0, cache_modifier=".cg")
    for e in tl.static_range(GROUP):
        ok = first + e < accepted
        decay = tl.load(decay_left + nodes[e] * H, mask=ok, other=float("inf"), cache_modifier=".cg")
        decays, from_k = decays + (decay,), k_left + nodes[e] * G * K + tl.arange(0, BLOCK_K)  # type: ignore[assignment]
        added = added + (tl.load(u_left_V + nodes[e] * H * V, mask=ok, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
        for step in tl.static_range(K // BLOCK_K):
            keys = keys + (tl.load(from_k + step * BLOCK_K, mask=ok, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return decays, added, keys, last


@triton.jit
def add_path(tiles, decays, added, keys, last, STEPS: tl.constexpr, GROUP: tl.constexpr):
    """The blocks with what those nodes add, faded to the end of the path."""
    for e in tl.static_range(GROUP):
        u_V = added[e] * tl.exp(last - decays[e])
        grown = ()
        for step in tl.static_range(STEPS):
            grown = grown + (tiles[step] + keys[e * STEPS + step][:, None] * u_V[None, :],)  # type: ignore[assignment]
        tiles = grown
    return tiles


@triton.jit
def faded(tiles, last, STEPS: tl.constexpr):
    """The blocks, as they fade along the pending path."""
    factor, less = tl.exp(last), ()
    for step in tl.static_range(STEPS):
        less = less + (tiles[step] * factor,)  # type: ignore[assignment]
    return less


@triton.jit
def add_rest(
    tiles, k_left, u_left_V, decay_left, path, accepted,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The blocks with what accepted nodes after the first GROUP add."""
    for first in range(GROUP, accepted, GROUP):
        decays, added, keys, last = read_path(
            k_left, u_left_V, decay_left, path, first, accepted, G, H, K, V, GROUP, BLOCK_K
        )  # fmt: skip
        tiles = add_path(tiles, decays, added, keys, last, K // BLOCK_K, GROUP)
    return tiles
