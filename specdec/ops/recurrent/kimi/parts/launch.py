"""Launches the kernels of `kimi_delta.chunk_outputs`: two, as in chunks/launch.py.

1. prepare_triton.py (on Hopper GPUs prepare_hopper.py, of bfloat16), a program for each block and head, solves (1 + strictly
   lower part of beta_i kk_ij), kk_ij the product of keys as faded as i sees j.  With T its inverse times beta_j, and D the
   log-decays summed from the block's beginning on, it leaves keys = -T (exp(D) k), values = T v, queries = exp(D) q,
   added = exp(D_last - D) k, reads = the lower part of qk_ij, and ends = exp(D_last).
2. scan_triton.py, a program for each head and some columns of values, goes through the blocks one after the other:
   u = values + keys S, out = queries S + reads u, S = ends S + added^T u.

Written in between, a token and head of 128 x 128 with blocks of 64 in bfloat16: keys and added in two halves each 1024 bytes,
values 512, queries 256, reads 128: 1,920 bytes, so that 8,192 tokens of 32 heads leave 503 MB.  T in place of keys and values
would leave less, as in chunks/launch.py; but keys and queries would have to be faded by each program that scans, which has no
registers for them.  On an H200 one text of 8,192 tokens takes 1.03 ms to prepare (prepare_triton.py: 2.1) and 0.43 ms to scan.
As long as nothing in prepare_hopper.py was a loop, it took 1.8 ms: a program seems to wait for instructions that it runs once.

Precision, of bfloat16: a float32 number goes into a product as two bfloat16 halves, whose sum has 17 bits, and the product of
two lower halves is left out.  What goes into outputs alone is rounded to bfloat16.  Of float16 and float32 everything is
float32: PRECISION.

Shapes: as of specdec/ops/recurrent/kimi_delta.py; N tokens of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import chained, has_gluon, shared_memory
from specdec.ops.recurrent.kimi.launch import check_kimi
from specdec.ops.recurrent.kimi.parts.prepare_triton import kimi_prepare_kernel
from specdec.ops.recurrent.kimi.parts.scan_triton import kimi_scan_kernel
from specdec.ops.recurrent.kimi_delta import KimiGates
from specdec.ops.recurrent.shared_triton import PRECISION
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, lie_whole

RESERVED = 12 << 10  # bytes of shared memory beside the stages


class KimiChunkTiles(NamedTuple):
    """Tokens of a block; columns of values, warps and stages of a program that scans; of one that prepares, warps and channels
    that it works on at once.
    search: parts among which a program looks for its block at once.  hopper: prepare_hopper.py is what prepares, blocks of 64.
    """

    tokens: int = 64
    block_v: int = 64
    warps: int = 4
    stages: int = 2
    prepare_warps: int = 4
    block_k: int = 32
    search: int = 32
    hopper: bool = False


HOPPER, ELSEWHERE, WIDE = KimiChunkTiles(64, 32, 8), KimiChunkTiles(32, 32, 4, 2), KimiChunkTiles(32, 32, 8, 1, 8)


def kimi_chunk_tiles(y_TC: Tensor, width: int) -> KimiChunkTiles:
    """What fits into shared memory.  On GPUs other than Hopper's, blocks are of 32 tokens: see `chunks.launch.chunk_tiles`."""
    if y_TC.dtype != torch.bfloat16:
        return WIDE
    is_hopper = y_TC.is_cuda and torch.cuda.get_device_capability(y_TC.device)[0] == 9
    tiles, limit = HOPPER if is_hopper else ELSEWHERE, shared_memory(y_TC.device)
    while tiles.stages > 1 and stage_bytes(tiles, width) * tiles.stages > limit - RESERVED:
        tiles = tiles._replace(stages=tiles.stages - 1)
    return tiles._replace(hopper=is_hopper and width == 128 and has_gluon())


def stage_bytes(tiles: KimiChunkTiles, width: int) -> int:
    """Of what the kernel that scans reads of a block."""
    return 2 * tiles.tokens * (5 * width + 2 * tiles.block_v + tiles.tokens)


class KimiPrepared(NamedTuple):
    """What the first kernel leaves: see the top of this file.  P parts, whose sum it is; M blocks."""

    keys_PHTK: Tensor
    queries_HTK: Tensor
    added_PHTK: Tensor
    values_HTV: Tensor
    reads_HTN: Tensor
    ends_HMK: Tensor


