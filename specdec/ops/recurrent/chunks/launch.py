"""Launches the two kernels of `gated_delta.chunk_outputs`.

1. prepare_triton.py, a program for each block and value head: what needs no state.  With F_ij = exp(D_i - D_j), of the block's
   summed log-decays, it solves (1 + strictly lower part of beta_i F_ij k_i k_j), and leaves T = its inverse times beta_j,
   A = the lower part of F_ij q_i k_j, and four factors a token.
2. scan_triton.py, a program for each value head and some columns of values, goes through the blocks one after the other:
   u = T (v - faded k S), out = faded q S + A u, S = faded S + k^T (faded u).  Its next blocks' loads run ahead.

What is written in between, a token and head of 128 x 128 with blocks of 64 in bfloat16: T in two halves 256 bytes, A 128,
factors 16: 400 bytes, written once and read V / 64 times, of which the L2 cache serves the others.  The more usual
W = T (faded k), U = T v and states of blocks would be 512, 512 and 512 bytes; T alone costs the scan one product of [N, N]
more.  8,192 tokens of 48 heads leave 157 MB.

Precision, of bfloat16: k, q and v are exact, and a float32 number beside one of them goes in as two bfloat16 halves, whose
sum has 17 bits; T has two halves as well, and its product with two halves leaves the product of the lower ones out.  So states
have about 3e-6 of error, as a share of their norm, and it does not grow from block to block.  Outputs are rounded to bfloat16
(1.7e-3); A and u, where they go into outputs alone, are rounded to it too (1.6e-3 each).  Of float16 and float32 everything
is float32: PRECISION.

Shapes: as of specdec/ops/recurrent/gated_delta.py; N tokens of a block.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from specdec.ops.launch import chained, shared_memory
from specdec.ops.recurrent.chunks.prepare_triton import FACTORS, chunk_prepare_kernel
from specdec.ops.recurrent.chunks.scan_triton import chunk_scan_kernel
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.shared_triton import PRECISION
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, lie_whole
from specdec.ops.recurrent.trees.rule_triton import check_rule


class ChunkTiles(NamedTuple):
    """Tokens of a block; columns of values, warps and stages of a program that scans; warps of one that prepares."""

    tokens: int = 64
    block_v: int = 64
    warps: int = 4
    stages: int = 3
    prepare_warps: int = 4


HOPPER, ELSEWHERE, WIDE = ChunkTiles(), ChunkTiles(64, 32, 8, 2, 8), ChunkTiles(32, 32, 8, 1, 8)
SEARCH = 32  # parts among which a program looks for its block at once


def chunk_tiles(y_TC: Tensor, key_width: int) -> ChunkTiles:
    """What fits into shared memory.  Other tiles than these were timed by nobody (`layers.recurrent --only prompt --all`).

    On Hopper GPUs 64 columns are a whole instruction of four warps.  On Blackwell GPUs Triton 3.7 makes nothing but a trap of
    products whose left side is 64 rows of registers, and other GPUs lack registers for them.  float16 and float32 take three
    products for each, in registers.
    """
    if y_TC.dtype != torch.bfloat16:
        return WIDE
    is_hopper = y_TC.is_cuda and torch.cuda.get_device_capability(y_TC.device)[0] == 9
    tiles, limit = HOPPER if is_hopper else ELSEWHERE, shared_memory(y_TC.device)
    while tiles.stages > 1 and stage_bytes(tiles, next_power_of_2(key_width)) * tiles.stages > limit - RESERVED:
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles


RESERVED = 12 << 10  # bytes of shared memory beside the stages


def stage_bytes(tiles: ChunkTiles, key_width: int) -> int:
    """Of a block's keys, queries, values, T in two halves, and A."""
    return 2 * tiles.tokens * (2 * key_width + tiles.block_v + 3 * tiles.tokens)


class Prepared(NamedTuple):
    """What the first kernel leaves.  solved_PHTN: T, in P parts whose sum it is.  reads_HTN: A.  factors_HTF: of tokens."""

    solved_PHTN: Tensor
    reads_HTN: Tensor
    factors_HTF: Tensor


def launch_chunk_rule(
    y_TC: Tensor, gates: Gates, layer: RuleStates, steps: ChunkSteps, tiles: ChunkTiles | None = None
) -> Tensor:  # fmt: skip
    """`gated_delta.chunk_outputs`: [T, H, V]."""
    check_rule(y_TC, gates, layer)
    assert lie_whole(steps)
    out_THV = y_TC.new_empty(len(y_TC), *layer.state_PHKV.shape[1::2])
    if len(steps.read_B):
        tiles = tiles or chunk_tiles(y_TC, layer.state_PHKV.shape[2])
        launch_scan(y_TC, launch_prepare(y_TC, gates, layer, steps, tiles), layer, steps, tiles, out_THV)
    return out_THV


def launch_prepare(y_TC: Tensor, gates: Gates, layer: RuleStates, steps: ChunkSteps, tiles: ChunkTiles) -> Prepared:
    """What blocks need that no state enters."""
    (_, H, K, _), G, B, N = layer.state_PHKV.shape, layer.k_LNGK.shape[2], len(steps.read_B), tiles.tokens
    rows = -(-len(y_TC) // 16) * 16  # so that Triton knows where heads begin
    is_short = y_TC.dtype == torch.bfloat16
    dtype = y_TC.dtype if is_short else torch.float32
    prepared = Prepared(
        y_TC.new_empty(1 + is_short, H, rows, N, dtype=dtype), y_TC.new_empty(H, rows, N, dtype=dtype),
        y_TC.new_empty(H, rows, FACTORS, dtype=torch.float32),
    )  # fmt: skip
    most_blocks = len(y_TC) // N + 2 * B  # a part ends with a block that is not whole, and so does what is kept of it
    chunk_prepare_kernel[(H, most_blocks)](
        y_TC, *gates.tensors, steps.cu_B1, steps.after_B, *prepared, B, rows, y_TC.stride(0), gates.a_TH.stride(0),
        gates.b_TH.stride(0), G=G, H=H, K=K, PRECISION=PRECISION, BLOCK_N=N, LOG_N=N.bit_length() - 1, BLOCK_K=min(K & -K, 128),
        SEARCH=SEARCH, MOST=gates.most, num_warps=tiles.prepare_warps, **chained(y_TC.device),
    )  # fmt: skip
    return prepared


def launch_scan(
    y_TC: Tensor, prepared: Prepared, layer: RuleStates, steps: ChunkSteps, tiles: ChunkTiles, out_THV: Tensor
) -> None:
    """The states and outputs, which out_THV takes."""
    (_, H, K, V), G, block_v = layer.state_PHKV.shape, layer.k_LNGK.shape[2], gcd(layer.state_PHKV.shape[3], tiles.block_v)
    chunk_scan_kernel[(H * (V // block_v), len(steps.read_B))](
        y_TC, *prepared, layer.state_PHKV, steps.cu_B1, steps.read_B, steps.write_B, steps.keep_B, steps.after_B, out_THV,
        prepared.factors_HTF.shape[1], y_TC.stride(0), layer.state_PHKV.stride(0), G=G, H=H, K=K, V=V, PRECISION=PRECISION,
        BLOCK_N=tiles.tokens, BLOCK_V=block_v, STAGES=tiles.stages,
        PADDED_K=next_power_of_2(K), num_warps=tiles.warps, **chained(y_TC.device),
    )  # fmt: skip
