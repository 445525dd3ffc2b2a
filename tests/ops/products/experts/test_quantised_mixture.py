"""Mixtures of quantised experts: where quantised values lie, and the kernel against float64.

On a GPU in bfloat16, else in float16 under Triton's interpreter.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert.
"""

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE, HAS_GPU
from toolkit.quantised_weights import (
    DTYPE,
    FORMS,
    StoredExperts,
    choice,
    error,
    exact_mixture,
    experts_of,
    rand,
    random_stack,
)

from specdec.ops.products.experts import Form, QuantisedExperts, Relu2, SwiGLU, mixture_tiles, quantised_experts
from specdec.ops.products.formats.experts import dequantise_stack, pack_steps, scales_form, stack_of, unpack_steps
from specdec.ops.products.formats.quantised import Kind, QuantisedMatrix, dequantise, pack
from specdec.ops.products.kernels.experts.own_pairs_triton import launch_own_pairs
from specdec.ops.products.numerics import FAST
from specdec.ops.products.own_pairs import own_pairs
from specdec.ops.products.stacked import weighted_sum
from specdec.ops.products.tiles.experts import ExpertTiles, expert_tiles

SMALL = None if HAS_GPU else ExpertTiles(4, 64, 4, 2, unroll=2)  # the interpreter takes long for large tiles


@pytest.mark.parametrize("columns", [128, 96, 200, 7])
@pytest.mark.parametrize("kind", ["int4", "e2m1", "e4m3"])
def test_packing_is_undone(kind: Kind, columns: int) -> None:
    """Keeps out: a last step of columns that is cut off, or padding that becomes columns."""
    most = 256 if kind == "e4m3" else 16
    qvalues = torch.randint(0, most, (3, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_steps(kind, pack_steps(kind, qvalues), columns), qvalues)


def test_numbers_are_those_of_single_matrices() -> None:
    """Keeps out: a scale or a zero of another group, and rows of another expert among those that were asked for."""
    for form in (StoredExperts("int4", 32, zero_points=True), StoredExperts("e4m3", 128)):
        whole = random_stack(form, 3, 8, 128)
        qvalues = pack(form.kind, unpack_steps(form.kind, whole.qweight_RJ, 128))
        want = dequantise(
            QuantisedMatrix(form.kind, qvalues, whole.scales_RG, whole.zero_points_RG, 128, form.group), torch.float32
        )
        assert torch.equal(dequantise_stack(whole, torch.float32).flatten(0, 1), want)
        ids = torch.tensor([[2, 0], [2, 1]], device=DEVICE)
        few = dequantise_stack(stack_of(whole, ids), torch.float32)
        assert torch.equal(few, want.view(3, 8, 128)[ids.flatten()])
    powers = random_stack(FORMS["mxfp4"], 2, 4, 96)
    scales = 2.0 ** (powers.scales_RG[:, :3].double() - 127)
    plain = QuantisedMatrix("e2m1", pack("e2m1", unpack_steps("e2m1", powers.qweight_RJ, 96)), scales, None, 96, 32)
    assert torch.equal(dequantise_stack(powers, torch.float64).flatten(0, 1), dequantise(plain, torch.float64))


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("sorts", [False, True], ids=["read", "sorted"])
@pytest.mark.parametrize("name", [*FORMS, "fp8 rows relu2", "mxfp4 relu2"])
def test_a_mixture_equals_its_definition(name: str, sorts: bool) -> None:
    """Keeps out: rows of another expert, an expert's later pairs left out, gates taken for ups, columns beyond the last one,
    a scale, a zero or a bias of another row or group, and a limit on the wrong side.
    """
    H, F = (128, 128) if name == "int4" else (160, 32)
    activation = Relu2() if name.endswith(" relu2") else SwiGLU(1.7, 7.0) if name == "mxfp4" else None
    experts = experts_of(FORMS[name.removesuffix(" relu2")], 3, H, F, activation)
    x, (topk_weights_TK, topk_ids_TK) = rand(5, H, seed=2) / 8, choice(5, 3, 2)
    with torch.inference_mode():
        got = quantised_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles=SMALL, max_read=0 if sorts else 64)
    assert got.dtype == DTYPE and error(got, exact_mixture(x, topk_weights_TK, topk_ids_TK, experts)) < (
        6e-3 if HAS_GPU else 1e-3
    )


def test_one_token_equals_its_definition() -> None:
    """Keeps out: an expert of another place, where no program looks for other pairs."""
    experts, x, (topk_weights_TK, topk_ids_TK) = (
        experts_of(FORMS["fp8 rows"], 4, 128, 32),
        rand(1, 128, seed=3) / 8,
        choice(1, 4, 3),
    )
    with torch.inference_mode():
        got = quantised_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles=SMALL)
    assert error(got, exact_mixture(x, topk_weights_TK, topk_ids_TK, experts)) < (6e-3 if HAS_GPU else 1e-3)


