"""The choice of a single token's experts for kernels in Gluon: what choosing_triton.py's `choose_all` is for a router's.

Each warp chooses by itself: its lanes hold neighbouring experts.  The rules are those that know no groups of experts.

Shapes: E experts, padded, S splits of a logit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOWEST = gl.constexpr(-(2**31))  # below the key of any number
NONE = gl.constexpr(2**31 - 1)  # above every expert's number


@gluon.jit
def of_experts(numbers, EXIST: gl.constexpr, RULE: gl.constexpr, num_warps: gl.constexpr):
    """[E]: a number of each expert; zeros if they do not exist.  They are weights, and may be read before a wait."""
    PADDED: gl.constexpr = RULE.RUNS * RULE.RUN
    layout: gl.constexpr = gl.SliceLayout(0, _layout(PADDED, RULE.PADDED_SPLITS, num_warps))
    e = gl.arange(0, PADDED, layout)
    if EXIST:
        return gl.load(numbers + e, mask=e < RULE.E, other=0.0)
    else:
        return gl.zeros([PADDED], gl.float32, layout)


@gluon.jit
def choose_places(parts, bias, correction, active, place, places, RULE: gl.constexpr, num_warps: gl.constexpr):
    """(numbers, weights) of the experts at these places: a number, or a tensor of them.

    bias, correction: what `of_experts` gives.  places: all that a token has; the compiler is not to know them.
    """
    PADDED: gl.constexpr = RULE.RUNS * RULE.RUN
    both: gl.constexpr = _layout(PADDED, RULE.PADDED_SPLITS, num_warps)
    e = gl.arange(0, PADDED, gl.SliceLayout(0, both))
    s = gl.arange(0, RULE.PADDED_SPLITS, gl.SliceLayout(1, both))
    ok_E = e < RULE.E
    ok_SE = (s < RULE.SPLITS)[:, None] & ok_E[None, :]
    part_SE = gl.load(parts + (s * RULE.ROW)[:, None] + e[None, :], mask=ok_SE, other=0.0, cache_modifier=".cg")
    score_E = gl.sum(part_SE, axis=0) + bias
    if RULE.SCORES == "sigmoid":
        score_E = 1 / (1 + gl.exp(-score_E))
    elif RULE.SCORES == "softmax":
        peak = gl.max(gl.where(ok_E, score_E, -float("inf")), axis=0)
        of_E = gl.where(ok_E, gl.exp(score_E - peak), 0.0)
        score_E = of_E * (1 / gl.sum(of_E, axis=0))
    key_E = gl.where(ok_E, _ordered(score_E + correction), LOWEST)
    number, weight = place * 0, (place * 0).to(gl.float32)
    total, first = 0.0, -float("inf")
    for at in range(places):
        key = gl.max(key_E, axis=0)
        expert = gl.min(gl.where(key_E == key, e, NONE), axis=0)
        is_best_E = e == expert
        key_E = gl.where(is_best_E, LOWEST, key_E)
        if RULE.HAS_CORRECTION:
            own = gl.sum(gl.where(is_best_E, score_E.to(gl.int32, bitcast=True), 0), axis=0).to(gl.float32, bitcast=True)
        else:
            own = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)
        if RULE.SCORES == "softmax of chosen":
            first = gl.maximum(first, own)  # which the first place's is
            own = gl.exp(own - first)
        total += own
        number = gl.where(place == at, expert, number)
        weight = gl.where(place == at, own, weight)
    if RULE.NORMED or RULE.SCORES == "softmax of chosen":
        if RULE.LEAST_SUM > 0:
            total = gl.maximum(total, RULE.LEAST_SUM)
        else:
            total += RULE.ADDED_SUM
        weight = weight / total
    number -= RULE.FIRST
    is_here = (number >= 0) & (number < RULE.COUNT) & (place < places)
    if RULE.HAS_ROWS:
        is_here = is_here & (gl.load(active, cache_modifier=".cg") != 0)
    return gl.where(is_here, number, RULE.COUNT), gl.where(is_here, weight * RULE.SCALING, 0.0)


@gluon.jit
def _ordered(x):
    """As ops/topk_triton.py's `ordered_32`."""
    bits = x.to(gl.int32, bitcast=True)
    bits = gl.where(bits == LOWEST, 0, bits)
    return gl.where(x != x, NONE, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@gluon.constexpr_function
def _layout(experts, splits, num_warps):
    """[S, E]: all of a token's experts in each warp, neighbours in a thread."""
    return gl.BlockedLayout([splits, experts // 32], [1, 32], [1, num_warps], [1, 0])
