"""Launches the kernels of `ssd.chunk_outputs`.

1. ssd_prepare_triton.py, a program for each block and some heads of a group: what needs no state.  With F_ij =
   exp(D_i - D_j), of the block's summed log-decays, it leaves A = the lower part of F_ij q_i k_j dt_j, with the head's own
   factor of x on its diagonal, and two factors a token.
2. ssd_scan_triton.py, a program for each head and some columns of values, goes through the blocks one after the other:
   out = faded q S + A x, S = faded S + k^T (faded dt x).  Its next blocks' loads run ahead.  Long parts are cut into stretches,
   which take a launch more, and then run beside each other.

Precision, of bfloat16: k, q and x are exact, and a float32 number beside one of them goes in as two bfloat16 halves, whose sum
has 17 bits; A goes into outputs alone, and is rounded to bfloat16 as they are.  Of float16 and float32 everything is float32:
PRECISION.

Shapes: as of specdec/ops/recurrent/ssd.py; N tokens of a block.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import chained, shared_memory
from specdec.ops.recurrent.chunks.launch import ELSEWHERE, RESERVED, SEARCH, WIDE, ChunkTiles
from specdec.ops.recurrent.mamba.ssd_prepare_triton import FACTORS, ssd_prepare_kernel
from specdec.ops.recurrent.mamba.ssd_scan_triton import ssd_scan_kernel
from specdec.ops.recurrent.mamba.ssd_tree_triton import check_ssd
from specdec.ops.recurrent.shared_triton import PRECISION
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, lie_whole

HOPPER = ChunkTiles(stages=2, prepare_warps=8)
HEADS = 8  # of one group that a program of the first kernel computes, at most
PROGRAMS, MOST_STRETCHES, SHORTEST = 2 * 132, 8, 512  # of the second kernel: wanted; of a part; tokens of a stretch


def ssd_chunk_tiles(y_TC: Tensor, key_width: int) -> ChunkTiles:
    """What fits into shared memory; for the same reasons as `chunks.launch.chunk_tiles`.

    On an H200, at Nemotron-3-Nano's widths, 8,192 tokens take 110 us and then 174 in four stretches, or 319 in one.
    """
    if y_TC.dtype != torch.bfloat16:
        return WIDE
    is_hopper = y_TC.is_cuda and torch.cuda.get_device_capability(y_TC.device)[0] == 9
    tiles, limit = HOPPER if is_hopper else ELSEWHERE, shared_memory(y_TC.device)
    if key_width > 128:  # of whose states four warps lack registers for 64 columns
        tiles = tiles._replace(block_v=32, warps=8)
    while tiles.stages > 1 and _stage_bytes(tiles, key_width) * tiles.stages > limit - RESERVED:
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles


def _stage_bytes(tiles: ChunkTiles, key_width: int) -> int:
    """Of a block's keys, queries, values, and A."""
    return 2 * tiles.tokens * (2 * key_width + tiles.block_v + tiles.tokens)


class SsdPrepared(NamedTuple):
    """What the first kernel leaves.  reads_HTN: A.  factors_HTF: of tokens."""

    reads_HTN: Tensor
    factors_HTF: Tensor


def launch_ssd_parts(
    y_TC: Tensor, gates: SsdGates, layer: RuleStates, steps: ChunkSteps, tiles: ChunkTiles | None = None, search: int = SEARCH,
    stretches: int | None = None,
) -> Tensor:  # fmt: skip
    """`ssd.chunk_outputs`: [T, H, V].  search: parts among which a program looks for its block at once."""
    check_ssd(y_TC, gates, layer)
    assert lie_whole(steps)
    out_THV = y_TC.new_empty(len(y_TC), *layer.state_PHKV.shape[1::2])
    if len(steps.read_B):
        tiles = tiles or ssd_chunk_tiles(y_TC, layer.state_PHKV.shape[2])
        prepared = launch_ssd_prepare(y_TC, gates, layer, steps, tiles, search)
        launch_ssd_scan(y_TC, prepared, layer, steps, tiles, out_THV, stretches)
    return out_THV


def launch_ssd_prepare(
    y_TC: Tensor, gates: SsdGates, layer: RuleStates, steps: ChunkSteps, tiles: ChunkTiles, search: int = SEARCH
) -> SsdPrepared:
    """What blocks need that no state enters."""
    (_, H, K, _), G, B, N = layer.state_PHKV.shape, layer.k_LNGK.shape[2], len(steps.read_B), tiles.tokens
    rows = -(-len(y_TC) // 16) * 16  # so that Triton knows where heads begin
    prepared = SsdPrepared(
        y_TC.new_empty(H, rows, N, dtype=y_TC.dtype if y_TC.dtype == torch.bfloat16 else torch.float32),
        y_TC.new_empty(H, rows, FACTORS, dtype=torch.float32),
    )
    heads = gcd(H // G, HEADS)
    most_blocks = len(y_TC) // N + 2 * B  # a part ends with a block that is not whole, and so does what is kept of it
    ssd_prepare_kernel[(H // heads, most_blocks)](
        y_TC, *gates, steps.cu_B1, steps.after_B, *prepared, B, rows, y_TC.stride(0), gates.dt_TH.stride(0), G=G, H=H, K=K,
        HEADS=heads, PRECISION=PRECISION, BLOCK_N=N, BLOCK_K=min(K, 128), SEARCH=search, num_warps=tiles.prepare_warps,
        **chained(y_TC.device),
    )  # fmt: skip
    return prepared


def ssd_stretches(programs: int, most: int) -> int:
    """Into how many stretches a part of `most` tokens is cut, of whose parts so many programs compute all columns."""
    return max(1, min(MOST_STRETCHES, PROGRAMS // programs, most // SHORTEST))


def launch_ssd_scan(
    y_TC: Tensor, prepared: SsdPrepared, layer: RuleStates, steps: ChunkSteps, tiles: ChunkTiles, out_THV: Tensor,
    stretches: int | None = None,
) -> None:  # fmt: skip
    """The states and outputs, which out_THV takes."""
    (_, H, K, V), G, B = layer.state_PHKV.shape, layer.k_LNGK.shape[2], len(steps.read_B)
    block_v = min(V, tiles.block_v)
    blocks = H * (V // block_v)
    Z = stretches or ssd_stretches(blocks * B, steps.most)
    added = torch.empty(B, Z - 1, H, K, V, dtype=torch.float32, device=y_TC.device)
    fades = torch.empty(B, Z - 1, H, dtype=torch.float32, device=y_TC.device)
    for only_states in (True, False) if Z > 1 else (False,):
        ssd_scan_kernel[(blocks, B, Z - only_states)](
            y_TC, *prepared, layer.state_PHKV, steps.cu_B1, steps.read_B, steps.write_B, steps.keep_B, steps.after_B, added,
            fades, out_THV, prepared.factors_HTF.shape[1], y_TC.stride(0), layer.state_PHKV.stride(0), G=G, H=H, K=K, V=V,
            PRECISION=PRECISION, Z=Z, ONLY_STATES=only_states, BLOCK_N=tiles.tokens, BLOCK_V=block_v, STAGES=tiles.stages,
            num_warps=tiles.warps, **chained(y_TC.device),
        )  # fmt: skip
