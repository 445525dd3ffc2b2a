"""The latent kernels over 8-bit latents, against a float64 softmax over what the rows of bytes stand for.

Slots that nobody may read hold only bits of NaN: quantised values, scales and rotated parts.

Shapes: T queries, H heads, C rank, R rotated dim, L = C + R.
"""

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from toolkit.kernels import DEVICE, HAS_GPU
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents, row_bytes
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import LayerKind, Scoring
from specdec.attention.latent import mla_launch
from specdec.attention.latent.mla import store_latent
from specdec.attention.latent.mla_store_triton import launch_store_latent
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.ops.rope import Rotation, rotary_table

C, R, H = 128, 16, 4
SCALE = Scoring(scale=0.1)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
BACKENDS = [TorchBackend(), TritonBackend(programs=1), TritonBackend(programs=64)]
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def scattered(lens: list[int], P: int, seed: int, C: int = C, R: int = R) -> tuple[PageTable, Fp8LatentView]:
    """A page table in random order, and rows of random latents; every bit is set where no row may read."""
    pages = Scattered(lens, P, spare=1, idle_is_dummy=True, seed=seed, device=DEVICE)
    latent_NL = pages.fill(C + R)
    latent_NL[:, :C] *= 10.0 ** (torch.arange(C, device=DEVICE) // 128 - 1)  # so that a neighbour's scale would show
    rows_NX = torch.where(latent_NL.isnan().any(1, keepdim=True), 0xFF, quantise_latents(latent_NL, C))
    return PageTable(pages.table_BW, P), Fp8LatentView(rows_NX, C)


def queries(*shape: int, dtype: torch.dtype, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def suffix_rows(pages: PageTable, lens: list[int], counts: list[int]) -> Segment:
    """One-query rows of a tree: query q of a row reads counts[q] of the slots before lens, last first."""
    places = torch.tensor([[max(n - 1 - i, 0) for i in range(max(counts))] for n in lens], device=DEVICE)
    slots = pages.slots_at(places).repeat_interleave(len(counts), 0)
    return Segment.of_slots(slots.int(), ints(*(counts * len(lens))))


def check(backend: Backend, q_THL: Tensor, view: Fp8LatentView, *segments: Segment, suffix: Segment | None = None) -> None:
    plan = AttentionPlan(segments, suffix=suffix)
    want = attended(ReferenceBackend(), q_THL.double(), view, plan, SCALE)
    got = attended(backend, q_THL, view, plan, SCALE)
    assert got.dtype == q_THL.dtype
    size, tolerance = float(want.abs().max()), TOLERANCE[q_THL.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance * size, rtol=tolerance)


@pytest.mark.slow_cases
def test_only_bfloat16_queries_go_to_the_hopper_kernel() -> None:
    """Keeps out: rotated parts, which 8-bit rows hold in bfloat16, copied as they are beside float16 queries."""
    chosen = {
        (dtype, scaled): mla_launch.latent_tiles.__wrapped__(128, (512, 576), dtype, False, scaled, 9, True).hopper
        for dtype in (torch.float16, torch.bfloat16)
        for scaled in (False, True)
    }
    assert [key for key, hopper in chosen.items() if not hopper] == [(torch.float16, True)]


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton", "triton-split"])
@pytest.mark.parametrize(("P", "count"), [(1, 1), (5, 6), (16, 3)])
def test_chains(backend: Backend, P: int, count: int, dtype: torch.dtype) -> None:
    """Any page size, and an empty row.  Keeps out: scales of another slot, quantised values read at the latents' stride, NaN of
    a tail.
    """
    lens = [count, 7, 133, 0]
    pages, view = scattered(lens, P, seed=P)
    check(backend, queries(4 * count, H, C + R, dtype=dtype), view, causal_segment(pages, ints(*lens), count))


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=["torch", "triton", "triton-split"])
@pytest.mark.parametrize("P", [1, 5, 16])
def test_trees(backend: Backend, P: int, dtype: torch.dtype) -> None:
    """Prefix and rows of slots.  Keeps out: a suffix whose quantised values are read without their scales, or as 16-bit
    latents.
    """
    lens, counts = [90, 0, 20], [1, 2, 3, 2]
    pages, view = scattered([n + 3 for n in lens], P, seed=20 + P)
    suffix = suffix_rows(pages, [n + 3 for n in lens], counts)
    q_THL = queries(len(lens) * len(counts), H, C + R, dtype=dtype)
    check(backend, q_THL, view, prefix_segment(pages, ints(*lens), len(counts)), suffix=suffix)


def test_shared_prefixes_windows_and_rows_of_prompts() -> None:
    """Keeps out: first keys that are ignored once latents have scales; a segment's states written over another's."""
    backend = TritonBackend(programs=64)
    pages, view = scattered([64, 64], 16, seed=5)
    q_THL = queries(6, H, C + R, dtype=torch.float32)
    shared = Segment(PageTable(pages.table[:1], 16), ints(48), ints(0, 6), 6)
    own = Segment(PageTable(pages.table[:, 3:], 16), ints(9, 1), ints(0, 3, 6), 3)
    check(backend, q_THL, view, shared, own, suffix=suffix_rows(pages, [64, 64], [1, 2, 2]))
    chain = causal_segment(pages, ints(51, 51), 3).local(LayerKind(window=20), torch.tensor([48, 49, 50] * 2).to(DEVICE))
    check(backend, q_THL, view, chain)
    unread = pages.slots_at(torch.arange(29, device=DEVICE).expand(2, 29)).flatten()
    view.rows[unread] = 0xFF  # keys before all windows may be overwritten
    check(backend, q_THL, view, chain)


def test_several_scales_and_odd_dims() -> None:
    """Keeps out: groups taken for neighbours where the rank is padded, and a rotated dim that is no power of two."""
    pages, view = scattered([40, 3], 5, seed=7, C=384, R=6)
    suffix = suffix_rows(pages, [40, 3], [2, 1])
    q_THL = queries(4, 3, 390, dtype=torch.float32)
    check(TritonBackend(8), q_THL, view, prefix_segment(pages, ints(38, 1), 2), suffix=suffix)


# ---- the store ----


def prep(T: int, C: int, R: int, dtype: torch.dtype) -> LatentPrep:
    table = rotary_table(100.0 ** -(torch.arange(R // 2) / (R // 2)), 256).to(DEVICE, dtype)
    norm_C = 1 + torch.rand(C, generator=torch.Generator().manual_seed(1))
    return LatentPrep(Rotation(table, (7 * torch.arange(T)).to(DEVICE)), norm_C.to(DEVICE, dtype), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + ([torch.bfloat16] if HAS_GPU else []), ids=str)
@pytest.mark.parametrize(("C", "R"), [(128, 16), (384, 6)])
def test_the_store_kernel_writes_the_bytes_of_its_definition(C: int, R: int, dtype: torch.dtype) -> None:
    """Keeps out: quantised values of the raw latent, scales in another group's or slot's place, a rotated part that is
    quantised.

    A norm's sum may come out one rounding apart, so a few quantised values may be neighbours.  Triton's interpreter forgets the
    carry from mantissa to exponent where it converts to float8: there a value of 2^n may come out as 2^(n - 1).
    """
    T, N, slots_T = 9, 12, torch.tensor([3, 9, 0, 4, 5, 11, 2, 15, 8], device=DEVICE)
    q_THQ, latent_TL = queries(T, 5, N + R, dtype=dtype), queries(T, 30 + C + R, dtype=dtype, seed=3)[:, 30:]
    got, want = (Fp8LatentView(torch.full((17, row_bytes(C, R)), 0xFF, dtype=torch.uint8, device=DEVICE), C) for _ in range(2))
    out = torch.full((T, 5, C + R), float("nan"), device=DEVICE, dtype=dtype)
    how = prep(T, C, R, dtype)
    launch_store_latent(got, q_THQ[..., N:], latent_TL, slots_T, how, out[..., C:])
    with torch.enable_grad():  # the definition, on a GPU too
        store_latent(want, q_THQ[..., N:], latent_TL.clone(), slots_T, how)
    eps = torch.finfo(dtype).eps
    for part, exact in zip(got.parts, want.parts):
        assert torch.equal(part.float().isnan(), exact.float().isnan())
    (values, rope, scales), (exact_values, exact_rope, exact_scales) = (
        [x[slots_T].float() for x in v.parts] for v in (got, want)
    )
    torch.testing.assert_close(scales, exact_scales, rtol=2 * eps, atol=0)
    torch.testing.assert_close(rope, exact_rope, rtol=2.0**-7, atol=1e-3)
    step = torch.maximum(exact_values.abs() * 2.0**-3, torch.tensor(2.0**-9, device=DEVICE))
    if not HAS_GPU:
        values = torch.where((values * 2 == exact_values) & (exact_values.abs().frexp().mantissa == 0.5), exact_values, values)
    assert ((values - exact_values).abs() <= step).all()
    assert float((values != exact_values).float().mean()) < 0.02
    torch.testing.assert_close(out[..., C:], q_THQ[..., N:], rtol=4 * eps, atol=4 * eps)
    assert out[..., :C].isnan().all()