def launch_kimi_parts(
    y_TC: Tensor, gates: KimiGates, layer: RuleStates, steps: ChunkSteps, tiles: KimiChunkTiles | None = None
) -> Tensor:  # fmt: skip
    """`kimi_delta.chunk_outputs`: [T, H, V]."""
    check_kimi(y_TC, gates, layer)
    assert lie_whole(steps)
    out_THV = y_TC.new_empty(len(y_TC), *layer.state_PHKV.shape[1::2])
    if len(steps.read_B):
        tiles = tiles or kimi_chunk_tiles(y_TC, layer.state_PHKV.shape[2])
        launch_kimi_scan(launch_kimi_prepare(y_TC, gates, layer, steps, tiles), layer, steps, tiles, out_THV)
    return out_THV


def launch_kimi_prepare(
    y_TC: Tensor, gates: KimiGates, layer: RuleStates, steps: ChunkSteps, tiles: KimiChunkTiles
) -> KimiPrepared:  # fmt: skip
    """What blocks need that no state enters."""
    (_, H, K, V), B, N = layer.state_PHKV.shape, len(steps.read_B), tiles.tokens
    rows = -(-len(y_TC) // 16) * 16  # so that Triton knows where heads begin
    is_short = y_TC.dtype == torch.bfloat16
    dtype = y_TC.dtype if is_short else torch.float32
    most_blocks = len(y_TC) // N + 2 * B  # a part ends with a block that is not whole, and so does what is kept of it
    prepared = KimiPrepared(
        y_TC.new_empty(1 + is_short, H, rows, K, dtype=dtype), y_TC.new_empty(H, rows, K, dtype=dtype),
        y_TC.new_empty(1 + is_short, H, rows, K, dtype=dtype), y_TC.new_empty(H, rows, V, dtype=torch.float32),
        y_TC.new_empty(H, rows, N, dtype=dtype), y_TC.new_empty(H, most_blocks, K, dtype=torch.float32),
    )  # fmt: skip
    if tiles.hopper:
        assert K == V == 128 and N == 64 and is_short
        from specdec.ops.recurrent.kimi.parts.prepare_hopper import kimi_prepare_hopper_kernel

        kimi_prepare_hopper_kernel[(H, most_blocks)](
            y_TC, *gates, steps.cu_B1, steps.after_B, *prepared, B, rows, y_TC.stride(0), gates.a_TC.stride(0),
            gates.b_TH.stride(0), H=H, K=K, V=V, N=N, SEARCH=tiles.search, num_warps=8, **chained(y_TC.device),
        )  # fmt: skip
        return prepared
    kimi_prepare_kernel[(H, most_blocks)](
        y_TC, *gates, steps.cu_B1, steps.after_B, *prepared, B, rows, y_TC.stride(0), gates.a_TC.stride(0),
        gates.b_TH.stride(0), H=H, K=K, V=V, PRECISION=PRECISION, BLOCK_N=N, LOG_N=N.bit_length() - 1,
        BLOCK_K=min(K, tiles.block_k), BLOCK_V=min(V, tiles.block_k), SEARCH=tiles.search, num_warps=tiles.prepare_warps,
        **chained(y_TC.device),
    )  # fmt: skip
    return prepared


def launch_kimi_scan(
    prepared: KimiPrepared, layer: RuleStates, steps: ChunkSteps, tiles: KimiChunkTiles, out_THV: Tensor
) -> None:
    """The states and outputs, which out_THV takes."""
    (_, H, K, V), block_v = layer.state_PHKV.shape, min(layer.state_PHKV.shape[3], tiles.block_v)
    kimi_scan_kernel[(H * (V // block_v), len(steps.read_B))](
        *prepared, layer.state_PHKV, steps.cu_B1, steps.read_B, steps.write_B, steps.keep_B, steps.after_B, out_THV,
        prepared.queries_HTK.shape[1], prepared.ends_HMK.shape[1], layer.state_PHKV.stride(0), H=H, K=K, V=V,
        PRECISION=PRECISION, BLOCK_N=tiles.tokens, BLOCK_V=block_v, STAGES=tiles.stages, SEARCH=tiles.search,
        num_warps=tiles.warps, **chained(out_THV.device),
    )  # fmt: skip
