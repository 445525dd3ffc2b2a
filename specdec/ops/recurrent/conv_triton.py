"""The kernels of conv.py: a program computes some channels of a whole tree, or of some tokens of a part.

Who reads and writes a number is said in states.py: no two programs of a launch meet but in TRASH, which nobody reads.

Shapes: as of conv.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.states import ChunkSteps, ConvStates, TreeSteps, lie_whole


class ConvTiles(NamedTuple):
    """Channels of a program, its warps, the nodes (or tokens) that it computes at once, and about how many programs there are.

    programs: trees alone; with fewer of them, a program computes more of a tree's nodes, whose ancestors it then has in L1.
    """

    channels: int
    warps: int
    rows: int
    programs: int = 1


# Of a lone node, of chains and of trees; of parts.  Measured on an H200 (benchmarks/layers/recurrent.py).
ONE, CHAIN, TREE = ConvTiles(512, 2, 1), ConvTiles(512, 4, 4, 1056), ConvTiles(256, 4, 8, 1056)
CHUNK = ConvTiles(256, 2, 16)


@triton.jit
def tree_convolution_kernel(
    x,  # [B * N, C]
    weight, bias,  # [W + 1, C], [C]
    conv,  # [P, W, C]
    left,  # [L, .., C]: inputs of the last trees' nodes
    read, write, count,  # [B]
    path,  # [B, E]
    parents,  # [B, N]
    out,  # [B * N, C]
    stride_x, stride_conv, stride_left,
    C: tl.constexpr, W: tl.constexpr, N: tl.constexpr, E: tl.constexpr, CHAIN: tl.constexpr, SILU: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program computes STEPS times ROWS nodes.  What is a round old it reads before its wait."""
    b, group = tl.program_id(2).to(tl.int64), tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok_C = c < C
    number, accepted = tl.load(read + b, cache_modifier=".cg"), tl.load(count + b, cache_modifier=".cg")
    weights, rows, lasts = weights_of(weight, bias, c, ok_C, C, W), (), ()
    for w in tl.static_range(W):  # the last inputs of the text, its pending path included
        place = accepted + w
        node = tl.load(path + b * E + place - W, mask=place >= W, other=0, cache_modifier=".cg")
        row = tl.where(place < W, conv + number * stride_conv + place * C, left + number * stride_left + node * C)
        last_C = tl.load(row + c, mask=ok_C & (group == 0), other=0.0, cache_modifier=".cg")
        rows, lasts = rows + (row,), lasts + (last_C,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.load(write + b)
    for w in tl.static_range(W):
        tl.store(conv + number * stride_conv + w * C + c, lasts[w], mask=ok_C & (group == 0))
    if N == 1:
        x_C = tl.load(x + b * stride_x + c, mask=ok_C, other=0.0)
        tl.store(left + number * stride_left + c, x_C, mask=ok_C)
        y_C = x_C.to(tl.float32) * weights[W] + weights[W + 1]
        for w in tl.static_range(W - 1, -1, -1):
            y_C += lasts[w].to(tl.float32) * weights[w]
        tl.store(out + b * C + c, ended(y_C, SILU, ASM).to(out.dtype.element_ty), mask=ok_C)
    else:
        from_x, from_parents = x + b * N * stride_x, parents + b * N
        n = group * STEPS * ROWS + tl.arange(0, ROWS)
        next_NC = tl.load(from_x + (n * stride_x)[:, None] + c[None, :], mask=(n < N)[:, None] & ok_C[None, :], other=0.0)
        for step in range(STEPS):
            # Whose own inputs are there; the next ones come from memory meanwhile, and those of ancestors from caches.
            n, own_NC = (group * STEPS + step) * ROWS + tl.arange(0, ROWS), next_NC
            ok_NC, later_N = (n < N)[:, None] & ok_C[None, :], n + ROWS
            is_later_NC = (later_N < N)[:, None] & ok_C[None, :] & (step + 1 < STEPS)
            next_NC = tl.load(from_x + (later_N * stride_x)[:, None] + c[None, :], mask=is_later_NC, other=0.0)
            y_NC, at_N = own_NC.to(tl.float32) * weights[W][None, :] + weights[W + 1][None, :], n
            for tap in tl.static_range(W - 1, -1, -1):
                above_N = at_N - 1  # the node so many tokens before; -1, -2, ..: last inputs
                if not CHAIN:
                    above_N = tl.load(from_parents + at_N, mask=(at_N > 0) & (n < N), other=0).to(tl.int32)
                at_N = tl.where(at_N > 0, above_N, at_N - 1)
                from_N = from_x + tl.maximum(at_N, 0) * stride_x
                for w in tl.static_range(tap, W):
                    from_N = tl.where(at_N == w - W, rows[w], from_N)
                x_NC = tl.load(from_N[:, None] + c[None, :], mask=ok_NC, other=0.0)
                y_NC += x_NC.to(tl.float32) * weights[tap][None, :]
            # Stores come last: no load is moved in front of one.
            tl.store(left + number * stride_left + n[:, None] * C + c[None, :], own_NC, mask=ok_NC)
            tl.store(out + (b * N + n)[:, None] * C + c[None, :], ended(y_NC, SILU, ASM).to(out.dtype.element_ty), mask=ok_NC)


@triton.jit
def weights_of(weight, bias, c, ok_C, C: tl.constexpr, W: tl.constexpr):
    """Those of all taps, and the bias, or zeros in its place."""
    weights = ()
    for tap in tl.static_range(W + 1):
        weights = weights + (tl.load(weight + tap * C + c, mask=ok_C, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    if bias is None:
        bias_C = tl.zeros_like(weights[0])  # type: ignore[misc]
    else:
        bias_C = tl.load(bias + c, mask=ok_C, other=0.0).to(tl.float32)
    return weights + (bias_C,)


@triton.jit
def ended(y, SILU: tl.constexpr, ASM: tl.constexpr):
    """y * sigmoid(y), or y.  ASM: by the GPU's own instructions, five in place of a dozen."""
    if not SILU:
        return y
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
            "rcp.approx.ftz.f32 e, e; mul.f32 $0, $1, e; }",
            "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return y / (1.0 + tl.exp(-y))


@triton.jit
def chunk_convolution_kernel(
    x,  # [T, C]
    weight, bias,  # [W + 1, C], [C]
    conv,  # [P, W, C]
    cu,  # [B + 1]
    read, write, keep, after,  # [B]
    out,  # [T, C]
    stride_x, stride_conv,
    C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program goes through its tokens, with the last W inputs in registers: each is read once, but for W at the beginning."""
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok_C = c < C
    weights = weights_of(weight, bias, c, ok_C, C, W)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.load(cu + b).to(tl.int64)
    tokens = (tl.load(cu + b + 1) - begin).to(tl.int32)
    from_conv, from_x = conv + tl.load(read + b) * stride_conv + c, x + begin * stride_x + c
    first = tile * TOKENS
    if first < tokens:
        inputs = ()
        for w in tl.static_range(W):
            inputs = inputs + (_input(first + w, from_conv, from_x, stride_x, ok_C, C, W),)  # type: ignore[assignment]
        for t in tl.static_range(TOKENS):  # all loads before the first store, in front of which none is moved
            inputs = inputs + (tl.load(from_x + (first + t) * stride_x, mask=ok_C & (first + t < tokens), other=0.0),)  # type: ignore[assignment]
        for t in tl.static_range(TOKENS):
            y_C = inputs[t].to(tl.float32) * weights[0] + weights[W + 1]
            for w in tl.static_range(1, W + 1):
                y_C += inputs[t + w].to(tl.float32) * weights[w]
            to_out = out + (begin + first + t) * C + c
            tl.store(to_out, ended(y_C, SILU, ASM).to(out.dtype.element_ty), mask=ok_C & (first + t < tokens))
    if tile == 0:
        kept_at = tl.load(after + b)
        to_last, to_kept = conv + tl.load(write + b) * stride_conv + c, conv + tl.load(keep + b) * stride_conv + c
        for w in tl.static_range(W):
            tl.store(to_last + w * C, _input(tokens + w, from_conv, from_x, stride_x, ok_C, C, W), mask=ok_C)
            tl.store(to_kept + w * C, _input(kept_at + w, from_conv, from_x, stride_x, ok_C, C, W), mask=ok_C)


@triton.jit
def _input(place, from_conv, from_x, stride_x, ok_C, C: tl.constexpr, W: tl.constexpr):
    """One of the last inputs, or of the tokens after them."""
    last_C = tl.load(from_conv + place * C, mask=ok_C & (place < W), other=0.0)
    x_C = tl.load(from_x + (place - W) * stride_x, mask=ok_C & (place >= W), other=0.0)
    return tl.where(place < W, last_C, x_C)


def launch_tree_convolution(
    x_TC: Tensor, conv: Convolution, layer: ConvStates, steps: TreeSteps, tiles: ConvTiles | None = None
) -> Tensor:
    """`conv.tree_convolution`: [T, C]."""
    (B, N), E = steps.parents_BN.shape, steps.path_BE.shape[1]
    C, W = check_convolution(x_TC, conv, layer, steps)
    left_LNC, out_TC = layer.x_LNC, torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    tiles = tiles or (ONE if N == 1 else CHAIN if steps.is_chain else TREE)
    block = min(tiles.channels, triton.next_power_of_2(C))
    blocks, steps_in_all = triton.cdiv(C, block), triton.cdiv(N, tiles.rows)
    if B:
        own = triton.cdiv(steps_in_all, max(1, tiles.programs // (blocks * B)))
        tree_convolution_kernel[(blocks, triton.cdiv(steps_in_all, own), B)](
            x_TC, *conv[:2], layer.conv_PWC, left_LNC, steps.read_B, steps.write_B, steps.count_B, steps.path_BE,
            steps.parents_BN, out_TC, x_TC.stride(0), layer.conv_PWC.stride(0), left_LNC.stride(0), C=C, W=W, N=N, E=E,
            CHAIN=steps.is_chain, SILU=conv.silu, STEPS=own, ROWS=tiles.rows, BLOCK=block, ASM=x_TC.is_cuda,
            num_warps=tiles.warps, **chained(x_TC.device),
        )  # fmt: skip
    return out_TC


def launch_chunk_convolution(
    x_TC: Tensor, conv: Convolution, layer: ConvStates, steps: ChunkSteps, tiles: ConvTiles = CHUNK
) -> Tensor:
    """`conv.chunk_convolution`: [T, C]."""
    B, (C, W) = len(steps.read_B), check_convolution(x_TC, conv, layer, steps)
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    block = min(tiles.channels, triton.next_power_of_2(C))
    if B:
        chunk_convolution_kernel[(triton.cdiv(C, block), max(1, triton.cdiv(steps.most, tiles.rows)), B)](
            x_TC, *conv[:2], layer.conv_PWC, steps.cu_B1, steps.read_B, steps.write_B, steps.keep_B, steps.after_B, out_TC,
            x_TC.stride(0), layer.conv_PWC.stride(0), C=C, W=W, SILU=conv.silu, TOKENS=tiles.rows, BLOCK=block,
            ASM=x_TC.is_cuda, num_warps=tiles.warps, **chained(x_TC.device),
        )  # fmt: skip
    return out_TC


def check_convolution(x_TC: Tensor, conv: Convolution, layer: ConvStates, steps: TreeSteps | ChunkSteps) -> tuple[int, int]:
    """C and W.  Asserts what all kernels take that convolve."""
    assert lie_whole(steps)
    (_, W, C), conv_PWC, left_LNC = layer.conv_PWC.shape, layer.conv_PWC, layer.x_LNC
    assert conv.weight_ZC.shape == (W + 1, C) and conv.weight_ZC.is_contiguous()
    assert x_TC.shape[1] == C and x_TC.stride(1) == 1
    assert conv.bias_C is None or conv.bias_C.shape == (C,) and conv.bias_C.is_contiguous()
    assert conv_PWC.stride()[1:] == (C, 1) and conv_PWC.dtype == x_TC.dtype
    if isinstance(steps, TreeSteps):
        B, N = steps.parents_BN.shape
        assert x_TC.shape[0] == B * N and N <= left_LNC.shape[1] and left_LNC.dtype == x_TC.dtype
        assert left_LNC.stride()[1:] == (C, 1)
    return C, W
