"""LosslessMatrix weights come back bit for bit, on any machine."""

from itertools import product

import pytest
import torch
from toolkit.quantised_weights import check_tiles

from specdec.ops.products.formats.lossless import (
    ALIGN_K,
    MAX_OUTLIERS,
    LosslessMatrix,
    decode_lossless,
    encode_lossless,
    lossless_bytes,
)
from specdec.ops.products.gpus import H100, H200
from specdec.ops.products.tiles.lossless import lossless_tiles

SHAPES = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (10240, 8192, False),
          (57344, 8192, True), (8192, 28672, False), (1024, 512, False), (1024, 128, False), (2056, 1152, False))  # fmt: skip


def spread(rows: int, columns: int, width: float) -> torch.Tensor:
    """Normal numbers whose magnitudes differ by factors of e to the power of `width` more."""
    generator = torch.Generator().manual_seed(rows + columns)
    far = torch.exp(width * torch.randn(rows, columns, generator=generator))
    return (0.02 * torch.randn(rows, columns, generator=generator) * far).bfloat16()


def same(lossless: LosslessMatrix | None, weight: torch.Tensor) -> bool:
    return lossless is not None and torch.equal(decode_lossless(lossless).view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("width", [0.0, 1.0, 1.6])
def test_every_number_comes_back(width: float) -> None:
    """Keeps out: a bit at another place, an outlier in another row or column, a row without any, sizes that `plan` foresees
    otherwise.
    """
    weight = spread(80, 5 * ALIGN_K, width)
    lossless = encode_lossless(weight)
    assert lossless is not None and same(lossless, weight)
    assert lossless.num_bytes == lossless_bytes(80, 5 * ALIGN_K) + 6 * len(lossless.outliers_X)
    assert (len(lossless.outliers_X) > 200) == (width > 1) and lossless.num_bytes < 1.6 * weight.numel()
    counts = lossless.starts.diff()
    assert torch.equal(lossless.max_outliers_E, counts.view(-1, 8).amax(1).int())


def test_extremes_come_back() -> None:
    """Keeps out: zeros, subnormals, infinities and NaNs that become other numbers, and bases at the ends of the exponents."""
    weight = spread(16, 2 * ALIGN_K, 0.0)
    weight[0] = 0
    weight[1, ::40] = 0
    weight[2, 3], weight[2, 4], weight[2, 5] = float("inf"), float("-inf"), float("nan")
    weight[3] = float("inf")
    weight[4] = 1e-40
    weight[5] *= 1e-36
    weight[6] = -3.3e38
    weight[7, ::5] = 1e-30  # 52 of them
    weight[8] = -0.0
    assert same(encode_lossless(weight), weight)


def test_all_bits_of_a_number_come_back() -> None:
    """Keeps out: a bit pattern that is lost.  Each row has 14 exponents and some values far from them."""
    bits = torch.arange(2**16, dtype=torch.int32).short().view(256, 256)  # rows of one sign and two exponents
    mixed = bits.view(2, 128, 256).transpose(0, 1).reshape(128, 512)  # both signs
    weight = torch.cat((mixed, mixed.roll(64, 0)[:, :48], mixed[:, : 2 * ALIGN_K - 48]), 1).view(torch.bfloat16)
    assert weight.shape[1] % ALIGN_K == 0 and same(encode_lossless(weight), weight)


def test_what_can_t_be_lossless_is_left() -> None:
    """Keeps out: other dtypes taken for bfloat16, and rows of which most values are outliers."""
    weight = spread(16, 2 * ALIGN_K, 0.0)
    assert encode_lossless(weight.float()) is None and encode_lossless(weight.half()) is None
    assert encode_lossless(weight[:, : 2 * ALIGN_K - 16]) is None and encode_lossless(weight[:0]) is None
    weight[7, : MAX_OUTLIERS + 1] = 1e-30
    assert encode_lossless(weight) is None
    weight[7, MAX_OUTLIERS] = 0.02
    assert same(encode_lossless(weight), weight)


def test_tiles_fit_a_hopper() -> None:
    """Keeps out: more shared memory or registers than an SM has, more split tiles than counters, a group of warps without a
    step, which would wait for one without end.
    """
    for kind, M, (N, K, gated) in product((H100, H200), (1, 8, 9, 16, 17, 32, 33, 64, 65, 128), SHAPES):
        tiles = lossless_tiles(M, N, K, gated, kind)
        if tiles is None:
            assert M > 64 or (kind is H200 and M > 32 and N < 16384)
            continue
        assert tiles.block_k % ALIGN_K == 0
        check_tiles(tiles, M, N, K, 12, ALIGN_K)
