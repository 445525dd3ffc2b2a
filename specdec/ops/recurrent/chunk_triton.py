"""The kernel of `gated_delta.chunk_outputs`: a program computes some columns of a head's values for a whole part.

It goes through the part in blocks, and its piece of the state stays on the chip.  A block ends where the state is to be kept.

Shapes: as of gated_delta.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.gated_delta import Gates
from specdec.ops.recurrent.shared_triton import PRECISION, log_decays, multiplied, products, rule, strengths
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, lie_whole
from specdec.ops.recurrent.trees.rule_triton import RuleTiles, check_rule

TOKENS, TILES = 32, RuleTiles(64, 32, 8)  # of a block; of a program: almost no register is spilled


@triton.jit
def chunk_rule_kernel(
    y, a, b,  # [T, 2 G K + H V], [T, H] twice
    A_log, dt_bias,  # [H]
    state,  # [P, H, K, V]
    cu,  # [B + 1]
    read, write, keep, after,  # [B]
    out,  # [T, H, V]
    stride_y, stride_a, stride_b, stride_state,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HALVINGS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, h, block = tl.program_id(1), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, n, v = h // (H // G), tl.arange(0, BLOCK_N), block * BLOCK_V + tl.arange(0, BLOCK_V)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin, kept_at, kept = tl.load(cu + part).to(tl.int64), tl.load(after + part), tl.load(keep + part)
    tokens = tl.load(cu + part + 1) - begin.to(tl.int32)
    to_state_KV = state + h * K * V + tl.arange(0, BLOCK_K)[:, None] * V + v[None, :]
    tiles = ()
    for step in tl.static_range(K // BLOCK_K):
        tiles = tiles + (tl.load(to_state_KV + tl.load(read + part) * stride_state + step * BLOCK_K * V),)  # type: ignore[assignment]
    first = kept_at * 0
    while first < tokens:
        end = tl.minimum(first + BLOCK_N, tl.where(first < kept_at, kept_at, tokens))
        at_N, ok_N = begin + first + n, first + n < end
        from_k_NK = y + (G + g) * K + at_N[:, None] * stride_y + tl.arange(0, BLOCK_K)[None, :]
        qk, kk, q_state, k_state, k_length = products(
            from_k_NK, ok_N, tiles, G, K, PRECISION, BLOCK_N, BLOCK_K, BLOCK_V
        )  # fmt: skip
        from_v_NV = y + 2 * G * K + h * V + at_N[:, None] * stride_y + v[None, :]
        v_NV = tl.load(from_v_NV, mask=ok_N[:, None], other=0.0).to(tl.float32)
        decay_N = log_decays(tl.load(a + at_N * stride_a + h, mask=ok_N, other=0.0), A_log + h, dt_bias + h)
        decay_N = tl.where(ok_N, decay_N, 0.0)
        beta_N = strengths(tl.load(b + at_N * stride_b + h, mask=ok_N, other=0.0))
        out_NV, u_NV, summed_N = rule(
            qk, kk, q_state, k_state, v_NV, decay_N, beta_N, n[:, None] >= n[None, :], n, BLOCK_N, BLOCK_N, HALVINGS, PRECISION
        )
        tl.store(out + (at_N * H + h)[:, None] * V + v[None, :], out_NV.to(out.dtype.element_ty), mask=ok_N[:, None])
        last = tl.sum(decay_N, 0)
        u_NV *= (k_length * tl.exp(tl.minimum(last - summed_N, 0.0)))[:, None]
        tiles = _with_tokens(tiles, from_k_NK, ok_N, u_NV, tl.exp(last), K, PRECISION, BLOCK_K)
        if end == kept_at:
            _store(to_state_KV + kept * stride_state, tiles, K, V, BLOCK_K)
        first = end
    _store(to_state_KV + tl.load(write + part) * stride_state, tiles, K, V, BLOCK_K)


@triton.jit
def _with_tokens(
    tiles, from_k_NK, ok_N, u_NV, faded, K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The state after a block, whose u are faded to its end, and hold the keys' factors."""
    added = ()
    for step in tl.static_range(K // BLOCK_K):
        k_NK = tl.load(from_k_NK + step * BLOCK_K, mask=ok_N[:, None], other=0.0)
        added = added + (multiplied(tl.trans(k_NK), u_NV, tiles[step] * faded, PRECISION),)  # type: ignore[assignment]
    return added


@triton.jit
def _store(to_state_KV, tiles, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    for step in tl.static_range(K // BLOCK_K):
        tl.store(to_state_KV + step * BLOCK_K * V, tiles[step])


def launch_chunk_rule(
    y_TC: Tensor, gates: Gates, layer: LayerStates, steps: ChunkSteps, precision: str = PRECISION, tokens: int = TOKENS,
    tiles: RuleTiles = TILES,
) -> Tensor:  # fmt: skip
    """`gated_delta.chunk_outputs`: [T, H, V].  precision: of products: "tf32x3" or "ieee".  tokens: of a block."""
    (_, H, K, V), G, B = layer.state_PHKV.shape, layer.k_LNGK.shape[2], len(steps.read_B)
    check_rule(y_TC, gates, layer)
    assert lie_whole(steps)
    out_THV, block_v = y_TC.new_empty(len(y_TC), H, V), min(V, tiles.block_v)
    if B:
        chunk_rule_kernel[(H * (V // block_v), B)](
            y_TC, *gates, layer.state_PHKV, steps.cu_B1, steps.read_B, steps.write_B, steps.keep_B, steps.after_B, out_THV,
            y_TC.stride(0), gates.a_TH.stride(0), gates.b_TH.stride(0), layer.state_PHKV.stride(0), G=G, H=H, K=K, V=V,
            HALVINGS=tokens.bit_length() - 1, PRECISION=precision, BLOCK_N=tokens, BLOCK_K=min(K, tiles.block_k),
            BLOCK_V=block_v, num_warps=tiles.warps, **chained(y_TC.device),
        )  # fmt: skip
    return out_THV
