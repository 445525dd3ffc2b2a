"""The top-k kernels against their definition: every tie, every float type, any slicing of the rows.

Under Triton's interpreter where there is no GPU.

Shapes: R rows, V vocabulary.
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.ops.topk import best_logprobs, greedy_tokens, top_tokens
from specdec.ops.topk_triton import Scan, launch_best_logprobs, launch_greedy_tokens, launch_scan, launch_top_tokens, slice_size

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New memory is NaN, or the largest integer: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def hard_rows(V: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of every kind: plain, coarse (ties), negative, all equal, signed zeros, extremes, mostly -inf."""
    generator = torch.Generator().manual_seed(seed)

    def plain() -> Tensor:
        return torch.randn(V, generator=generator) * 3

    zeros = torch.where(torch.rand(V, generator=generator) < 0.5, 0.0, -0.0)
    extremes = torch.tensor([-torch.inf, -6e4, -1e-7, -0.0, 0.0, 1e-7, 1.0, 6e4])
    extreme = extremes[torch.randint(len(extremes), (V,), generator=generator)]
    sparse = torch.where(torch.rand(V, generator=generator) < 0.01, plain(), -torch.inf)
    sparse[V // 2] = 1.0
    kinds = [plain(), plain().round(), -plain().abs(), torch.full((V,), -2.5), zeros, extreme, sparse, plain() * 0.1]
    return torch.stack(kinds).to(dtype)


def check(logits: Tensor, k: int, scan: Scan = launch_scan) -> None:
    V = logits.shape[-1]
    offsets = torch.arange(V) * 2
    want_logp, want_ids = top_tokens(logits, k, offsets)
    on_device = logits.to(DEVICE)
    logp, ids = launch_top_tokens(on_device, k, offsets.to(DEVICE), None, scan)
    assert torch.equal(ids.cpu(), want_ids), k
    torch.testing.assert_close(logp.cpu(), want_logp, atol=2e-5, rtol=2e-6)
    assert not bool((logp > 0).any())
    assert torch.equal(launch_greedy_tokens(on_device, None, scan=scan).cpu(), greedy_tokens(logits))


def test_the_best_one_s_log_probability_is_one_number() -> None:
    """Keeps out: a log-probability whose last bit tells how many rows, or rows of what type, were computed beside it."""
    logits = hard_rows(4100, torch.bfloat16, 1).repeat(8, 1)
    on_device = logits.to(DEVICE)
    got = launch_best_logprobs(on_device)
    want = logits.double().log_softmax(-1).amax(-1, keepdim=True).float()
    for found in (got.cpu(), best_logprobs(logits)):
        torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-6)
    strided = torch.zeros(64, 4112, dtype=torch.float32, device=DEVICE)[:, :4100].copy_(on_device)
    assert all(torch.equal(launch_best_logprobs(given), got) for given in (on_device.float(), strided))
    for rows in (1, 3, 8):
        assert torch.equal(launch_best_logprobs(on_device[:rows]), got[:rows]), rows


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("V", "k"), [(7, 7), (300, 1), (2049, 3), (4100, 10)])
def test_equals_the_definition(V: int, k: int, dtype: torch.dtype) -> None:
    """Keeps out: ties to whoever came first in a slice, -0.0 below 0.0, a tail shorter than k that yields a token twice."""
    check(hard_rows(V, dtype, V), k)


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 256])
def test_slices_change_nothing(size: int) -> None:
    """Keeps out: a tie between two slices that goes to the wrong one; slices with fewer tokens than k."""
    scan = partial(launch_scan, size=size)
    for V in (33, 260):
        check(hard_rows(V, torch.bfloat16, V), 5, scan)
    check(hard_rows(40, torch.float32, 1), 20, scan)


@pytest.mark.slow
def test_nan_stays_in_range() -> None:
    """Keeps out: an id that no embedding has, drawn for a padded row of garbage.  NaN is largest, as in torch."""
    logits = hard_rows(1000, torch.float32, 2)[:3]
    logits[0] = torch.nan
    logits[1, [700, 30]] = torch.nan
    logits[2] = -torch.inf
    for dtype in DTYPES:
        x = logits.to(DEVICE, dtype)
        assert torch.equal(launch_greedy_tokens(x, None).cpu(), torch.tensor([0, 30, 0]))
        _, ids = launch_top_tokens(x, 4, None, None)
        assert ids[0].tolist() == [0, 1, 2, 3] and ids[1, :2].tolist() == [30, 700] and ids[2].tolist() == [0, 1, 2, 3]


def test_strided_rows_more_dimensions_and_an_out() -> None:
    """Keeps out: rows taken for dense, and a result that is not where it was asked for."""
    wide = hard_rows(600, torch.float32, 3).to(DEVICE)
    out = torch.empty(8, 6, device=DEVICE), torch.empty(8, 6, dtype=torch.int64, device=DEVICE)
    got = launch_top_tokens(wide[:, :512], 6, None, out)
    assert got[0] is out[0] and got[1] is out[1]
    assert torch.equal(out[1].cpu(), top_tokens(wide[:, :512].cpu(), 6)[1])
    folded = launch_top_tokens(wide[:, :512].reshape(2, 4, 512), 6, None, None)
    assert torch.equal(folded[1].view(8, 6), out[1]) and torch.equal(folded[0].view(8, 6), out[0])
    assert launch_greedy_tokens(wide[:0], None).shape == (0,)


def test_slices_cover_the_settings() -> None:
    """Keeps out: a slice too large for one program, a merge of thousands of keys."""
    for V in (40, 32000, 128256, 151936):
        for k in (1, 2, 8, 10, 32, 64):
            for rows in (1, 6, 8, 80, 640, 4096):
                size = slice_size(rows, V, k)
                assert size & (size - 1) == 0 and 256 <= size <= 16384 and -(-V // size) * k <= 1024


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "V", "k"), [(1, 32000, 1), (8, 32000, 8), (10, 32000, 10), (320, 32000, 10), (60, 128256, 1)])
def test_real_sizes(R: int, V: int, k: int) -> None:
    """bfloat16 logits have about 256 values between two powers of two: thousands of ties."""
    logits = torch.randn(R, V, generator=torch.Generator().manual_seed(R)).to(torch.bfloat16)
    check(logits, k)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [32, 64])
def test_wide_beams(k: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check(torch.randn(3, 128256, generator=torch.Generator().manual_seed(k)).to(dtype), k)
