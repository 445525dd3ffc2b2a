"""The norm kernels against their definition.  Under Triton's interpreter where there is no GPU.

Shapes: T tokens, H hidden, V vocabulary, C rows below.
"""

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.ops.norm import add_rms_norm, embed_rms_norm, norm_parts, pair_rms_norm, part_squares, rms_norm
from specdec.ops.norm_triton import launch_add_rms_norm, launch_norm_parts, launch_pair_rms_norm, launch_part_squares

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
EPS = 1e-5


def rand(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "H"), [(1, 64), (3, 300), (70, 4096)])
def test_sum_and_norm_equal_the_definition(T: int, H: int, dtype: torch.dtype) -> None:
    """Keeps out: a padded column counted in the mean, a norm of the unrounded sum, rows taken for dense."""
    x = rand(T, H + 8, seed=1, dtype=dtype)[:, :H]
    delta, weight = rand(T, H, seed=2, dtype=dtype), rand(H, seed=3, dtype=dtype)
    total, normed = launch_add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    rounded = (x + delta).double().cpu()
    check(normed, add_rms_norm(rounded, torch.zeros_like(rounded), weight.double().cpu(), EPS)[1])
    same, alone = launch_add_rms_norm(x, None, weight, EPS)
    assert same is x
    check(alone, rms_norm(x.double().cpu(), weight.double().cpu(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_into_given_memory_above_other_rows(dtype: torch.dtype) -> None:
    """Keeps out: a sum written over its neighbours' columns, rows below that are normed or that another's place holds."""
    T, C, H = 3, 4, 96
    x, delta, weight = rand(T, H, seed=1, dtype=dtype), rand(T, H, seed=2, dtype=dtype), rand(H, seed=3, dtype=dtype)
    below = rand(C, H + 8, seed=4, dtype=dtype)[:, :H]
    outs = torch.full((T, 3, H), 7.0, dtype=dtype, device=DEVICE)
    total, normed = launch_add_rms_norm(x, delta, weight, EPS, out_TH=outs[:, 1], below_CH=below)
    assert total.data_ptr() == outs[:, 1].data_ptr() and torch.equal(outs[:, 1], x + delta) and bool((outs[:, ::2] == 7).all())
    assert torch.equal(normed[T:], below)
    exact = [t.double().cpu() for t in (x, delta, weight)]
    want_out = torch.empty(T, H, dtype=torch.float64)
    want = add_rms_norm(*exact, EPS, want_out, below.double().cpu())
    assert want[0] is want_out and torch.equal(want_out, exact[0] + exact[1])
    check(normed, want[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C", [0, 5])
def test_norm_of_embeddings(C: int, dtype: torch.dtype) -> None:
    """Keeps out: an id that reads another's row, the row of the table left where its embedding is wanted."""
    T, H, V = 5, 96, 40
    table, weight = rand(V, H, seed=4, dtype=dtype), rand(H, seed=6, dtype=dtype)
    below = rand(C, H, seed=7, dtype=dtype) if C else None
    ids = torch.randint(V, (T,), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    x, normed = launch_add_rms_norm(table, None, weight, EPS, ids_T=ids, below_CH=below)
    exact = None if below is None else below.double().cpu()
    want_x, want = embed_rms_norm(ids.cpu(), table.double().cpu(), weight.double().cpu(), EPS, exact)
    assert torch.equal(x.double().cpu(), want_x) and torch.equal(want_x, table.double().cpu()[ids.cpu()])
    check(normed, want)
    assert normed.shape == (T + C, H) and (below is None or torch.equal(normed[T:], below))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharers", [0, 3])
def test_norms_of_parts_equal_the_definition(sharers: int, dtype: torch.dtype) -> None:
    """sharers: as many ranks add up their squares; 0: one alone.  Keeps out: a part's end in the next one, the rest changed."""
    T, sizes = 5, (96, 40)
    x = rand(T, 2 * 176, seed=5, dtype=dtype)[:, :176]
    weights = [rand(size, seed=size, dtype=dtype) for size in sizes]
    exact, exact_weights = x.double().cpu(), [weight.double().cpu() for weight in weights]
    squares = launch_part_squares(x, sizes)
    torch.testing.assert_close(squares.double().cpu(), part_squares(exact, sizes), rtol=1e-5, atol=1e-5)
    given = sharers * 2 * squares if sharers else None
    want = norm_parts(exact, exact_weights, EPS, None if given is None else given.double().cpu(), sharers or 1)
    got = launch_norm_parts(x, weights, EPS, given, sharers or 1)
    check(got, want)
    assert torch.equal(got[:, 136:].double().cpu(), exact[:, 136:])
    by_hand = exact[:, 96:136] / ((2 if sharers else 1) * exact[:, 96:136].square().mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(want[:, 96:136], by_hand * exact_weights[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_norm_equals_the_definition(dtype: torch.dtype) -> None:
    """Keeps out: the two halves or their weights swapped, an id that reads another's embedding."""
    T, H, V = 5, 96, 40
    table, x = rand(V, H, seed=4, dtype=dtype), rand(T, 3 * H, seed=5, dtype=dtype)[:, H : 2 * H]
    first, second = rand(H, seed=6, dtype=dtype), rand(H, seed=7, dtype=dtype)
    ids = torch.randint(V, (T,), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    exact = [t.double().cpu() for t in (table, first, x, second)]
    want = pair_rms_norm(ids.cpu(), *exact, EPS)
    check(launch_pair_rms_norm(ids, table, first, x, second, EPS), want)
    assert launch_pair_rms_norm(ids[:0], table, first, x[:0], second, EPS).shape == (0, 2 * H)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_weights_wider_than_what_is_normed(dtype: torch.dtype) -> None:
    """Of zero-centred norms: 1 + w in float32.  Keeps out: a weight, or what is normed, rounded before their product."""
    T, H = 5, 300
    x, other = rand(T, H, seed=1, dtype=dtype), rand(T, H, seed=2, dtype=dtype)
    weight = 1 + 1e-3 * rand(H, seed=3, dtype=torch.float32)  # in 16 bits most of these are 1
    want = rms_norm(x.double().cpu(), weight.double().cpu(), EPS).to(dtype)
    kernels = launch_add_rms_norm(x, None, weight, EPS)[1], launch_add_rms_norm(x - x, x, weight, EPS)[1]
    ids = torch.arange(T, device=DEVICE)
    pair = launch_pair_rms_norm(ids, x, weight, other, 2 * weight, EPS)
    defined = rms_norm(x.cpu(), weight.cpu(), EPS), add_rms_norm(x.cpu() * 0, x.cpu(), weight.cpu(), EPS)[1]
    for got in (
        *kernels,
        *defined,
        pair[:, :H],
        pair_rms_norm(ids.cpu(), x.cpu(), weight.cpu(), x.cpu(), weight.cpu(), EPS)[:, H:],
    ):
        assert got.dtype == dtype and float((got.cpu() == want).float().mean()) > 0.99
