"""few_tokens_triton.py's two kernels for up to 8 tokens and weights in 8 or 4 bits, written in Gluon for Hopper GPUs.

Words go from memory to registers, in the order in which the tensor cores take them, and through no shared memory
(units_hopper.py).  Each warp of a program has a run of units; sums are added up over warps at the end.

- Gate and up: a program takes a tile of rows of one pair's expert, if the pair is the first with that expert: 8 rows of
  the gate, if there is one, alternate with 8 of up.  Programs of the first tile write a list for the second kernel: of each
  expert in use a word, with its number, its place in y and a mask of the tokens that chose it, and at last how many there are.
- Down: a program takes a tile of rows of all experts in use (or its split of their units), in one run.

Ids, sums, shared experts and splits are treated as few_tokens_triton.py does, and so are weights of tokens.  A single token's
experts may still have to be chosen (CHOOSES): each warp does so, from the logits that the router has left in parts.  That takes
it a little longer than to read a number, and saves the router the wait for its last program.

Order of chained launches (specdec/ops/launch.py): both kernels trigger after their wait.  With one token the second kernel
reads topk_ids, or the logits, for which the first one has waited, and loads its first words before its wait.

Shapes: T tokens, M = 8 tokens padded, K in, N out, E experts, A experts of a token (top_k), P = T * A pairs, G scales of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.ops.hopper import gdc_launch_dependents, gdc_wait
from specdec.ops.launch import chained
from specdec.ops.products.formats.experts import QuantisedStack, has_units
from specdec.ops.products.kernels.dense.stream_triton import result_of
from specdec.ops.products.kernels.experts.choosing_triton import read_of, rule_of
from specdec.ops.products.kernels.quantised.choosing_hopper import choose_places, of_experts
from specdec.ops.products.kernels.quantised.parts_hopper import complete, weight_rows
from specdec.ops.products.kernels.quantised.units_hopper import load_units, own_expert, sums_of_units

if TYPE_CHECKING:
    from specdec.ops.products.experts import Form, SharedOutput
    from specdec.ops.products.routing import Unchosen
    from specdec.ops.products.tiles.experts import ExpertTiles

MOST = 8  # tokens
REGISTERS = 128  # of a thread, at most: a second program of 8 warps fits on an SM
MOST_PAIRS, MOST_EXPERTS = 64, 1 << 15  # by the bits of a word of the list


@gluon.jit(do_not_specialize=["T"])
def few_gate_up_hopper_kernel(
    x,  # [T, K]
    qweight,  # words of 32 bits [E * 2 * N, 16 * UNITS]; without gates [E * N, ..], and so below
    scales,  # [E * 2 * N, G]; words of four exponents of e2m1
    bias,  # [E * 2 * N]
    topk_weights,  # [T, A] float32; if CHOOSES, this kernel writes the only token's, and its topk_ids
    topk_ids,  # [T, A] int64
    parts,  # of one token's logits, if CHOOSES; this and the next three: see Unchosen
    router_bias,  # [E]
    correction,  # [E]
    active,  # [1]
    y,  # [P, T, N]: rows of tokens that did not choose an expert are not written
    entries,  # [P + 1] int32: the list for the second kernel, and how many entries it has; not written if ONE
    T, stride_x,
    places,  # A, which the compiler is not to know
    N: gl.constexpr, K: gl.constexpr, UNITS: gl.constexpr, G: gl.constexpr, GROUP_UNITS: gl.constexpr, A: gl.constexpr,
    PADDED_P: gl.constexpr, EXPERTS: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, ONE: gl.constexpr, BLOCK_N: gl.constexpr,
    CHOOSES: gl.constexpr, RULE: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    if CHOOSES:
        biases = of_experts(router_bias, RULE.HAS_BIAS, RULE, num_warps)
        corrections = of_experts(correction, RULE.HAS_CORRECTION, RULE, num_warps)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = gl.program_id(1)
    if CHOOSES:
        expert, own_weight = choose_places(parts, biases, corrections, active, pair, places, RULE, num_warps)
        if gl.program_id(0) == 0:
            gl.store(topk_ids + pair, expert.to(gl.int64))
            gl.store(topk_weights + pair, own_weight)
    else:
        expert = gl.load(topk_ids + pair).to(gl.int32)
        own_weight = gl.load(topk_weights + pair) if ONE else 0.0
    works = (expert >= 0) & (expert < EXPERTS)
    mask = 1
    if not ONE:
        is_first, mask = _tokens_of(topk_ids, expert, pair, T, A, PADDED_P, num_warps)
        works = works & is_first
        if gl.program_id(0) == 0:
            _write_entry(entries, topk_ids, expert, works, mask, pair, T, A, PADDED_P, EXPERTS, num_warps)
    if works:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
        out: gl.constexpr = gl.SliceLayout(0, layout)
        words_layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [num_warps, 1, 1], [2, 1, 0])
        x_layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [num_warps, 1, 1], [2, 1, 0])
        of_slices: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words_layout))
        CHUNK: gl.constexpr = (UNITS + num_warps - 1) // num_warps
        ENLARGES: gl.constexpr = KIND == "e2m1" or KIND == "e4m3"
        PARTS: gl.constexpr = 2 if ACTIVATION == "swiglu" else 1
        tile = gl.program_id(0)
        row_N = (
            _rows(tile, N, BLOCK_N, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, words_layout))),
            _rows(tile, N, BLOCK_N, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, layout))),
        )
        first_row = expert.to(gl.int64) * (PARTS * N)
        qweight += first_row * (UNITS * 16)
        scales += first_row * G
        s = gl.arange(0, num_warps, of_slices)
        slices = own_expert(s * 0, s * 0, s * 0 + mask, s * CHUNK, CHUNK)
        loaded = load_units(
            qweight, scales, row_N, slices, 0, AHEAD, PARTS * N, UNITS, G, GROUP_UNITS, False, words_layout,
            gl.SliceLayout(2, layout),
        )  # fmt: skip
        m = gl.arange(0, 8, gl.SliceLayout(0, out))
        weight_M = _weights_of_tokens(topk_weights, topk_ids, expert, own_weight, T, A, ONE, gl.SliceLayout(0, out))
        row = _rows(tile, N, BLOCK_N, PARTS, gl.SliceLayout(1, out))
        bias_N = (
            gl.load(bias + first_row + row).to(gl.float32)
            if HAS_BIAS
            else gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, out))
        )
        acc = sums_of_units(
            x, stride_x, 0, qweight, scales, row_N, slices, (CHUNK + AHEAD - 1) // AHEAD, loaded, K, PARTS * N, UNITS, G,
            GROUP_UNITS, KIND, False, ONE, ENLARGES, AHEAD, BLOCK_N, layout, words_layout, x_layout,
        )  # fmt: skip
        acc += bias_N[:, None]
        out_N = _places(tile, BLOCK_N, PARTS, gl.SliceLayout(1, out))
        ok = ((out_N < N)[:, None] & ((m < T) & ((mask >> m & 1) > 0))[None, :]).to(gl.int32)
        at = ((pair * T + m) * N)[None, :] + out_N[:, None]
        weight = gl.zeros([BLOCK_N, 8], gl.float32, out) + weight_M[None, :]
        if PARTS == 2:
            gate, up = _pair(acc, BLOCK_N)
            at, _ = _pair(at, BLOCK_N)
            ok, _ = _pair(ok, BLOCK_N)
            weight, _ = _pair(weight, BLOCK_N)
            if LIMIT > 0:
                gate = gl.minimum(gate, LIMIT)
                up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1
            result = gate / (1 + gl.exp(-ALPHA * gate)) * up * weight
        else:  # relu2; of what is no number, none
            positive = gl.where(acc < 0, 0.0, acc)
            result = positive * positive * weight
        if ENLARGES:  # the second kernel, whose values are of the same kind, need not
            result *= 18446744073709551616.0  # LARGE
        gl.store(y + at, result.to(y.dtype.element_ty), mask=ok != 0)


@gluon.jit
def _pair(value, BLOCK_N: gl.constexpr):
    """The gate's rows and up's."""
    return gl.split(gl.permute(gl.reshape(value, [BLOCK_N // 16, 2, 8, 8]), (0, 2, 3, 1)))


@gluon.jit
def _places(tile, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Where what a tile's rows make lies in the result: of a gate and its up (PARTS is 2) at the same place."""
    n = gl.arange(0, BLOCK_N, layout)
    return tile * (BLOCK_N // PARTS) + n // (8 * PARTS) * 8 + n % 8


@gluon.jit
def _rows(tile, N, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Rows of gate and up of a tile; one that is not there reads row 0, and is not stored."""
    n, out_N = gl.arange(0, BLOCK_N, layout), _places(tile, BLOCK_N, PARTS, layout)
    return gl.where(out_N < N, out_N + n // 8 % PARTS * N, 0)


@gluon.jit
def _tokens_of(topk_ids, expert, pair, T, A: gl.constexpr, PADDED_P: gl.constexpr, num_warps: gl.constexpr):
    """(whether no pair in front has this expert, a mask of the tokens that chose it).  Each warp finds out by itself."""
    p = gl.arange(0, PADDED_P, gl.BlockedLayout([PADDED_P // 32], [32], [num_warps], [0]))
    id_P = gl.load(topk_ids + p, mask=p < T * A, other=-1).to(gl.int32)
    is_same_P = id_P == expert
    found = gl.sum(gl.where(is_same_P, (1 << (p // A)) + gl.where(p < pair, 1 << 16, 0), 0), axis=0)
    return found < 1 << 16, found & 255


@gluon.jit
def _write_entry(
    entries, topk_ids, expert, works, mask, pair, T, A: gl.constexpr, PADDED_P: gl.constexpr, EXPERTS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Writes the entry of a pair that works, after those of the pairs in front; the last pair's program writes the count."""
    layout: gl.constexpr = gl.BlockedLayout([1, PADDED_P // 32], [1, 32], [num_warps, 1], [1, 0])
    p = gl.arange(0, PADDED_P, gl.SliceLayout(0, layout))
    q = gl.arange(0, PADDED_P, gl.SliceLayout(1, layout))
    id_P = gl.load(topk_ids + p, mask=p < T * A, other=-1).to(gl.int32)
    id_Q = gl.load(topk_ids + q, mask=q < pair, other=-1).to(gl.int32)
    earlier_Q = gl.sum(((id_P[None, :] == id_Q[:, None]) & (p[None, :] < q[:, None])).to(gl.int32), axis=1)
    counts_Q = (earlier_Q == 0) & (id_Q >= 0) & (id_Q < EXPERTS)
    rank = gl.sum(counts_Q.to(gl.int32), axis=0)
    gl.store(entries + rank, expert << 16 | pair << 8 | mask, mask=works)
    gl.store(entries + T * A, rank + works.to(gl.int32), mask=pair == T * A - 1)


@gluon.jit
def _weights_of_tokens(
    topk_weights, topk_ids, expert, own_weight, T, A: gl.constexpr, ONE: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """[M]: what each token gives the expert; 0: it did not choose it.  own_weight: the only token's."""
    m = gl.arange(0, 8, layout)
    if ONE:
        return gl.where(m == 0, own_weight, 0.0)
    else:
        weight_M = gl.zeros([8], gl.float32, layout)
        for a in gl.static_range(A):
            id_M = gl.load(topk_ids + m * A + a, mask=m < T, other=-1).to(gl.int32)
            weight_M += gl.load(topk_weights + m * A + a, mask=(m < T) & (id_M == expert), other=0.0)
        return weight_M


@gluon.jit(do_not_specialize=["T"])
def few_down_hopper_kernel(
    x,  # [P, T, K]
    qweight,  # words of 32 bits [E * N, 16 * UNITS]
    scales,  # [E * N, G], as above
    bias,  # [E * N]
    topk_weights,  # [T, A] float32
    topk_ids,  # [T, A] int64
    parts,  # as above, and the next three
    router_bias,
    correction,
    active,
    entries,  # [P + 1] int32
    shared,  # [T, N]: a term of the sum
    gate,  # [T] float32: what weighs `shared`
    y,  # [T, N], or [SPLITS, T, N] float32 if STORE_PARTIALS
    partials,  # [tiles, SPLITS, BLOCK_N, 8] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T,
    places,  # A
    N: gl.constexpr, K: gl.constexpr, UNITS: gl.constexpr, G: gl.constexpr, GROUP_UNITS: gl.constexpr, A: gl.constexpr,
    PADDED_A: gl.constexpr, EXPERTS: gl.constexpr, KIND: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_SHARED: gl.constexpr, HAS_GATE: gl.constexpr, ONE: gl.constexpr, STORE_PARTIALS: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr, CHOOSES: gl.constexpr, RULE: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    out: gl.constexpr = gl.SliceLayout(0, layout)
    words_layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [num_warps, 1, 1], [2, 1, 0])
    x_layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [num_warps, 1, 1], [2, 1, 0])
    of_slices: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words_layout))
    of_scales: gl.constexpr = gl.SliceLayout(2, layout)
    tile, split = gl.program_id(0), gl.program_id(1)
    row_N = (
        _down_rows(tile, N, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, words_layout))),
        _down_rows(tile, N, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, layout))),
    )
    s = gl.arange(0, num_warps, of_slices)
    if ONE:
        PER: gl.constexpr = num_warps * SPLITS // PADDED_A  # slices of an expert
        CHUNK: gl.constexpr = (UNITS + PER - 1) // PER
        number = (split * num_warps + s) // PER
        if CHOOSES:
            biases = of_experts(router_bias, RULE.HAS_BIAS, RULE, num_warps)
            corrections = of_experts(correction, RULE.HAS_CORRECTION, RULE, num_warps)
            id_S, _ = choose_places(parts, biases, corrections, active, number, places, RULE, num_warps)
        else:
            id_S = gl.load(topk_ids + number, mask=number < A, other=-1, cache_modifier=".cg").to(gl.int32)
        here = (id_S >= 0) & (id_S < EXPERTS)
        first = (split * num_warps + s) % PER * CHUNK
        slices = own_expert(gl.where(here, id_S, 0), number, here.to(gl.int32), first, CHUNK)
        chunk = CHUNK
        loaded = load_units(
            qweight, scales, row_N, slices, 0, AHEAD, N, UNITS, G, GROUP_UNITS, not ONE, words_layout, of_scales
        )
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        units = gl.load(entries + T * A) * UNITS
        low, high = split * units // SPLITS, (split + 1) * units // SPLITS
        chunk = gl.cdiv(high - low, num_warps)
        slices = entries, low + s * chunk, gl.minimum(high, low + s * chunk + chunk)
        loaded = load_units(
            qweight, scales, row_N, slices, 0, AHEAD, N, UNITS, G, GROUP_UNITS, not ONE, words_layout, of_scales
        )
    more = gl.zeros([BLOCK_N, 8], gl.float32, out)
    m = gl.arange(0, 8, gl.SliceLayout(0, out))
    row = _down_rows(tile, N, BLOCK_N, gl.SliceLayout(1, out))
    if HAS_BIAS or HAS_SHARED:
        if split == 0:
            if HAS_BIAS:
                more += _biases(bias, topk_weights, topk_ids, row, m, T, N, A, EXPERTS, out)
            if HAS_SHARED:
                term = gl.load(shared + m[None, :] * N + row[:, None], mask=(m < T)[None, :], other=0.0).to(gl.float32)
                more += term * gl.load(gate + m, mask=m < T, other=0.0)[None, :] if HAS_GATE else term
    acc = sums_of_units(
        x, K, T * K, qweight, scales, row_N, slices, (chunk + AHEAD - 1) // AHEAD, loaded, K, N, UNITS, G, GROUP_UNITS, KIND,
        not ONE, ONE, False, AHEAD, BLOCK_N, layout, words_layout, x_layout,
    )  # fmt: skip
    complete(
        acc + more, out, 0, bias, y, partials, arrivals, tile, tile, 0, split, T, N, False, 8, BLOCK_N, SPLITS, 1,
        STORE_PARTIALS, False, num_warps,
    )  # fmt: skip


