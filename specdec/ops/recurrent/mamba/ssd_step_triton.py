"""The kernel of `ssd.convolved_tree_outputs` where each tree is one node, as in plain decoding: the convolution and the rule.

A program computes some columns of a head's values.  It reads its part of the state once, adds the pending path, and writes it
once.  It convolves the queries and keys of its head's group for itself, and its own columns of values: that is little work on
numbers that caches hold, and of a few rows a launch takes most of a layer's time.  One program of a group writes what belongs
to its queries and keys.  States, last inputs and what nodes left are a round old, so that nothing but the token's own input and
gate is read after the wait.

Shapes: as of ssd.py; W inputs that the convolution looks back, C its channels.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.conv_triton import check_convolution, ended, weights_of
from specdec.ops.recurrent.mamba.ssd_tree_triton import check_ssd_tree
from specdec.ops.recurrent.shared_triton import softplus
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import LayerStates, TreeSteps
from specdec.ops.recurrent.trees.path_triton import add_path, add_rest, faded, read_path, read_state


class StepTiles(NamedTuple):
    """A program's columns of values, and its warps.  group: accepted nodes of the pending path that are read at once."""

    block_v: int
    warps: int = 2
    group: int = 3


def step_tiles(sequences: int, heads: int, key_width: int) -> StepTiles:
    """The fastest of those that benchmarks/layers/recurrent.py tries, on an H200."""
    tiles = StepTiles(64 if sequences * heads > 264 else 32)  # twice as many as SMs of an H200
    # So that a thread has registers for its part of the state.
    return tiles._replace(warps=min(8, max(1, tiles.warps * key_width // 128)))


@triton.jit
def ssd_step_kernel(
    x, dt,  # [B, C], [B, H]
    A_log, dt_bias, D,  # [H]
    weight, bias,  # [W + 1, C], [C]
    conv, inputs_left,  # [P, W, C], [L, .., C]
    state,  # [P, H, K, V]
    k_left, u_left, decay_left,  # [L, .., G, K], [L, .., H, V], [L, .., H]
    read, write, count,  # [B]
    path,  # [B, E]
    out,  # [B, H, V]
    stride_x, stride_dt, stride_conv, stride_inputs, stride_state, stride_k, stride_u, stride_decay,
    E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_V: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * G * K + H * V
    row, h, block = tl.program_id(1).to(tl.int64), tl.program_id(0) // (V // BLOCK_V), tl.program_id(0) % (V // BLOCK_V)
    g, k, v = h // (H // G), tl.arange(0, K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    number, accepted = tl.load(read + row, cache_modifier=".cg"), tl.load(count + row, cache_modifier=".cg")
    to_state_KV = state + h * K * V + k[:, None] * V + v[None, :]
    from_k, from_decay = k_left + number * stride_k + g * K, decay_left + number * stride_decay + h
    from_u_V, path = u_left + number * stride_u + h * V + v, path + row * E
    raw = read_state(to_state_KV + number * stride_state, K, V, K)
    from_conv, from_left = conv + number * stride_conv, inputs_left + number * stride_inputs
    q_C, k_C, x_C = g * K + k, (G + g) * K + k, 2 * G * K + h * V + v
    last_q = _last_inputs(from_conv + q_C, from_left + q_C, path, accepted, C, W)
    last_k = _last_inputs(from_conv + k_C, from_left + k_C, path, accepted, C, W)
    last_x = _last_inputs(from_conv + x_C, from_left + x_C, path, accepted, C, W)
    weights_q, weights_k = weights_of(weight, bias, q_C, q_C < C, C, W), weights_of(weight, bias, k_C, k_C < C, C, W)
    weights_x = weights_of(weight, bias, x_C, x_C < C, C, W)
    left = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, K)
    state_KV = _with_path(raw, left, from_k, from_u_V, from_decay, path, accepted, E, G, H, K, V, GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = x + row * stride_x
    own_q, own_k, own_x = tl.load(x + q_C), tl.load(x + k_C), tl.load(x + x_C)
    gates = _gates(dt + row * stride_dt + h, A_log + h, dt_bias + h, D + h)
    number = tl.load(write + row)
    tl.store(to_state_KV + number * stride_state, state_KV)
    to_conv, to_left = conv + number * stride_conv, inputs_left + number * stride_inputs
    q_K = _convolved(own_q, last_q, weights_q, W, SILU, ASM)
    k_K = _convolved(own_k, last_k, weights_k, W, SILU, ASM)
    x_V = _convolved(own_x, last_x, weights_x, W, SILU, ASM)
    _keep_inputs(to_conv + x_C, to_left + x_C, own_x, last_x, C, W)
    out_V, u_V = _outputs(state_KV, q_K, k_K, x_V, gates)
    tl.store(out + (row * H + h) * V + v, out_V.to(out.dtype.element_ty))
    tl.store(u_left + number * stride_u + h * V + v, u_V)
    if block == 0:
        tl.store(decay_left + number * stride_decay + h, gates[1])
        if h % (H // G) == 0:
            _keep_inputs(to_conv + q_C, to_left + q_C, own_q, last_q, C, W)
            _keep_inputs(to_conv + k_C, to_left + k_C, own_k, last_k, C, W)
            tl.store(k_left + number * stride_k + g * K + k, k_K)


@triton.jit
def _last_inputs(from_conv_C, from_left_C, path, accepted, C: tl.constexpr, W: tl.constexpr):
    """The last W inputs of the text, its pending path included."""
    lasts = ()
    for w in tl.static_range(W):
        place = accepted + w
        node = tl.load(path + place - W, mask=place >= W, other=0, cache_modifier=".cg")
        from_C = tl.where(place < W, from_conv_C + place * C, from_left_C + node * C)
        lasts = lasts + (tl.load(from_C, cache_modifier=".cg"),)  # type: ignore[assignment]
    return lasts


@triton.jit
def _convolved(own_C, lasts, weights, W: tl.constexpr, SILU: tl.constexpr, ASM: tl.constexpr):
    """What the convolution makes of a token's input, rounded as it stores it."""
    y_C = own_C.to(tl.float32) * weights[W] + weights[W + 1]
    for w in tl.static_range(W - 1, -1, -1):
        y_C += lasts[w].to(tl.float32) * weights[w]
    return ended(y_C, SILU, ASM).to(own_C.dtype).to(tl.float32)


@triton.jit
def _keep_inputs(to_conv_C, to_left_C, own_C, lasts, C: tl.constexpr, W: tl.constexpr):
    """Stores the last inputs, and the token's own as what the tree's one node leaves."""
    for w in tl.static_range(W):
        tl.store(to_conv_C + w * C, lasts[w])
    tl.store(to_left_C, own_C)


@triton.jit
def _gates(dt, A_log, dt_bias, D):
    """(how far the step goes, its log-decay, the share of x that goes into the output)."""
    step = softplus(tl.load(dt).to(tl.float32) + tl.load(dt_bias).to(tl.float32))
    return step, -tl.exp(tl.load(A_log).to(tl.float32)) * step, tl.load(D).to(tl.float32)


@triton.jit
def _with_path(
    raw, left, from_k, from_u_V, from_decay, path, accepted, E: tl.constexpr, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The state after the pending path, of whose first nodes left is what `read_path` gave."""
    decays, added, keys, last = left
    tiles = add_path(faded(raw, last, 1), decays, added, keys, last, 1, GROUP)
    if E > GROUP:
        tiles = add_rest(tiles, from_k, from_u_V, from_decay, path, accepted, G, H, K, V, GROUP, K)
    return tiles[0]


@triton.jit
def _outputs(state_KV, q_K, k_K, x_V, gates):
    """(the node's output, u).  gates: as of `_gates`."""
    step, decay, skip = gates
    u_V = step * x_V
    return tl.exp(decay) * tl.sum(q_K[:, None] * state_KV, 0) + tl.sum(q_K * k_K, 0) * u_V + skip * x_V, u_V


def launch_convolved_step(
    x_TC: Tensor, conv: Convolution, gates: SsdGates, layer: LayerStates, steps: TreeSteps, tiles: StepTiles | None = None
) -> Tensor:
    """`ssd.convolved_tree_outputs` of trees of one node: [B, H, V]."""
    assert layer.rule is not None
    (B, N), E, memory = steps.parents_BN.shape, steps.path_BE.shape[1], layer.rule
    (_, H, K, V), G = memory.state_PHKV.shape, memory.k_LNGK.shape[2]
    assert N == 1
    check_ssd_tree(x_TC, gates, memory, steps)
    _, W = check_convolution(x_TC, conv, layer.conv, steps)
    out_THV, tiles = x_TC.new_empty(B, H, V), tiles or step_tiles(B, H, K)
    block_v, kept = min(V, tiles.block_v), (*layer.conv, *memory)
    if B:
        ssd_step_kernel[(H * (V // block_v), B)](
            x_TC, *gates, *conv[:2], *kept, steps.read_B, steps.write_B, steps.count_B, steps.path_BE, out_THV, x_TC.stride(0),
            gates.dt_TH.stride(0), *(each.stride(0) for each in kept), E=E, G=G, H=H, K=K, V=V, W=W, SILU=conv.silu,
            GROUP=min(E, tiles.group), BLOCK_V=block_v, ASM=x_TC.is_cuda, num_warps=tiles.warps,
            **chained(x_TC.device),
        )  # fmt: skip
    return out_THV
