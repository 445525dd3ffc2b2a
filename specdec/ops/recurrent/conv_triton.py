"""The kernels of conv.py: a program computes some channels of a whole tree, or of some tokens of a part.

Who reads and writes a number is said in states.py: no two programs of a launch meet but in TRASH, which nobody reads.

Shapes: as of conv.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, TreeSteps, lie_whole

CHUNK_TOKENS, CHUNK_CHANNELS = 16, 256  # of a program over a part


@triton.jit
def tree_convolution_kernel(
    x,  # [B * N, C]
    weight,  # [C, W + 1]
    conv,  # [P, W, C]
    left,  # [L, .., C]: inputs of the last trees' nodes
    read, write, count,  # [B]
    path,  # [B, E]
    parents,  # [B, N]
    out,  # [B * N, C]
    stride_x, stride_conv, stride_left,
    C: tl.constexpr, W: tl.constexpr, N: tl.constexpr, E: tl.constexpr, CHAIN: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, PADDED)
    ok_C, ok_NC = c < C, (n < N)[:, None] & (c < C)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    from_conv, from_left = conv + tl.load(read + b) * stride_conv + c, left + tl.load(read + b) * stride_left + c
    to_conv, to_left = conv + tl.load(write + b) * stride_conv + c, left + tl.load(write + b) * stride_left + c
    accepted = tl.load(count + b)
    at_N, depth_N = n, tl.zeros([PADDED], tl.int32)  # the node that is so many tokens before; a node's depth, up to W
    y_NC = tl.zeros([PADDED, BLOCK], tl.float32)
    for tap in tl.static_range(W, -1, -1):
        x_NC = tl.load(x + (b * N + at_N)[:, None] * stride_x + c[None, :], mask=ok_NC & (at_N >= 0)[:, None], other=0.0)
        if tap == W:
            tl.store(to_left[None, :] + n[:, None] * C, x_NC, mask=ok_NC)
        y_NC += x_NC.to(tl.float32) * tl.load(weight + c * (W + 1) + tap, mask=ok_C, other=0.0).to(tl.float32)[None, :]
        if CHAIN:
            at_N = at_N - 1
        else:
            at_N = tl.load(parents + b * N + at_N, mask=(at_N > 0) & (n < N), other=-1).to(tl.int32)
        depth_N += (at_N >= 0).to(tl.int32)
    for w in tl.static_range(W):  # the last inputs of the text, its pending path included
        place = accepted + w
        node = tl.load(path + b * E + place - W, mask=place >= W, other=0)
        last_C = tl.load(from_conv + place * C, mask=ok_C & (place < W), other=0.0)
        last_C = tl.where(place < W, last_C, tl.load(from_left + node * C, mask=ok_C & (place >= W), other=0.0))
        tl.store(to_conv + w * C, last_C, mask=ok_C)
        tap_N = w - depth_N
        taps_NC = tl.load(weight + (c * (W + 1))[None, :] + tap_N[:, None], mask=ok_NC & (tap_N >= 0)[:, None], other=0.0)
        y_NC += last_C.to(tl.float32)[None, :] * taps_NC.to(tl.float32)
    y_NC = y_NC * tl.sigmoid(y_NC)
    tl.store(out + (b * N + n)[:, None] * C + c[None, :], y_NC.to(out.dtype.element_ty), mask=ok_NC)


@triton.jit
def chunk_convolution_kernel(
    x,  # [T, C]
    weight,  # [C, W + 1]
    conv,  # [P, W, C]
    cu,  # [B + 1]
    read, write, keep, after,  # [B]
    out,  # [T, C]
    stride_x, stride_conv,
    C: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok_C = c < C
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.load(cu + b).to(tl.int64)
    tokens = (tl.load(cu + b + 1) - begin).to(tl.int32)
    from_conv, from_x = conv + tl.load(read + b) * stride_conv + c, x + begin * stride_x + c
    t = tile * TOKENS + tl.arange(0, TOKENS)
    y_TC = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(W + 1):
        ok_TC, place = (t < tokens)[:, None] & ok_C[None, :], t + tap  # of the last inputs and the tokens after them
        x_TC = tl.load(from_x[None, :] + (place - W)[:, None] * stride_x, mask=ok_TC & (place >= W)[:, None], other=0.0)
        if tile * TOKENS < W:
            last_TC = tl.load(from_conv[None, :] + place[:, None] * C, mask=ok_TC & (place < W)[:, None], other=0.0)
            x_TC = tl.where((place < W)[:, None], last_TC, x_TC)
        y_TC += x_TC.to(tl.float32) * tl.load(weight + c * (W + 1) + tap, mask=ok_C, other=0.0).to(tl.float32)[None, :]
    y_TC = y_TC * tl.sigmoid(y_TC)
    to_out = out + (begin + t)[:, None] * C + c[None, :]
    tl.store(to_out, y_TC.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & ok_C[None, :])
    if tile == 0:
        _store_last(conv + tl.load(write + b) * stride_conv + c, tokens, from_conv, from_x, stride_x, ok_C, C, W)
        _store_last(conv + tl.load(keep + b) * stride_conv + c, tl.load(after + b), from_conv, from_x, stride_x, ok_C, C, W)


@triton.jit
def _store_last(to, done, from_conv, from_x, stride_x, ok_C, C: tl.constexpr, W: tl.constexpr):
    """The last inputs after so many tokens."""
    for w in tl.static_range(W):
        place = done + w
        last_C = tl.load(from_conv + place * C, mask=ok_C & (place < W), other=0.0)
        x_C = tl.load(from_x + (place - W) * stride_x, mask=ok_C & (place >= W), other=0.0)
        tl.store(to + w * C, tl.where(place < W, last_C, x_C), mask=ok_C)


def launch_tree_convolution(x_TC: Tensor, weight_CZ: Tensor, layer: LayerStates, steps: TreeSteps) -> Tensor:
    """`conv.tree_convolution`: [T, C]."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    C, W = _sizes(x_TC, weight_CZ, layer, steps)
    left_LNC, out_TC = layer.x_LNC, torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    assert x_TC.shape[0] == B * N and N <= left_LNC.shape[1] and left_LNC.dtype == x_TC.dtype
    assert left_LNC.stride()[1:] == (C, 1)
    padded = triton.next_power_of_2(N)
    block = max(32, min(256, 2048 // padded, triton.next_power_of_2(C)))
    if B:
        tree_convolution_kernel[(triton.cdiv(C, block), B)](
            x_TC, weight_CZ, layer.conv_PWC, left_LNC, steps.read_B, steps.write_B, steps.count_B, steps.path_BE,
            steps.parents_BN, out_TC, x_TC.stride(0), layer.conv_PWC.stride(0), left_LNC.stride(0), C=C, W=W, N=N, E=E,
            CHAIN=steps.is_chain, PADDED=padded, BLOCK=block, num_warps=4, **chained(x_TC.device),
        )  # fmt: skip
    return out_TC


def launch_chunk_convolution(x_TC: Tensor, weight_CZ: Tensor, layer: LayerStates, steps: ChunkSteps) -> Tensor:
    """`conv.chunk_convolution`: [T, C]."""
    B, (C, W) = len(steps.read_B), _sizes(x_TC, weight_CZ, layer, steps)
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    block = min(CHUNK_CHANNELS, triton.next_power_of_2(C))
    if B:
        chunk_convolution_kernel[(triton.cdiv(C, block), max(1, triton.cdiv(steps.most, CHUNK_TOKENS)), B)](
            x_TC, weight_CZ, layer.conv_PWC, steps.cu_B1, steps.read_B, steps.write_B, steps.keep_B, steps.after_B, out_TC,
            x_TC.stride(0), layer.conv_PWC.stride(0), C=C, W=W, TOKENS=CHUNK_TOKENS, BLOCK=block, num_warps=4,
            **chained(x_TC.device),
        )  # fmt: skip
    return out_TC


def _sizes(x_TC: Tensor, weight_CZ: Tensor, layer: LayerStates, steps: TreeSteps | ChunkSteps) -> tuple[int, int]:
    """C and W."""
    assert lie_whole(steps)
    (_, W, C), conv_PWC = layer.conv_PWC.shape, layer.conv_PWC
    assert weight_CZ.shape == (C, W + 1) and weight_CZ.is_contiguous() and x_TC.shape[1] == C and x_TC.stride(1) == 1
    assert conv_PWC.stride()[1:] == (C, 1) and conv_PWC.dtype == x_TC.dtype
    return C, W