@gluon.jit
def _down_rows(tile, N, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    row_N = weight_rows(gl.arange(0, BLOCK_N, layout), tile, N, BLOCK_N, 1)
    return gl.where(row_N < N, row_N, 0)


@gluon.jit
def _biases(
    bias, topk_weights, topk_ids, row, m, T, N: gl.constexpr, A: gl.constexpr, EXPERTS: gl.constexpr, layout: gl.constexpr
):
    """[N, M]: the sum of the biases of each token's experts, times their weights."""
    total_NM = gl.zeros([row.shape[0], 8], gl.float32, layout)
    for a in gl.static_range(A):
        expert_M = gl.load(topk_ids + m * A + a, mask=m < T, other=-1)
        ok_M = (expert_M >= 0) & (expert_M < EXPERTS)
        weight_M = gl.load(topk_weights + m * A + a, mask=m < T, other=0.0)
        bias_NM = gl.load(bias + expert_M[None, :] * N + row[:, None], mask=ok_M[None, :], other=0.0).to(gl.float32)
        total_NM += bias_NM * weight_M[None, :]
    return total_NM


def launch_few_gate_up_hopper(
    x_TH: Tensor, stack: QuantisedStack, form: Form, topk_weights_TK: Tensor, topk_ids_TK: Tensor, tiles: ExpertTiles,
    choice: Unchosen | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(activations times the tokens' weights [P, T, F]; the list of experts in use, int32 [P + 1]).

    Of the first, rows of experts' own tokens alone are written; of the second, with one token, nothing.
    """
    from specdec.ops.products.experts import GeGLU, epilogue, inputs_of

    assert not isinstance(form.activation, GeGLU), "mixture_tiles chooses another kernel"
    (T, A), (arguments, values) = topk_ids_TK.shape, _arguments(stack, form.gate_up_bias, x_TH)
    parts, P = inputs_of(form.activation), T * A
    N = stack.rows // parts
    assert 0 < T <= MOST and P <= MOST_PAIRS and x_TH.stride(1) == 1 and x_TH.shape[1] == stack.columns and N % 8 == 0
    assert topk_ids_TK.is_contiguous() and topk_weights_TK.is_contiguous() and topk_weights_TK.dtype == torch.float32
    y_PTN = x_TH.new_empty(P, T, N)
    entries = torch.empty(P + 1, dtype=torch.int32, device=x_TH.device)
    few_gate_up_hopper_kernel[(triton.cdiv(N, tiles.block_n // parts), P)](
        x_TH, *arguments, topk_weights_TK, topk_ids_TK, *read_of(choice, topk_weights_TK), y_PTN, entries, T,
        x_TH.stride(0), A, N=N, **values, **rule_of(choice), A=A,
        PADDED_P=max(32, triton.next_power_of_2(P)), **epilogue(form.activation), ONE=T == 1, BLOCK_N=tiles.block_n,
        AHEAD=tiles.unroll, num_warps=tiles.warps, maxnreg=REGISTERS,
        **chained(x_TH.device),
    )  # fmt: skip
    return y_PTN, entries


def launch_few_down_hopper(
    gated: tuple[Tensor, Tensor], stack: QuantisedStack, form: Form, topk_weights_TK: Tensor, topk_ids_TK: Tensor,
    tiles: ExpertTiles, shared: SharedOutput | None, store_partials: bool, choice: Unchosen | None = None,
) -> Tensor:  # fmt: skip
    """[T, N], or with store_partials [S, T, N] float32: the sum over experts.  gated: what launch_few_gate_up_hopper gave."""
    (x_PTK, entries), (T, A) = gated, topk_ids_TK.shape
    (arguments, values), N = _arguments(stack, form.down_bias, x_PTK), stack.rows
    assert x_PTK.shape[2] == stack.columns and x_PTK.is_contiguous() and N % 8 == 0
    assert shared is None or (shared.out_TH.is_contiguous() and shared.out_TH.shape == (T, N))
    assert T > 1 or tiles.warps * tiles.splits % triton.next_power_of_2(A) == 0  # slices of an expert
    num_tiles, none = triton.cdiv(N, tiles.block_n), x_PTK
    y, partials, arrivals = result_of(x_PTK[0], N, tiles.splits, num_tiles, tiles.block_n, 8, store_partials)
    gate = None if shared is None else shared.gate_T1
    assert gate is None or (gate.is_contiguous() and gate.dtype == torch.float32 and gate.numel() == T)
    few_down_hopper_kernel[(num_tiles, tiles.splits)](
        x_PTK, *arguments, topk_weights_TK, topk_ids_TK, *read_of(choice, topk_weights_TK), entries,
        none if shared is None else shared.out_TH, none if gate is None else gate, y, partials, arrivals, T, A, N=N, **values,
        **rule_of(choice), A=A,
        PADDED_A=triton.next_power_of_2(A), HAS_SHARED=shared is not None,
        HAS_GATE=gate is not None, ONE=T == 1, STORE_PARTIALS=store_partials, BLOCK_N=tiles.block_n, SPLITS=tiles.splits,
        AHEAD=tiles.unroll, num_warps=tiles.warps, maxnreg=REGISTERS,
        **chained(x_PTK.device),
    )  # fmt: skip
    return y


def _arguments(stack: QuantisedStack, bias_EN: Tensor | None, x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """(words, scales and bias, as the kernels take them; their constexprs)."""
    assert has_units(stack) and stack.experts < MOST_EXPERTS and x.dtype == torch.bfloat16
    words, scales = stack.qweight_RJ.view(torch.int32), stack.scales_RG
    scales = scales.view(torch.int32) if stack.has_powers else scales
    assert bias_EN is None or (bias_EN.shape == (stack.experts, stack.rows) and bias_EN.is_contiguous())
    units, unit = words.shape[1] // 16, 64 if stack.kind == "e4m3" else 128
    values: dict[str, Any] = {
        "K": stack.columns, "UNITS": units, "G": scales.shape[1], "EXPERTS": stack.experts, "KIND": stack.kind,
        "GROUP_UNITS": 1 if stack.has_powers else stack.group_size // unit or units, "HAS_BIAS": bias_EN is not None,
    }  # fmt: skip
    return (words, scales, x if bias_EN is None else bias_EN), values
