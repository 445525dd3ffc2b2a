"""The store of an indexer's keys: its definition against torch's LayerNorm and a rotation by hand, the kernel against both."""

import pytest
import torch
import torch.nn.functional as F
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.attention.sparse.index_store import IndexPrep, store_index
from specdec.attention.sparse.index_store_triton import launch_store_index
from specdec.ops.rope import Rotation, rotary_table

NAN = float("nan")
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")
SLOTS, POSITIONS = [3, 9, 0, 4, 5, 11, 2], [0, 5, 9, 1, 2, 250, 30]
SIZES = [(5, 16, 8), (1, 24, 6), (33, 8, 8), (64, 128, 64)]  # heads, dims, rotated dims


def rand(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def inputs(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, IndexPrep]:
    """Queries, keys and weights as slices of wider projections, slots, and what has to be done."""
    (J, I, R), T = sizes, len(SLOTS)
    q_TJI = rand(T, 30 + J * I, seed=1, dtype=dtype)[:, 30:].unflatten(1, (J, I))
    both = rand(T, 20 + I + J, seed=2, dtype=dtype)
    table = rotary_table(100.0 ** -(torch.arange(R // 2) / (R // 2)), 256).to(DEVICE, dtype)
    rotation = Rotation(table, torch.tensor(POSITIONS, device=DEVICE))
    prep = IndexPrep(rotation, 1 + 0.2 * rand(I, seed=3, dtype=dtype), rand(I, seed=4, dtype=dtype), 1e-6, 0.3)
    return q_TJI, both[:, 20 : 20 + I], both[:, 20 + I :], torch.tensor(SLOTS, device=DEVICE), prep


def turned(x_I: Tensor, position: int, R: int) -> Tensor:
    """The first R numbers rotated by halves, one pair at a time."""
    out = x_I.clone()
    for e in range(R // 2):
        angle = torch.tensor(position * 100.0 ** -(e / (R // 2)), dtype=torch.float64)
        low, high = x_I[e], x_I[R // 2 + e]
        out[e], out[R // 2 + e] = low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()
    return out


def test_the_definition() -> None:
    """Keeps out: the last numbers rotated in place of the first, a norm after the rotation or without its bias."""
    q_TJI, key_TI, weights_TJ, slots_T, prep = inputs((3, 16, 8), torch.float64)
    buffer, before = torch.full((12, 16), NAN, dtype=torch.float64, device=DEVICE), q_TJI.clone()
    normed = F.layer_norm(key_TI, (16,), prep.norm_I, prep.bias_I, prep.eps)
    scaled = store_index(buffer, q_TJI, key_TI, weights_TJ, slots_T, prep)
    close = dict(atol=1e-4, rtol=1e-4)  # the rotary table is made in float32
    for t, (slot, position) in enumerate(zip(SLOTS, POSITIONS)):
        torch.testing.assert_close(buffer[slot], turned(normed[t], position, 8), **close)
        for head in range(3):
            torch.testing.assert_close(q_TJI[t, head], turned(before[t, head], position, 8), **close)
    torch.testing.assert_close(scaled, weights_TJ * 0.3)
    assert buffer[[1, 6, 7, 8, 10]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_does_what_its_definition_does(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Keeps out: padded dims that enter the norm, halves swapped, queries of another head."""
    check(sizes, dtype, 1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_in_bfloat16(sizes: tuple[int, int, int]) -> None:
    """Keeps out: sums of a norm in 16 bits."""
    check(sizes, torch.bfloat16, 3e-2)


def check(sizes: tuple[int, int, int], dtype: torch.dtype, tolerance: float) -> None:
    q_TJI, key_TI, weights_TJ, slots_T, prep = inputs(sizes, dtype)
    wide_q, wide_key, wide_weights, _, _ = (x.double() if isinstance(x, Tensor) else x for x in inputs(sizes, dtype))
    wide = IndexPrep(
        Rotation(prep.rotation.table_P2D.double(), prep.rotation.positions_T),
        prep.norm_I.double(), prep.bias_I.double(), prep.eps, prep.scale,
    )  # fmt: skip
    want, got = (torch.full((12, sizes[1]), NAN, dtype=d, device=DEVICE) for d in (torch.float64, dtype))
    with torch.enable_grad():  # the definition, on a GPU too
        want_scaled = store_index(want, wide_q, wide_key, wide_weights, slots_T, wide)
    scaled = launch_store_index(got, q_TJI, key_TI, weights_TJ, slots_T, prep)
    close = dict(atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(got.double(), want, **close)
    torch.testing.assert_close(q_TJI.double(), wide_q, **close)
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled.double(), want_scaled, atol=1e-6, rtol=1e-6)
