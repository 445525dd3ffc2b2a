"""What the kernels of rounds read of a state: its rows, with what the accepted nodes of the pending path add.

Everything here was written a round ago, so it is read before a kernel's wait, from L2.

Shapes: as of states.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def states_with_paths(
    state_KV, k_left, u_left, decay_left, path, accepted,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The blocks of rows of a state, with what the accepted nodes add.  The pointers: at their number, head and columns.

    Without an accepted node nothing is read of the number but the state: it may be one that holds no nodes.
    GROUP: accepted nodes that are read at once.
    """
    end = tl.load(path + accepted - 1, mask=accepted > 0, other=0, cache_modifier=".cg")
    last = tl.load(decay_left + end * H, mask=accepted > 0, other=0.0, cache_modifier=".cg")
    tiles = ()
    for step in tl.static_range(K // BLOCK_K):
        tiles = tiles + (tl.exp(last) * tl.load(state_KV + step * BLOCK_K * V, cache_modifier=".cg"),)  # type: ignore[assignment]
    for first in range(0, accepted, GROUP):
        for e in tl.static_range(GROUP):  # all of which are read at once
            ok = first + e < accepted
            node = tl.load(path + first + e, mask=ok, other=0, cache_modifier=".cg")
            decay = tl.load(decay_left + node * H, mask=ok, other=float("inf"), cache_modifier=".cg")
            u_V = tl.load(u_left + node * H * V, mask=ok, other=0.0, cache_modifier=".cg") * tl.exp(last - decay)
            k_K = k_left + node * G * K + tl.arange(0, BLOCK_K)
            added = ()
            for step in tl.static_range(K // BLOCK_K):
                part_K = tl.load(k_K + step * BLOCK_K, mask=ok, other=0.0, cache_modifier=".cg")
                added = added + (tiles[step] + part_K[:, None] * u_V[None, :],)  # type: ignore[assignment]
            tiles = added
    return tiles
