"""Prompts whose 8-bit latents are converted to a workspace first, against the same prompts over the cache itself.

Shapes: B rows, T queries, H heads, C rank, R rotated dim, L = C + R.
"""

from dataclasses import replace

import pytest
import torch
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment
from toolkit.kernels import DEVICE
from toolkit.oracles.reference import ReferenceBackend
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentView, quantise_latents
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.eager.torch_backend import TorchBackend
from specdec.attention.kernels.triton_backend import TritonBackend
from specdec.attention.kinds import Scoring
from specdec.attention.latent import upconvert
from specdec.attention.latent.limits import Limits
from specdec.attention.latent.upconvert import Workspace, first_rows, workspace_starts
from specdec.attention.latent.upconvert_triton import launch_upconvert
from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment

C, R, H = 128, 16, 4
SCALE = Scoring(scale=0.1)
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def scattered(lens: list[int], P: int) -> tuple[PageTable, Fp8LatentView]:
    """Rows of bytes in which every bit is set where nobody may read."""
    pages = Scattered(lens, P, spare=1, idle_is_dummy=True, seed=P, device=DEVICE)
    latent_NL = pages.fill(C + R)
    rows_NX = torch.where(latent_NL.isnan().any(1, keepdim=True), 0xFF, quantise_latents(latent_NL, C))
    return PageTable(pages.table_BW, P), Fp8LatentView(rows_NX, C)


def prompt(lens: list[int], counts: list[int], P: int) -> tuple[Segment, Fp8LatentView, Tensor]:
    pages, view = scattered(lens, P)
    segment = ragged_causal_segment(pages, counts, lens)
    return segment, view, torch.randn(sum(counts), H, C + R, device=DEVICE)


def test_rows_start_where_the_rows_of_their_chunk_end() -> None:
    """Keeps out: starts that go on counting into the next chunk; a row cut in two; a long row that fits no chunk."""
    assert first_rows([10, 15, 20, 5], 25) == [0, 0, 2, 2]
    assert workspace_starts(ints(10, 15, 20, 5), [0, 0, 2, 2], 1).tolist() == [0, 10, 0, 20]
    assert workspace_starts(ints(10, 16, 0, 5), [0, 0, 0, 0], 16).tolist() == [0, 16, 32, 32]
    assert first_rows([10, 99, 3], 25) == [0, 1, 2] and first_rows([10, 10, 10], 30) == [0, 0, 0]
    for tokens in range(1, 40):
        firsts = first_rows([7, 3, 11, 2, 2, 30, 1], tokens)
        starts = workspace_starts(ints(7, 3, 11, 2, 2, 30, 1), firsts, 1).tolist()
        ends = [start + length for start, length in zip(starts, [7, 3, 11, 2, 2, 30, 1])]
        assert all(end <= max(tokens, length) for end, length in zip(ends, [7, 3, 11, 2, 2, 30, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("P", [1, 5, 64])
def test_the_kernel_converts_what_its_definition_converts(P: int, dtype: torch.dtype) -> None:
    """Keeps out: a row written over its neighbour, latents past a row's end, slots of another page."""
    lens = [37, 0, 5, 16]
    pages, view = scattered(lens, P)
    starts = workspace_starts(ints(*lens), [0] * 4, 8)
    got, want = (torch.full((80, C + R), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    launch_upconvert(view, pages, ints(*lens), starts, 37, got)
    with torch.enable_grad():  # the definition, on a GPU too
        upconvert.upconvert(view, pages, ints(*lens), starts, 37, want)
    assert torch.equal(got.isnan(), want.isnan()) and int((~got.isnan()).all(1).sum()) == sum(lens)
    torch.testing.assert_close(got, want, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("backend", [TorchBackend(), TritonBackend(4)], ids=["torch", "triton"])
@pytest.mark.parametrize(("tokens", "chunks"), [(1000, 1), (256, 2), (1, 3)])
def test_a_prompt_reads_the_same_from_the_workspace(backend: TorchBackend | TritonBackend, tokens: int, chunks: int) -> None:
    """Keeps out: rows that fit no chunk and are left out, states of a chunk that overwrite another's, an empty row."""
    segment, view, q_THL = prompt([40, 9, 66], [9, 9, 2], 5)
    workspace = Workspace.of(segment, view.width, q_THL.dtype, tokens)
    assert len(workspace.chunks) == chunks
    got = workspace.state(backend, q_THL, view, SCALE)
    want = ReferenceBackend().run(q_THL.double(), view, segment, SCALE)
    torch.testing.assert_close(got.out_THD.double(), want.out_THD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse_TH.double(), want.lse_TH, atol=1e-5, rtol=1e-5)


def test_who_converts() -> None:
    """Keeps out: a captured pass that needs a workspace of a size nobody knows; 16-bit latents converted to themselves."""
    segment, view, q_THL = prompt([40, 9], [9, 4], 5)

    def converts(segment: Segment, view: LatentView, *more: Segment, queries: int = 9) -> bool:
        limits = Limits(convert_from=queries)
        return Workspace.of_plan(AttentionPlan((segment, *more)), view, q_THL.dtype, limits) is not None

    assert converts(segment, view)
    assert not converts(segment, view, segment)
    assert not converts(replace(segment, max_cached=None), view)
    assert not converts(replace(segment, causal=False), view)
    assert not converts(segment, MLAView(view.latents(torch.arange(3, device=DEVICE), torch.float32), C))
    assert not converts(segment, view, queries=10)


def test_who_converts_for_selected_keys() -> None:
    """Keeps out: a workspace without bound, and one whose conversion costs more than few queries save."""
    segment, view, q_THL = prompt([40, 9], [9, 4], 5)  # room for 64 tokens of each row

    def converts(queries: int = 13, most: int = 128, segment: Segment = segment) -> bool:
        limits = Limits(convert_from=9, selected_tokens=most, converted_a_query=10)
        return Workspace.of_selected(AttentionPlan((segment,)), view, q_THL.dtype, limits, queries) is not None

    assert converts() and not converts(most=127) and not converts(queries=12)
    assert not converts(segment=replace(segment, max_cached=None))
