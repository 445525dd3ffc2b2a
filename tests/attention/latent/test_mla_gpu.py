"""Latent attention at DeepSeek's dims on a GPU, in bf16, against float64: the Hopper kernel, and Triton's beside it.

Keeps out: a block's tail that is read beyond the row (NaN there), a buffer loaded while it is read, splits that nobody merges.
"""

from typing import Any

import pytest
import torch
from toolkit.attention.answers import attended
from toolkit.attention.caches import Scattered
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kinds import LayerKind, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_new_memory")]
C, R, H = 512, 64, 128
SCALING = Scoring(scale=0.1)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def scattered(lens: list[int], P: int, eight_bits: bool) -> tuple[Tensor, LatentView]:
    """Latents that are NaN wherever no row may read; idle entries name page 0."""
    pages = Scattered(lens, P, spare=1, idle_is_dummy=True, device="cuda")
    latent_NL = pages.fill(C + R, dtype=torch.bfloat16)
    if not eight_bits:
        return pages.table_BW, MLAView(latent_NL, C)
    sizes = torch.tensor([-3, -2, -1, 0, 1, 0, -1, -2, 0], device="cuda")  # so that a neighbour's scale would show
    rows_NX = quantise_latents(latent_NL * 2.0 ** sizes.repeat_interleave(64), C)
    rows_NX[latent_NL.isnan().any(1)] = 0xFF
    return pages.table_BW, Fp8LatentView(rows_NX, C)


def check(q_THL: Tensor, view: LatentView, *segments: Segment, suffix: Segment | None = None) -> None:
    from specdec.attention.kernels.triton_backend import TritonBackend

    plan, oracle = AttentionPlan(segments, suffix=suffix), TorchBackend()
    want = attended(oracle, q_THL.double(), view, plan, SCALING)
    for programs in (1, None, 1000):
        backend = TritonBackend(programs)
        got = attended(backend, q_THL, view, plan, SCALING)
        assert (got.double() - want).norm() / want.norm() < 5e-3, programs


@pytest.mark.parametrize("eight_bits", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("heads", [8, 20, 32])
def test_few_heads(heads: int, eight_bits: bool) -> None:
    """A rank's share of a model, or a small one.  Keeps out: tiles that are wrong, or do not fit, only where rows are few."""
    lens = [1000, 64, 129, 7]
    for P in (16, 64):
        torch.manual_seed(P)
        table, view = scattered(lens, P, eight_bits)
        q_THL = torch.randn(4, heads, C + R, device="cuda", dtype=torch.bfloat16)
        check(q_THL, view, causal_segment(PageTable(table, P), ints(*lens), 1))


@pytest.mark.parametrize("eight_bits", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize(("P", "hopper"), [(64, True), (128, True), (1280, True), (5, True), (1, True), (16, False)])
def test_latents_of_deepseek(monkeypatch: pytest.MonkeyPatch, P: int, hopper: bool, eight_bits: bool) -> None:
    """Decode, chains, trees, first keys and empty rows.  Keeps out: Triton's kernel tested in the Hopper kernel's place."""
    from specdec.attention.latent import mla_launch
    from specdec.attention.latent.mla_launch import LatentTiles, latent_tiles

    generation = mla_launch.gpu_generation(torch.device("cuda"))
    if hopper and generation != 9:
        pytest.skip(f"needs a GPU of compute capability 9.x, this one has {generation}.x")
    chosen = set()

    def spy(
        seqlen_q_packgqa: int, dims: tuple[int, int], dtype: torch.dtype, local: bool, scaled: bool, *gpu: Any
    ) -> LatentTiles:
        assert scaled == eight_bits
        tiles = latent_tiles(seqlen_q_packgqa, dims, dtype, local or not hopper, scaled, *gpu)
        chosen.add((local, tiles.hopper))
        return tiles

    monkeypatch.setattr(mla_launch, "latent_tiles", spy)
    torch.manual_seed(P)
    lens = [1000, 64, 129, 7]
    table, view = scattered(lens, P, eight_bits)
    for queries in (1, 6):
        q_THL = torch.randn(4 * queries, H, C + R, device="cuda", dtype=torch.bfloat16)
        check(q_THL, view, causal_segment(PageTable(table, P), ints(*lens), queries))
    chain = causal_segment(PageTable(table, P), ints(*lens), 6)
    positions = (ints(*lens)[:, None] - 6 + torch.arange(6, device="cuda")).flatten().long()
    check(q_THL, view, chain.local(LayerKind(window=100), positions))
    prefix = [n - 4 for n in lens]
    places = torch.tensor([[n + i for i in range(4)] for n in prefix], device="cuda").repeat_interleave(6, 0)
    slots = PageTable(table.repeat_interleave(6, 0), P).slots_at(places).int()
    suffix = Segment.of_slots(slots, ints(*[1, 2, 3, 4, 2, 1] * 4))
    check(q_THL, view, prefix_segment(PageTable(table, P), ints(*prefix), 6), suffix=suffix)
    check(q_THL, view, prefix_segment(PageTable(table, P), ints(960, 0, 129, 0), 6), suffix=suffix)
    assert chosen == {(False, hopper), (True, False)}
