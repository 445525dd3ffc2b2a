"""The kernel of `ssd.convolved_tree_outputs` where each tree is one node: the convolution, then ssd_step_triton.py's step.

Every program convolves the queries and keys of its head's group for itself, and its own columns of values.  That is little
work on numbers that caches hold, and of a few rows a launch takes most of a layer's time.  The last inputs are a round old,
too, so only the token's own input and gate are read after the wait.  One program of a group writes what belongs to its queries
and keys.

Shapes: as of ssd.py; W inputs that the convolution looks back, C its channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.conv_triton import check_convolution, ended, weights_of
from specdec.ops.recurrent.mamba.ssd_step_triton import outputs, read_gates, with_path
from specdec.ops.recurrent.mamba.ssd_tree_triton import SsdTiles, check_ssd_tree, ssd_tiles
from specdec.ops.recurrent.ssd import SsdGates
from specdec.ops.recurrent.states import LayerStates, TreeSteps
from specdec.ops.recurrent.trees.path_triton import read_path, read_state


@triton.jit
def ssd_convolved_step_kernel(
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
    GROUP: tl.constexpr, BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
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
    if not AT_ONCE:
        left = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, K)
        state_KV = with_path(raw, left, from_k, from_u_V, from_decay, path, accepted, E, G, H, K, V, GROUP)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = x + row * stride_x
    own_q, own_k, own_x = tl.load(x + q_C), tl.load(x + k_C), tl.load(x + x_C)
    gates = read_gates(dt + row * stride_dt + h, A_log + h, dt_bias + h, D + h)
    number = tl.load(write + row)
    if AT_ONCE:
        left = read_path(from_k, from_u_V, from_decay, path, 0, accepted, G, H, K, V, GROUP, K)
        state_KV = with_path(raw, left, from_k, from_u_V, from_decay, path, accepted, E, G, H, K, V, GROUP)
    tl.store(to_state_KV + number * stride_state, state_KV)
    to_conv, to_left = conv + number * stride_conv, inputs_left + number * stride_inputs
    q_K = _convolved(own_q, last_q, weights_q, W, SILU, ASM)
    k_K = _convolved(own_k, last_k, weights_k, W, SILU, ASM)
    x_V = _convolved(own_x, last_x, weights_x, W, SILU, ASM)
    _keep_inputs(to_conv + x_C, to_left + x_C, own_x, last_x, C, W)
    out_V, u_V = outputs(state_KV, q_K, k_K, x_V, gates)
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


def launch_convolved_step(
    x_TC: Tensor, conv: Convolution, gates: SsdGates, layer: LayerStates, steps: TreeSteps, tiles: SsdTiles | None = None
) -> Tensor:
    """`ssd.convolved_tree_outputs` of trees of one node: [B, H, V]."""
    assert layer.rule is not None
    (B, N), E, memory = steps.parents_BN.shape, steps.path_BE.shape[1], layer.rule
    (_, H, K, V), G = memory.state_PHKV.shape, memory.k_LNGK.shape[2]
    assert N == 1
    check_ssd_tree(x_TC, gates, memory, steps)
    _, W = check_convolution(x_TC, conv, layer.conv, steps)
    out_THV, tiles = x_TC.new_empty(B, H, V), tiles or ssd_tiles(B, 1, H, K)
    block_v, kept = min(V, tiles.block_v), (*layer.conv, *memory)
    if B:
        ssd_convolved_step_kernel[(H * (V // block_v), B)](
            x_TC, *gates, *conv[:2], *kept, steps.read_B, steps.write_B, steps.count_B, steps.path_BE, out_THV, x_TC.stride(0),
            gates.dt_TH.stride(0), *(each.stride(0) for each in kept), E=E, G=G, H=H, K=K, V=V, W=W, SILU=conv.silu,
            GROUP=min(E, tiles.group), BLOCK_V=block_v, AT_ONCE=tiles.at_once, ASM=x_TC.is_cuda, num_warps=tiles.warps,
            **chained(x_TC.device),
        )  # fmt: skip
    return out_THV
