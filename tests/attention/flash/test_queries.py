"""Queries in float8: the definition's promises, and the kernels against the definition, bit for bit."""

import pytest
import torch
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.attention.flash.queries import MIN_SCALE, float8_queries, power_of_two
from specdec.attention.flash.queries_triton import launch_float8_queries

BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


def some(lens: list[int], H: int, D: int, beyond: int = 0) -> tuple[Tensor, Tensor]:
    """Queries whose rows and heads differ widely in size, and cumulative counts.  beyond: queries that belong to no row."""
    generator = torch.Generator().manual_seed(sum(lens) * H)
    q_THD = torch.randn(sum(lens) + beyond, H, D, generator=generator)
    if not HAS_GPU:  # Triton's interpreter rounds to float8 in a way of its own: numbers of float8 times powers of two
        q_THD = q_THD.to(torch.float8_e4m3fn).float()
    sizes_R = 2.0 ** torch.randint(-4, 5, (len(lens) + 1,), generator=generator)
    q_THD *= sizes_R.repeat_interleave(torch.tensor([*lens, beyond]))[:, None, None] * 2.0 ** torch.arange(H)[:, None]
    return q_THD, torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("lens", [[3, 3], [1, 0, 9, 2]])
def test_every_row_and_kv_head_has_its_own_scale(lens: list[int]) -> None:
    """Keeps out: the scale of another row or head, numbers beyond float8's range, and a scale that no row needs."""
    H, K = 6, 3
    q_THD, cu_seqlens = some(lens, H, 16, beyond=2)
    found, scale_RK = float8_queries(q_THD, cu_seqlens, max(lens), K)
    for row, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False)):
        for head in range(K):
            own = q_THD[start:end, 2 * head : 2 * head + 2]
            scale = float(scale_RK[row, head])
            back = found[start:end, 2 * head : 2 * head + 2].double() * scale
            torch.testing.assert_close(back, own.double(), rtol=2**-4, atol=scale * 2**-10)
            if own.numel():
                assert 224 <= float(own.abs().max()) / scale <= 448 and torch.frexp(torch.tensor(scale))[0] == 0.5
            else:
                assert scale == MIN_SCALE


def test_a_query_is_rounded_alike_among_other_queries() -> None:
    """Keeps out: a node of a tree that is rounded otherwise than the same token in plain decoding, so that texts differ."""
    q_THD, cu_seqlens = some([8], 4, 32)
    q_THD = torch.where(q_THD.abs() < q_THD.abs().max() * 2**-13, 0.0, q_THD)
    together, scale_RK = float8_queries(q_THD, cu_seqlens, 8, 2)
    alone, scales_TK = float8_queries(q_THD, torch.arange(9, dtype=torch.int32), 1, 2)
    for found, scale in ((alone, scales_TK), (together, scale_RK.expand(8, 2))):
        numbers = found.float() * scale.repeat_interleave(2, 1)[:, :, None]
        torch.testing.assert_close(numbers, together.float() * scale_RK.repeat_interleave(2, 1)[:, :, None], rtol=0, atol=0)
    assert scales_TK.unique(dim=0).shape[0] > 1, "every query alone has the same scale: the test shows nothing"


def test_powers_of_two() -> None:
    """Keeps out: a scale one step too small, with which the largest number would not fit."""
    x = torch.tensor([0.0, 1.0, 1.0000001, 0.75, 3.0, 2.0**-120, torch.inf])
    assert power_of_two(x).tolist() == [MIN_SCALE, 1.0, 2.0, 1.0, 4.0, MIN_SCALE, torch.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(
    ("lens", "H", "K", "D", "block"),
    [([5, 5], 4, 2, 16, 64), ([1, 0, 9, 2], 6, 2, 24, 16), ([70, 3], 3, 1, 16, 16), ([40], 8, 2, 80, 32)],
)  # fmt: skip
def test_kernels_equal_their_definition(lens: list[int], H: int, K: int, D: int, block: int, dtype: torch.dtype) -> None:
    """Keeps out: a block that a program skips or reads of the next row, a largest number of other programs left out."""
    q_THD, cu_seqlens = some(lens, H, D, beyond=1)
    q_THD[-1] = torch.nan  # belongs to no row
    wide = torch.cat((q_THD, q_THD), dim=1).to(dtype)  # strided, as the queries of a fused projection
    want, want_scale = float8_queries(wide[:, :H].float(), cu_seqlens, max(lens), K)
    got, scale_RK = launch_float8_queries(wide.to(DEVICE)[:, :H], cu_seqlens.to(DEVICE), max(lens), K, block, 3)
    count = sum(lens)
    assert torch.equal(got.view(torch.uint8).cpu()[:count], want.view(torch.uint8)[:count])
    assert torch.equal(scale_RK.cpu(), want_scale)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_stays_so(bad: float) -> None:
    """Keeps out: a broken activation that comes out as a plausible number."""
    q_THD, cu_seqlens = some([4, 4], 4, 16)
    q_THD[1, 0, 3] = bad
    found = [float8_queries(q_THD, cu_seqlens, 4, 2)]
    if HAS_GPU:  # the interpreter knows no NaN in float8
        found.append(launch_float8_queries(q_THD.to(DEVICE), cu_seqlens.to(DEVICE), 4, 2))
    for rounded, _ in found:
        broken = rounded.float().cpu().isnan()
        assert broken[1, 0, 3] and not broken[4:].any()
