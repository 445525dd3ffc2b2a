"""Random weights of 8 and 4 bits, also of experts; products and mixtures in float64; what tiles may take of an SM.

Shapes: M rows, N out, K in; of mixtures T tokens, H hidden size, E experts, K experts of a token, F width of an expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.experts import PLAIN, Activation, Experts, Form, GeGLU, QuantisedExperts, Relu2, SwiGLU, inputs_of
from specdec.ops.products.formats.experts import QuantisedStack, dequantise_stack, pack_steps, stack_of, steps_of
from specdec.ops.products.formats.quantised import Kind, QuantisedMatrix, dequantise, pack, pack_factor_of
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS
from specdec.ops.products.tiles.dense import two_pieces
from specdec.ops.products.tiles.quantised import QuantisedTiles
from toolkit.kernels import DEVICE, HAS_GPU

DTYPE = torch.bfloat16 if HAS_GPU else torch.float16  # in which experts compute

# kind, columns of a scale, whether there are zero points
FORMATS: tuple[tuple[Kind, int, bool], ...] = (
    ("e4m3", 0, False), ("e4m3", 128, False), ("int8", 0, False), ("int8", 32, True), ("int4", 128, False),
    ("int4", 32, True), ("int4", 0, False), ("e2m1", 32, False), ("e2m1", 16, False),
)  # fmt: skip


def random_weight(kind: Kind, group: int, zero_points: bool, N: int, K: int) -> QuantisedMatrix:
    """Every quantised value occurs, but for NaN; scales are within a factor of two of 1 / 16."""
    generator = torch.Generator().manual_seed(N + K)
    qvalues = torch.randint(0, 16 if pack_factor_of(kind) == 4 else 256, (N, K), dtype=torch.uint8, generator=generator)
    if kind == "e4m3":
        qvalues[(qvalues & 127) == 127] = 126
    groups = -(-K // (group or K))
    scales = (1 + torch.rand(N, groups, generator=generator)) / (2000 if kind in ("e4m3", "int8") else 32)
    below = torch.randint(-8, 8, (N, groups), dtype=torch.int8, generator=generator) if zero_points else None
    return QuantisedMatrix(
        kind, pack(kind, qvalues).to(DEVICE), scales.to(DEVICE), None if below is None else below.to(DEVICE), K, group
    )


def exact(x: Tensor, weight: QuantisedMatrix, gated: bool, bias: Tensor | None = None) -> Tensor:
    want = x.double() @ dequantise(weight, torch.float64).T + (0 if bias is None else bias.double())
    if not gated:
        return want
    gate, up = want.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_tiles(tiles: QuantisedTiles, M: int, N: int, K: int, bits: int, width: int, partials: bool = False) -> None:
    """Fails if tiles for M rows and a weight [N, K] do not fit a Hopper GPU.

    bits: of a number of the weight.  width: columns of a slice.  partials: whether a norm adds up what splits compute.
    """
    more = two_pieces(tiles.block_m)[1]
    assert not more or (more & (more - 1) == 0 and tiles.slices == 1 and (partials or tiles.splits == 1))
    stage = tiles.block_n * tiles.block_k * bits // 8 + (M > 1) * tiles.block_m * tiles.block_k * 2
    sums = 4 * tiles.block_n * tiles.block_m if tiles.slices > 1 else 0
    row = 2 * -(-K // tiles.splits) + 2 * tiles.block_k + 512 * tiles.warps if M == 1 else 0
    assert tiles.stages * stage + sums + row + 1024 <= 232_448 and tiles.stages > 1
    assert tiles.kernel == "warp_hopper" or tiles.block_n // tiles.of_program in (64, 128)
    assert 24 <= tiles.consumer_registers <= 256 and 32 * (tiles.warps + 4) * tiles.registers <= 65536
    counted = -(-N // tiles.block_n) * -(-M // tiles.block_m) * tiles.of_program
    assert tiles.splits == 1 or (counted <= ARRIVALS and tiles.splits <= -(-K // tiles.block_k))
    assert tiles.kernel == "warpgroup_hopper" or tiles.block_k == tiles.slices * width
    assert tiles.kernel == "warp_hopper" or -(-K // tiles.block_k) // tiles.splits >= tiles.slices


class StoredExperts(NamedTuple):
    kind: Kind
    group: int
    zero_points: bool = False
    powers: bool = False


FORMS = {
    "fp8 rows": StoredExperts("e4m3", 0),
    "fp8 blocks": StoredExperts("e4m3", 128),
    "int8 zero points": StoredExperts("int8", 0, zero_points=True),
    "int4": StoredExperts("int4", 128),
    "int4 zero points": StoredExperts("int4", 32, zero_points=True),
    "mxfp4": StoredExperts("e2m1", 32, powers=True),
}


def random_stack(form: StoredExperts, count: int, rows: int, columns: int) -> QuantisedStack:
    """Every code occurs, but for NaN; the numbers are about 0.3."""
    R, generator = count * rows, torch.Generator(DEVICE).manual_seed(rows + columns)
    most, groups = 16 if pack_factor_of(form.kind) == 4 else 256, -(-columns // (form.group or columns))

    def integers(low: int, high: int, width: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, (R, width), dtype=dtype, device=DEVICE, generator=generator)

    qvalues = integers(0, most, columns)
    if form.kind == "e4m3":
        qvalues[(qvalues & 127) == 127] = 126
    if form.powers:
        scales = integers(122, 126, 4 * steps_of(columns))
    else:
        scales = (0.5 + torch.rand(R, groups, device=DEVICE, generator=generator)) / (300 if most == 256 else 15)
    zero_points = integers(-8, 8, groups, torch.int8) if form.zero_points else None
    return QuantisedStack(form.kind, count, pack_steps(form.kind, qvalues), scales, zero_points, columns, form.group)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def experts_of(stored: StoredExperts, E: int, H: int, F: int, activation: Activation | None = None) -> QuantisedExperts:
    """activation: of experts with biases, and of those without gates."""
    gates, form = inputs_of(activation or SwiGLU()), PLAIN
    if isinstance(activation, SwiGLU):
        form = Form(activation, rand(E, 2 * F, seed=5), rand(E, H, seed=6))
    elif activation is not None:
        form = Form(activation)
    return QuantisedExperts(random_stack(stored, E, gates * F, H), random_stack(stored, E, H, F), form)


def choice(T: int, E: int, K: int) -> tuple[Tensor, Tensor]:
    """Weights and numbers of experts.  No token chooses expert 1, and all choose expert 0, at no fixed place."""
    scores_TE = torch.rand(T, E, generator=torch.Generator().manual_seed(T))
    scores_TE[:, 1], scores_TE[:, 0] = -1, 2
    topk_ids_TK = scores_TE.topk(K).indices
    topk_ids_TK[::2] = topk_ids_TK[::2].flip(1)
    return torch.rand(T, K, generator=torch.Generator().manual_seed(K)).to(DEVICE), topk_ids_TK.to(DEVICE)


def exact_activation(both: Tensor, activation: Activation) -> Tensor:
    """Of the results of one token's gate and up projections, by the formula of each activation."""
    if isinstance(activation, Relu2):
        return torch.where(both > 0, both**2, 0.0)
    g, u = both.chunk(2)
    if isinstance(activation, GeGLU):
        return 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u
    if activation.limit:
        g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit) + 1
    return g * torch.sigmoid(activation.alpha * g) * u


def exact_mixture(x: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, experts: Experts) -> Tensor:
    """The sum in float64, token by token, by the formula of each activation."""
    ids, places_TK = topk_ids_TK.unique(return_inverse=True)
    gate_up, down = (
        each[ids].double() if isinstance(each, Tensor) else dequantise_stack(stack_of(each, ids), torch.float64)
        for each in (experts.gate_up, experts.down)
    )
    rows = []
    for token, (weights_K, places_K) in enumerate(zip(topk_weights_TK.double(), places_TK.tolist())):
        total = torch.zeros(down.shape[1], dtype=torch.float64, device=x.device)
        for weight, at in zip(weights_K, places_K):
            both = gate_up[at] @ x[token].double()
            both += 0 if experts.form.gate_up_bias is None else experts.form.gate_up_bias[ids[at]].double()
            out = down[at] @ exact_activation(both, experts.form.activation)
            total += weight * (out + (0 if experts.form.down_bias is None else experts.form.down_bias[ids[at]].double()))
        rows.append(total)
    return torch.stack(rows)