@pytest.mark.parametrize(("name", "T", "sorts"), [("mxfp4", 5, False), ("mxfp4", 5, True), ("fp8 rows", 1, False)])
def test_pairs_are_skipped(name: str, T: int, sorts: bool) -> None:
    """Of 6 experts, this rank has 3.  Keeps out: weights that are read at a place where no expert lies, and an output that
    nobody wrote in a token's sum."""
    experts = experts_of(FORMS[name], 4, 128, 32, SwiGLU(1.7, 7.0) if name == "mxfp4" else None)
    x, (weights_TK, ids_TK) = rand(T, 128, seed=2) / 8, choice(T, 6, 4)
    mine = launch_own_pairs(weights_TK, ids_TK, range(2, 5))
    weights, ids = own_pairs(weights_TK.double(), ids_TK, range(2, 5))  # by the definition, also on a GPU
    assert torch.equal(mine[0].double(), weights) and torch.equal(mine[1], ids)
    assert 0 < int((mine[1] == 3).sum()) == int((mine[0] == 0).sum())
    own = [stack_of(each, torch.arange(3, device=DEVICE)) for each in experts[:2]]
    biases = [None if each is None else each[:3].contiguous() for each in experts.form[1:3]]
    of_rank = QuantisedExperts(*own, Form(experts.form.activation, *biases, skips=True))
    with torch.inference_mode():
        got = quantised_experts(x, *mine, of_rank, tiles=SMALL, max_read=0 if sorts else 64)
        nan_TKH = torch.full((T, 4, 128), torch.nan, dtype=DTYPE, device=DEVICE).masked_fill((mine[1] < 3)[..., None], 1.0)
        ones = weighted_sum(nan_TKH, mine[0])
    want = exact_mixture(x, *mine, experts)  # at the weight 0, of the fourth expert
    assert error(got, want) < (6e-3 if HAS_GPU else 1e-3)
    torch.testing.assert_close(ones[:, 0].float(), mine[0].sum(1), atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 6, 200])
def test_replays_follow_the_choices(T: int) -> None:
    """Keeps out: experts that a graph reads of the pass that was captured."""
    experts, x, (topk_weights_TK, topk_ids_TK) = experts_of(FORMS["mxfp4"], 8, 256, 96), rand(T, 256, seed=3), choice(T, 8, 3)
    with torch.inference_mode():
        quantised_experts(x, topk_weights_TK, topk_ids_TK, experts)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            got = quantised_experts(x, topk_weights_TK, topk_ids_TK, experts)
        for seed in range(3):
            topk_ids_TK.copy_(torch.rand(T, 8, generator=torch.Generator().manual_seed(seed)).topk(3).indices)
            x.copy_(rand(T, 256, seed=seed))
            graph.replay()
            assert torch.equal(got, quantised_experts(x, topk_weights_TK, topk_ids_TK, experts))


def test_a_gate_holds_its_limits() -> None:
    """Keeps out: a gate that is held from below, too, or an up without its 1."""
    gate_up = torch.tensor([[9.0, -9.0, 0.5, 9.0, -9.0, 0.25]], dtype=torch.float64)
    held = torch.tensor([[7.0, -9.0, 0.5]], dtype=torch.float64)
    want = held * torch.sigmoid(1.702 * held) * (torch.tensor([[7.0, -7.0, 0.25]], dtype=torch.float64) + 1)
    assert torch.equal(SwiGLU(1.702, 7.0)(gate_up), want)


def test_what_the_kernel_can_not_read() -> None:
    """Keeps out: scales of other groups than the kernel reads, such as nvfp4's of 16 columns, and launches on a CPU."""
    assert not any(scales_form(kind, group) for kind, group in (("e2m1", 16), ("e4m3", 64), ("int8", 32), ("int4", 16)))
    x = torch.ones(1, 128)
    assert mixture_tiles(x, experts_of(FORMS["int4"], 2, 128, 128), 2, FAST) is None
    assert expert_tiles(8, 128).block_m == 8 and expert_tiles(4096, 32).block_m == 64


GPT_OSS, QWEN, V3 = (2880, 2880, 32, 4), (2048, 768, 128, 8), (7168, 2048, 16, 8)
PUBLISHED = {
    "mxfp4": GPT_OSS,
    "int4": QWEN,
    "int4 zero points": GPT_OSS,
    "fp8 blocks": V3,
    "fp8 rows": QWEN,
    "int8 zero points": QWEN,
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    """Keeps out: an offset that overflows 32 bits, and tiles that do not cover all rows or pairs."""
    H, F, E, K = PUBLISHED[name]
    experts = experts_of(FORMS[name], E, H, F, SwiGLU(1.702, 7.0))
    for T in (1, 6, 200):
        x, (topk_weights_TK, topk_ids_TK) = rand(T, H, seed=T) / 16, choice(T, E, K)
        with torch.inference_mode():
            assert mixture_tiles(x, experts, K, FAST) is not None
            got = quantised_experts(x, topk_weights_TK, topk_ids_TK, experts)
        few = slice(T - min(T, 6), T)
        assert error(got[few], exact_mixture(x[few], topk_weights_TK[few], topk_ids_TK[few], experts)) < 6e-3, T
