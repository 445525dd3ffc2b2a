"""The difference of two softmaxes' outputs: the kernel against the definition.  Without a GPU it runs in the interpreter."""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.attention.differential.subtract import Difference, subtract_halves
from specdec.attention.differential.subtract_triton import launch_subtract

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3}


def by_hand(out_THE: torch.Tensor, num_kv_heads: int, difference: Difference) -> torch.Tensor:
    """Pair by pair: query head h reads key head h // G, and key heads 2i and 2i + 1 are a pair."""
    T, H, E = out_THE.shape
    G, rows = H // num_kv_heads, []
    for i in range(num_kv_heads // 2):
        for g in range(G):
            both = out_THE[:, 2 * i * G + g] - difference.factor * out_THE[:, (2 * i + 1) * G + g]
            normed = difference.scale * both / (both.square().mean(-1, keepdim=True) + difference.eps).sqrt()
            rows.append(normed if difference.weight_E is None else normed * difference.weight_E.double())
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("T", "K", "G", "E"), [(3, 2, 1, 16), (5, 4, 3, 40), (0, 2, 2, 8)])
def test_difference_is_that_of_the_pairs(T: int, K: int, G: int, E: int, dtype: torch.dtype) -> None:
    """Keeps out: heads paired across groups, a norm over the padded columns too, a factor rounded to 16 bits by the kernel."""
    out_THE = torch.randn(T, K * G, E, generator=torch.Generator().manual_seed(T)).to(DEVICE, dtype)
    for weight_E in (None, torch.linspace(-1.5, 1.5, E, device=DEVICE)):
        difference = Difference(torch.tensor(0.3712345, device=DEVICE), 0.8, 1e-5, weight_E)
        want = by_hand(out_THE.double(), K, difference)
        for function in (launch_subtract, subtract_halves):
            got = function(out_THE, K, difference)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
