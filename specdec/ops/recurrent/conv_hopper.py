"""The convolution over trees of many rows, written in Gluon for Hopper GPUs: see conv_triton.py, whose kernel runs by default.

No GPU has run this one yet: benchmarks/layers/recurrent.py (--sweep) checks and times it, and who passes its tiles gets it.

All inputs of a program's channels are on their way into shared memory at once, and so are the last inputs of the text, behind
them.  Then a thread goes from node to node, with eight channels: what a tap reads is a row of shared memory, whichever it is.

Sums go in the order of conv_triton.py, so that both kernels give the same bits.

Shapes: as of conv.py; P: nodes that there is room for.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from specdec.ops.hopper import barrier, copy_rows, gdc_launch_dependents, gdc_wait
from specdec.ops.launch import chained
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.conv_triton import ConvHopperTiles, ended
from specdec.ops.recurrent.states import ConvStates, TreeSteps


@gluon.jit
def tree_convolution_hopper_kernel(
    x,  # [B * N, C]
    weight, bias,  # [W + 1, C], [C]
    conv,  # [P, W, C]
    left,  # [L, .., C]: inputs of the last trees' nodes
    read, write, count,  # [B]
    path,  # [B, E]
    parents,  # [B, N]
    out,  # [B * N, C]
    stride_x, stride_conv, stride_left,
    C: gl.constexpr, W: gl.constexpr, N: gl.constexpr, E: gl.constexpr, CHAIN: gl.constexpr, SILU: gl.constexpr,
    P: gl.constexpr, NODES: gl.constexpr, AT_ONCE: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """A program computes NODES nodes, whose ancestors come before them.  What is a round old it reads before its wait.

    Numbers of 16 bits are read, kept and written as pairs in words of 32, which take one instruction each to come apart.
    """
    BLOCK: gl.constexpr = 128 * num_warps  # pairs
    PAIRS: gl.constexpr = C // 2
    b, group = gl.program_id(2).to(gl.int64), gl.program_id(1)
    fours: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    c = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, fours)
    smem = gl.allocate_shared_memory(gl.int32, [P + W, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    number, accepted = gl.load(read + b, cache_modifier=".cg"), gl.load(count + b, cache_modifier=".cg")
    x, conv, left, out = words(x), words(conv), words(left), words(out)
    stride_x, stride_conv, stride_left = stride_x // 2, stride_conv // 2, stride_left // 2
    weights, lasts = (), ()
    for w in gl.static_range(W + 1):
        weights = weights + (pair_of(gl.load(words(weight) + w * PAIRS + c)),)  # type: ignore[assignment]
    if bias is None:
        biases = gl.zeros([BLOCK], gl.float32, fours), gl.zeros([BLOCK], gl.float32, fours)
    else:
        biases = pair_of(gl.load(words(bias) + c))
    for w in gl.static_range(W):  # the last inputs of the text, its pending path included
        place = accepted + w
        node = gl.load(path + b * E + place - W, mask=place >= W, other=0, cache_modifier=".cg")
        row = gl.where(place < W, conv + number * stride_conv + place * PAIRS, left + number * stride_left + node * PAIRS)
        lasts = lasts + (gl.load(row + c, cache_modifier=".cg"),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    from_parents = parents + b * N
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, num_warps], [1, 0])
    n_P = gl.arange(0, P, gl.SliceLayout(1, rows))
    inputs_smem = smem._reinterpret(gl.int32, [P, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    copy_rows(inputs_smem, x + b * N * stride_x + gl.program_id(0) * BLOCK + n_P * stride_x, n_P < N, BLOCK, rows)
    async_copy.commit_group()
    number = gl.load(write + b)
    for w in gl.static_range(W):
        smem.index(P + w).store(lasts[w])
    if group == 0:
        for w in gl.static_range(W):
            gl.store(conv + number * stride_conv + w * PAIRS + c, lasts[w])
    to_left, to_out = left + number * stride_left + c, out + b * N * PAIRS + c
    async_copy.wait_group(0)
    barrier()
    for first in range(group * NODES, min(group * NODES + NODES, N), AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            n = min(first + i, N - 1)  # the last one once more where there is none
            own_C, at = smem.index(n).load(fours), n
            low_C, high_C = pair_of(own_C)
            low_C, high_C = low_C * weights[W][0] + biases[0], high_C * weights[W][1] + biases[1]
            for tap in gl.static_range(W - 1, -1, -1):
                above = at - 1  # the node so many tokens before; -1, -2, ..: last inputs
                if not CHAIN:
                    above = gl.where(at > 0, gl.load(from_parents + gl.maximum(at, 0)).to(gl.int32), above)
                at = above
                x_low_C, x_high_C = pair_of(smem.index(gl.where(at < 0, P + W + at, at)).load(fours))
                low_C, high_C = low_C + x_low_C * weights[tap][0], high_C + x_high_C * weights[tap][1]
            gl.store(to_left + n * PAIRS, own_C)
            gl.store(to_out + n * PAIRS, rounded(ended(low_C, SILU, True), ended(high_C, SILU, True)))


@gluon.jit
def words(pointer):
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def pair_of(word_C):
    """The two numbers of a word, in float32."""
    return (word_C << 16).to(gl.float32, bitcast=True), (word_C & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def rounded(low_C, high_C):
    """As a word."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high_C, low_C], gl.int32, is_pure=True, pack=1)


def launch_tree_convolution_hopper(
    x_TC: Tensor, conv: Convolution, layer: ConvStates, steps: TreeSteps, out_TC: Tensor, tiles: ConvHopperTiles
) -> None:
    """`conv.tree_convolution`, into out_TC.  conv_triton.py has checked what its own kernels take, too."""
    (B, N), E, (W, C), left_LNC = steps.parents_BN.shape, steps.path_BE.shape[1], layer.conv_PWC.shape[1:], layer.x_LNC
    assert x_TC.dtype == torch.bfloat16 and C % (256 * tiles.warps) == 0
    assert x_TC.stride(0) % 16 == 0 and x_TC.data_ptr() % 16 == 0  # rows are copied by 16 bytes
    own = triton.cdiv(N, tiles.groups)
    tree_convolution_hopper_kernel[(C // (256 * tiles.warps), triton.cdiv(N, own), B)](
        x_TC, *conv[:2], layer.conv_PWC, left_LNC, steps.read_B, steps.write_B, steps.count_B, steps.path_BE, steps.parents_BN,
        out_TC, x_TC.stride(0), layer.conv_PWC.stride(0), left_LNC.stride(0), C=C, W=W, N=N, E=E, CHAIN=steps.is_chain,
        SILU=conv.silu, P=triton.next_power_of_2(N), NODES=own, AT_ONCE=tiles.at_once, num_warps=tiles.warps,
        **chained(x_TC.device),
    )  # fmt: skip
