"""What DFlash2 heads compute beside products and attention: definitions by plain loops, and kernels against definitions.

Shapes: R rows of blocks of B each, H hidden, T taps, G groups, B sequences, S levels, C candidates, r rank, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.draft.block.dflash2.children import best_children
from specdec.draft.block.dflash2.children_triton import launch_best_children
from specdec.draft.block.dflash2.convolve import convolve, convolve_add_norm
from specdec.draft.block.dflash2.convolve_triton import launch_convolve, launch_convolve_add_norm
from specdec.ops.noise.gumbel import Noise
from specdec.ops.norm import rms_norm
from specdec.ops.products.partials import Partials

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(3, 6, 24, 2, 3), (1, 16, 96, 4, 6), (2, 5, 32, 1, 1), (1, 4, 32, 4, 32)]  # blocks, B, H, T, G


def drawn(blocks: int, size: int, H: int, taps: int, groups: int, dtype: torch.dtype) -> list[Tensor]:
    """(x, a sublayer's output, what rows add to their kernels, the learned kernels, rows below, the norm's weight)."""
    generator, R = torch.Generator().manual_seed(H + taps), blocks * size
    shapes = [(R, H), (R, H), (R, 2 * taps * groups), (2, taps, H), (7, H), (H,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_loops(x_RH: Tensor, own_RX: Tensor, base_2TH: Tensor, side: int, size: int) -> Tensor:
    (R, H), taps, out = x_RH.shape, base_2TH.shape[1], torch.zeros_like(x_RH)
    groups = own_RX.shape[1] // (2 * taps)
    for row in range(R):
        for tap in range(taps):
            if row % size < tap:
                continue
            for h in range(H):
                own = own_RX[row, (side * taps + tap) * groups + h // (H // groups)]
                out[row, h] += (base_2TH[side, tap, h] + own) * x_RH[row - tap, h]
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_definition(shape: tuple[int, int, int, int, int]) -> None:
    """Keeps out: a kernel of the row that is read, a tap into the block before, a column of another group, sides exchanged."""
    x, delta, own, base, below, weight = drawn(*shape, torch.float64)
    size = shape[1]
    for side in (0, 1):
        torch.testing.assert_close(convolve(x, own, base, side, size), by_loops(x, own, base, side, size))
    assert torch.equal(convolve(x, own, base, 0, size, below)[len(x) :], below)
    total, normed = convolve_add_norm(x, delta, own, base, size, weight, 1e-5)
    torch.testing.assert_close(total, x + by_loops(delta, own, base, 1, size))
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_their_definitions(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    x, delta, own, base, below, weight = (each.to(DEVICE) for each in drawn(*shape, dtype))
    size, wide = shape[1], {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
    for side in (0, 1):
        got = launch_convolve(x, own, base, side, size, below)
        torch.testing.assert_close(got.cpu(), convolve(*(e.cpu() for e in (x, own, base)), side, size, below.cpu()), **wide)
    sums = torch.stack((delta.float() * 0.25, delta.float() * 0.5, delta.float() * 0.25))
    for given in (delta, Partials(sums, dtype)):
        host = delta.cpu() if isinstance(given, Tensor) else Partials(given.sums_SMN.cpu(), dtype)
        got = launch_convolve_add_norm(x, given, own, base, size, weight, 1e-5)
        want = convolve_add_norm(x.cpu(), host, own.cpu(), base.cpu(), size, weight.cpu(), 1e-5)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.cpu(), other, **wide)


LEVELS = [(1, 3, 4, 5, 4, 20), (2, 5, 16, 64, 3, 50), (3, 2, 9, 200, 1, 30), (1, 4, 20, 16, 20, 64)]  # B, S, C, r, K, V


def levels(B: int, S: int, C: int, r: int, V: int, dtype: torch.dtype) -> list[Tensor]:
    """(own logits, tokens, roots, gates, both tables)."""
    generator = torch.Generator().manual_seed(C + r)
    own = torch.randn(B, S, C, generator=generator).sort(-1, descending=True).values
    tokens = torch.stack([torch.randperm(V, generator=generator)[:C] for _ in range(B * S)]).view(B, S, C)
    root = torch.randint(V, (B,), generator=generator)
    gates = torch.randn(B, S, r, generator=generator).to(dtype)
    tables = [(torch.randn(V, r, generator=generator) / math.sqrt(r)).to(dtype) for _ in range(2)]
    return [own, tokens, root, gates, *tables]


def noise_for(B: int) -> Noise:
    return Noise(
        torch.linspace(0, 1, B), torch.arange(B), torch.arange(B, dtype=torch.int32), 1, logit_weight=1.5, noise_weight=1.2
    )


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize(("B", "S", "C", "r", "K", "V"), LEVELS, ids=str)
def test_children_by_loops(B: int, S: int, C: int, r: int, K: int, V: int, noisy: bool) -> None:
    """Keeps out: the token of another level, a gate of another row, probabilities over more than the candidates."""
    own, tokens, root, gates, before, after = levels(B, S, C, r, V, torch.float64)
    noise = noise_for(B) if noisy else None
    logp, children = best_children(own, tokens, root, gates, before, after, K, noise)
    for b in range(B):
        weight = 1.5 if noisy and b else 1.0  # of the noise above the first sequence alone is greedy
        for s in range(S):
            for p in range(C):
                a = root[b] if s == 0 else tokens[b, s - 1, p]
                added = torch.stack([(before[a] * gates[b, s] * after[t]).sum() for t in tokens[b, s]])
                want = (own[b, s].double() + weight * added).log_softmax(-1).sort(descending=True, stable=True)
                assert children[b, s, p].tolist() == want.indices[:K].tolist()
                torch.testing.assert_close(logp[b, s, p].double(), want.values[:K], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("B", "S", "C", "r", "K", "V"), LEVELS, ids=str)
def test_the_kernel_of_children(B: int, S: int, C: int, r: int, K: int, V: int, dtype: torch.dtype) -> None:
    given = [each.to(DEVICE) for each in levels(B, S, C, r, V, dtype)]
    noise = noise_for(B)
    on_device = noise._replace(temperature_B=noise.temperature_B.to(DEVICE))
    for host, device in ((None, None), (noise, on_device)):
        want = best_children(*(each.cpu() for each in given), K, host)
        got = launch_best_children(*given, K, device)
        torch.testing.assert_close(got[0].cpu(), want[0], rtol=1e-5, atol=2e-5)
        assert (got[1].cpu() == want[1]).float().mean() > 0.99  # scores that differ by rounding alone may change places


def test_equal_scores_and_no_numbers() -> None:
    """Keeps out: a place that two children have, or none, where scores are equal or not finite."""
    own, tokens, root, gates, before, after = (each.to(DEVICE) for each in levels(2, 3, 6, 16, 40, torch.float32))
    after.zero_()
    own[:, :, 1:4] = own[:, :, :1]
    own[1, 2] = torch.nan
    logp, children = (x.cpu() for x in launch_best_children(own, tokens, root, gates, before, after, 6))
    assert children.sort(-1).values.tolist() == torch.arange(6).expand(2, 3, 6, 6).tolist()
    assert children[:, :2].tolist() == torch.arange(6).expand(2, 2, 6, 6).tolist()
    assert bool(logp[:, :2].isfinite().all()) and not bool(logp[1, 2].isfinite().any())
