"""Picked rows and kept constants.  Kernels run under Triton's interpreter where there is no GPU.

Shapes: B sequences, N rows of a sequence, E picked rows, F columns.
"""

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE

from specdec.attention.segment import uniform_cu_seqlens
from specdec.ops.index import arange, kept, predecessors
from specdec.ops.rows import prepend, take_columns, take_rows, take_run
from specdec.ops.rows_triton import launch_prepend, launch_take_columns, launch_take_rows


@pytest.mark.slow_cases
@pytest.mark.parametrize(("B", "N", "E", "F"), [(1, 6, 1, 40), (3, 16, 6, 2100), (2, 1, 4, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_picked_rows(B: int, N: int, E: int, F: int, dtype: torch.dtype) -> None:
    """Keeps out: a row of another sequence, a block of columns left out, strides taken for dense."""
    x = torch.randn(B, N, F + 3).to(DEVICE, dtype)[..., :F]
    index_BE = torch.randint(N, (B, E)).to(DEVICE)
    want = take_rows(x.cpu(), index_BE.cpu())
    assert want.tolist() == [[x[b, n].tolist() for n in row] for b, row in enumerate(index_BE.tolist())]
    out = torch.full((B, E, F), torch.nan, dtype=dtype, device=DEVICE)
    assert launch_take_rows(x, index_BE, out) is out and torch.equal(out.cpu(), want)
    assert torch.equal(launch_take_rows(x, index_BE, None).cpu(), want)
    assert torch.equal(take_rows(x.cpu(), index_BE.cpu(), torch.empty_like(want)), want)


@pytest.mark.parametrize(("B", "N", "E", "F"), [(1, 6, 3, 40), (3, 9, 6, 2100)])
def test_runs_of_rows(B: int, N: int, E: int, F: int) -> None:
    """Keeps out: a run that begins at another sequence's row, or that stays at its first one."""
    x, first_B = torch.randn(B, N, F).to(DEVICE), torch.randint(N - E + 1, (B,)).to(DEVICE)
    want = take_run(x.cpu(), first_B.cpu(), E)
    assert all(torch.equal(want[b], x[b, first : first + E].cpu()) for b, first in enumerate(first_B.tolist()))
    out = torch.full((B, E, F), torch.nan, device=DEVICE)
    assert launch_take_rows(x, first_B[:, None], out, run=E) is out and torch.equal(out.cpu(), want)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("shape", "F"), [((1, 40), 40), ((5, 2100), 2100), ((2, 3, 48), 30), ((0, 16), 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_in_another_order(shape: tuple[int, ...], F: int, dtype: torch.dtype) -> None:
    """Keeps out: a block of columns left out, strides taken for dense, a column of another row."""
    x = torch.randn(*shape[:-1], shape[-1] + 3).to(DEVICE, dtype)[..., : shape[-1]]
    order_F = torch.randperm(shape[-1])[:F].int().to(DEVICE)
    want = take_columns(x.cpu(), order_F.cpu())
    assert want.shape == (*shape[:-1], F) and torch.equal(want, x.cpu()[..., order_F.long().cpu()])
    assert torch.equal(launch_take_columns(x, order_F).cpu(), want)


@pytest.mark.parametrize(("B", "S"), [(1, 7), (3, 1), (40, 5)])
def test_a_column_in_front(B: int, S: int) -> None:
    """Keeps out: ids of another row, and rows whose stride is taken for their length."""
    first_B, ids_BS = torch.randint(90, (B,)).to(DEVICE), torch.randint(90, (B, S + 2)).to(DEVICE)[:, :S]
    got = launch_prepend(first_B, ids_BS)
    assert torch.equal(got.cpu(), prepend(first_B.cpu(), ids_BS.cpu()))
    assert got[:, 0].tolist() == first_B.tolist() and torch.equal(got[:, 1:], ids_BS)


def test_constants_are_made_once() -> None:
    calls = []

    @kept
    def made(n: int) -> torch.Tensor:
        calls.append(n)
        return torch.zeros(n)

    assert made(2) is made(2) and made(3) is not made(2) and calls == [2, 3]
    assert arange(4, DEVICE).tolist() == [0, 1, 2, 3] and predecessors(4, DEVICE).tolist() == [0, 0, 1, 2]
    assert predecessors(1, DEVICE).tolist() == [0] and uniform_cu_seqlens(2, 3, DEVICE).tolist() == [0, 3, 6]


@pytest.mark.gpu
def test_a_constant_first_made_inside_a_capture_is_not_kept() -> None:
    """Keeps out: memory of a graph that was never replayed, handed out as a constant."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        inside = arange(12345, DEVICE)
    outside = arange(12345, DEVICE)
    assert outside is not inside and int(outside[-1]) == 12344 and outside is arange(12345, DEVICE)
    graph.replay()
    assert torch.equal(inside, outside)
