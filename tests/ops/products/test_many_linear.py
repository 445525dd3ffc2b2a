"""The product of many rows that SMs share evenly: how its tiles are divided, and on a Hopper GPU its sums against float64.

Shapes: T rows, I in, O out.
"""

import pytest
import torch
import torch.nn.functional as F
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.ops.products.linear import silu_mul
from specdec.ops.products.tiles import ProductTiles

NAN = float("nan")
needs_hopper = pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper GPUs"
)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and partial sums start as NaN: what is read or returned unwritten shows."""
    plain = Tensor.new_empty

    def new_nan(self: Tensor, *shape: int, **kwargs: torch.dtype) -> Tensor:
        return plain(self, *shape, **kwargs).fill_(NAN)

    monkeypatch.setattr(Tensor, "new_empty", new_nan)


def parts_of(program: int, programs: int, steps: int, whole: int, shared: int) -> list[tuple[int, range]]:
    """What a program computes, tile by tile, as the kernel's docstring says it."""
    first, end = (shared * steps * p // programs for p in (program, program + 1))
    tiles = sorted({step // steps for step in range(first, end)})
    pieces = [(t, range(max(first, t * steps) - t * steps, min(end, t * steps + steps) - t * steps)) for t in tiles]
    return pieces + [(shared + t, range(steps)) for t in range(program, whole, programs)]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    ("T", "rows", "I"), [(192, 28672, 4096), (250, 4096, 14336), (65, 264, 1000), (129, 72, 64), (512, 6144, 4096)]
)
def test_every_step_of_every_tile_is_somebody_s(T: int, rows: int, I: int, splits: int) -> None:
    """Keeps out: a step that nobody or two compute, a program with three parts of shared tiles or with none."""
    from specdec.ops.products.linear_many_hopper import division

    tiles = ProductTiles(64, 128, 64, splits, 4, 4, programs=132)
    programs, steps, whole, shared, of_t = division(T, rows, I, tiles)
    assert programs <= 132 and of_t == -(-T // 64) and (splits > 1 or not shared)
    done = [(t, k) for p in range(programs) for t, part in parts_of(p, programs, steps, whole, shared) for k in part]
    assert sorted(done) == [(t, k) for t in range(-(-T // 64) * -(-rows // 128)) for k in range(steps)]
    for p in range(programs):
        lengths = [len(part) for t, part in parts_of(p, programs, steps, whole, shared) if t < shared]
        assert all(lengths) and len(lengths) in ((1, 2) if shared else (0,))


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    product = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return silu_mul(product) if gated else product


def strided(T: int, I: int, dtype: torch.dtype) -> Tensor:
    """[T, I] inside a larger tensor that is NaN elsewhere: rows beyond T and columns beyond I are poison."""
    room = torch.full((T + 20, I + 16), NAN, device=DEVICE, dtype=dtype)
    room[:T, :I] = torch.randn(T, I, device=DEVICE)
    return room[:T, :I]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    ("T", "O", "I", "tiles", "programs"),
    [(192, 1048, 1000, (192, 256, 64, 1, 12, 4), 132), (190, 520, 4096, (192, 256, 64, 2, 12, 4), 24),
     (129, 1160, 520, (192, 256, 64, 2, 12, 4), 7), (384, 264, 1000, (192, 128, 64, 2, 12, 5), 3),
     (65, 72, 264, (128, 256, 64, 2, 8, 4), 3), (100, 40, 1032, (128, 128, 64, 2, 8, 4), 8),
     (300, 1048, 264, (128, 256, 64, 1, 8, 4), 5), (256, 1048, 1000, (256, 192, 64, 2, 12, 4), 20),
     (250, 520, 520, (256, 192, 64, 1, 12, 4), 132), (500, 264, 4096, (256, 128, 64, 2, 16, 3), 9)],
)  # fmt: skip
def test_many_rows_equal_the_definition(T: int, O: int, I: int, tiles: tuple[int, ...], programs: int, gated: bool) -> None:
    """Keeps out: a stage that is filled before all groups have read it, gate and up of other rows, sums of another tile's
    parts, sums in order of arrival, counters that the next launch finds stale, stores beyond T or O.
    """
    from specdec.ops.products.linear_many_hopper import launch_many_linear
    from specdec.ops.products.linear_triton import arrivals_of

    rows, dtype = (2 * O, torch.float16) if gated and T == 300 else (2 * O if gated else O, torch.bfloat16)
    x, weight = strided(T, I, dtype), (torch.randn(rows, I, device=DEVICE) * I**-0.5).to(dtype)
    each = ProductTiles(*tiles, programs=programs)
    for bias in (torch.randn(rows, device=DEVICE).to(dtype), None):
        want = exact(x, weight, bias, gated)
        outs = [launch_many_linear(x, weight, bias, gated, each) for _ in range(3)]
        error = (outs[0].double() - want).norm() / want.norm()
        assert error < {torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype], f"off by {float(error):.1e}"
        assert all(torch.equal(outs[0], out) for out in outs)
    assert not arrivals_of(x.device).any()
