"""A head's values, convolved in the kernel that reads them: a part of ssd_tree_hopper.py.

The convolution's own kernel (conv_triton.py) then computes queries and keys alone, which a group's heads share.  Values are two
thirds of its work and more, and of no use to other programs: they need not go through memory.  A thread convolves those numbers
that it multiplies.  Sums are those of conv_triton.py, in its order and with its roundings.

Shapes: as of ssd_tree_hopper.py; W inputs that the convolution looks back, C its channels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.ops.recurrent.conv_triton import ended
from specdec.ops.recurrent.trees.state_hopper import places


@gluon.jit
def read_weights(weight, bias, C: gl.constexpr, W: gl.constexpr, width: gl.constexpr, layout: gl.constexpr):
    """Of all taps, and the bias or zeros in its place, [1, 1, V] each.  The pointers: at a program's first channel."""
    v_V, weights = gl.arange(0, width, gl.SliceLayout(0, gl.SliceLayout(0, layout))), ()
    for tap in gl.static_range(W + 1):
        weights = weights + (gl.load(weight + tap * C + v_V)[None, :][None, :, :],)  # type: ignore[assignment]
    if bias is None:
        bias_V = gl.zeros_like(weights[0])  # type: ignore[misc]
    else:
        bias_V = gl.load(bias + v_V)[None, :][None, :, :]
    return weights + (bias_V,)


@gluon.jit
def last_inputs(
    conv, left, path, accepted, C: gl.constexpr, W: gl.constexpr, width: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """The last W inputs of the text, its pending path included, [V] each.  The pointers: at a number's first channel."""
    v_V, lasts = gl.arange(0, width, gl.SliceLayout(0, gl.SliceLayout(0, layout))), ()
    for w in gl.static_range(W):
        place = accepted + w
        node = gl.load(path + place - W, mask=place >= W, other=0, cache_modifier=".cg")
        from_V = gl.where(place < W, conv + place * C, left + node * C) + v_V
        lasts = lasts + (gl.load(from_V, cache_modifier=".cg"),)  # type: ignore[assignment]
    return lasts


@gluon.jit
def store_above(above_P, W: gl.constexpr, P: gl.constexpr):
    """[W, P] in shared memory: the nodes 1, 2, .. before each one on its path; -1, -2, .. are the last inputs.

    above_P: parents, or -1.
    """
    smem = gl.allocate_shared_memory(gl.int32, [W, P], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    at_P = gl.arange(0, P, above_P.type.layout)
    for w in gl.static_range(W):
        at_P = gl.where(at_P > 0, gl.gather(above_P, gl.maximum(at_P, 0), 0), at_P - 1)
        smem.index(w).store(at_P)
    return smem


@gluon.jit
def read_inputs(x, stride_x, above_smem, N: gl.constexpr, W: gl.constexpr, P: gl.constexpr, layout: gl.constexpr):
    """Of each node, and of those 1, 2, .. before it, [S, 16, V] each; zeros where there is none.  x: at the first channel."""
    s, n, v = places(P, layout)
    n = 16 * s + n
    inputs = (gl.load(x + n * stride_x + v, mask=n + v * 0 < N, other=0.0),)
    for w in gl.static_range(W):
        at = _above(above_smem, w, P, layout)
        x_SPV = gl.load(x + at * stride_x + v, mask=(n < N) & (at + v * 0 >= 0), other=0.0)
        inputs = inputs + (x_SPV,)  # type: ignore[assignment]
    return inputs


@gluon.jit
def _above(above_smem, w: gl.constexpr, P: gl.constexpr, layout: gl.constexpr):
    """[S, 16, 1]."""
    at = above_smem.index(w)._reinterpret(gl.int32, [P // 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return at.load(gl.SliceLayout(2, layout))[:, :, None]


@gluon.jit
def convolved(
    inputs, lasts, above_smem, weights, N: gl.constexpr, W: gl.constexpr, SILU: gl.constexpr, P: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """[S, 16, V]: values, as the convolution rounds them; zeros of nodes that are not there."""
    s, n, v = places(P, layout)
    y_SPV = inputs[0].to(gl.float32) * weights[W].to(gl.float32) + weights[W + 1].to(gl.float32)
    for w in gl.static_range(W):
        x_SPV, at = inputs[w + 1], _above(above_smem, w, P, layout)
        for last in gl.static_range(w + 1):
            x_SPV = gl.where(at + v * 0 == -1 - last, lasts[W - 1 - last][None, :][None, :, :], x_SPV)
        y_SPV += x_SPV.to(gl.float32) * weights[W - 1 - w].to(gl.float32)
    values_SPV = ended(y_SPV, SILU, True).to(inputs[0].dtype)
    return gl.where(16 * s + n + v * 0 < N, values_SPV, 0.0)


@gluon.jit
def keep_inputs(
    inputs, lasts, conv, left, C: gl.constexpr, N: gl.constexpr, W: gl.constexpr, P: gl.constexpr, width: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Stores the last inputs, and each node's own as what it leaves.  The pointers: at a number's first channel."""
    v_V = gl.arange(0, width, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    for w in gl.static_range(W):
        gl.store(conv + w * C + v_V, lasts[w])
    s, n, v = places(P, layout)
    n = 16 * s + n
    gl.store(left + n * C + v, inputs[0], mask=n + v * 0 < N)
