"""The noise in kernels against its definition.  Under Triton's interpreter where there is no GPU.

Shapes: B sequences, R rows, V vocabulary.
"""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.ops.noise.approximate_cutoff import approximate_cutoffs
from specdec.ops.noise.filters import Filters
from specdec.ops.noise.gumbel import Noise, perturb, token_noise
from specdec.ops.noise.gumbel_triton import gumbel_of_bits, launch_gumbel_noise, launch_perturb
from specdec.ops.topk import top_tokens
from specdec.ops.topk_triton import launch_greedy_tokens, launch_scan, launch_top_tokens, noisy_scan

CLOSE = {"atol": 1e-5, "rtol": 1e-6}
pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


@triton.jit
def bits_kernel(bits, out, SIZE: tl.constexpr, ASM: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, gumbel_of_bits(tl.load(bits + i), ASM))


@pytest.mark.parametrize(("first", "V"), [(0, 3000), (70, 1025)])
def test_noise_equals_the_definition(first: int, V: int) -> None:
    """Keeps out: products that don't wrap, a shift that keeps the sign, one rank's ids for another's, float32 in between.

    Logarithms of two libraries may differ in the last bit of float64, of which one in 2**29 reaches float32.
    """
    table = torch.tensor([[0, 1], [-(2**63), 131071], [2**63 - 1, 0], [77, 5]], device=DEVICE)
    got = launch_gumbel_noise(table[:, 0], table[:, 1], V, first).cpu()
    want = token_noise(table[:, 0].cpu(), table[:, 1].cpu(), torch.arange(first, first + V))
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_a_gpu_samples_with_the_bits_it_always_did() -> None:
    """Keeps out: texts of old seeds that change on GPUs: the same tensor operations without the kernel."""
    seeds, positions = torch.randint(-(2**62), 2**62, (64,), device=DEVICE), torch.arange(64, device=DEVICE) * 99
    want = token_noise(seeds, positions, torch.arange(128256, device=DEVICE))
    assert torch.equal(launch_gumbel_noise(seeds, positions, 128256, 0), want)


def test_noise_of_the_rarest_bits() -> None:
    """Keeps out: an infinite or negligent noise for numbers next to 0, 1/2 and 1, which no sample of tokens would show."""
    edges = [0, 1, 2, 2**24, 2**25 + 1, 2**51 - 1, 2**51, 2**51 + 1, 2**52 - 2**27, 2**52 - 2**26, 2**52 - 2, 2**52 - 1]
    bits = torch.tensor(edges + [2**52 - 2**i for i in range(2, 22)])
    out = torch.empty(32, device=DEVICE)
    bits_kernel[(1,)](bits.to(DEVICE), out, SIZE=32, ASM=HAS_GPU)
    exponential = torch.where(
        bits < 2**51, -torch.log((bits + 0.5) * 2.0**-52), -torch.log1p(-((2**52 - 1 - bits).double() + 0.5) * 2.0**-52)
    )
    torch.testing.assert_close(out.cpu(), -exponential.double().log().float(), **CLOSE)


def case(B: int, each: int, V: int, dtype: torch.dtype) -> tuple[Tensor, Noise, Tensor]:
    """(logits, noise, offsets): some sequences are greedy; the last row holds -inf; columns are strided as in a batch."""
    generator = torch.Generator().manual_seed(B + V)
    temperature = torch.tensor([[0.0, 1.0, 0.6, 1.3][b % 4] for b in range(1, B + 1)])
    options, seeds = torch.stack((temperature, temperature), 1), torch.randint(-(2**62), 2**62, (B, 3), generator=generator)
    lens = torch.randint(9000, (B,), dtype=torch.int32, generator=generator)
    logits = (torch.randn(B * each, V, generator=generator) * 3).to(dtype)
    logits[-1, ::2] = -torch.inf
    return logits, Noise(options[:, 1], seeds[:, 2], lens, 3, 1.5, 1.2), torch.arange(V) * 3


def on_device(noise: Noise) -> Noise:
    options, seeds = (torch.stack((x, x), 1).to(DEVICE)[:, 1] for x in (noise.temperature_B, noise.seed_B))
    filters = noise.filters and Filters(*(x.to(DEVICE) for x in noise.filters))
    return noise._replace(temperature_B=options, seed_B=seeds, lens_B=noise.lens_B.to(DEVICE), filters=filters)


def filtered(noise: Noise) -> Noise:
    """The same noise, where top-k and top-p keep few tokens."""
    temperature = noise.temperature_B.contiguous()
    few, half = torch.full_like(noise.seed_B, 9), torch.full_like(temperature, 0.5)
    return noise._replace(cutoff_weight=2.0, filters=Filters(temperature, few, half, torch.zeros_like(temperature)))


def check(B: int, each: int, V: int, k: int, dtype: torch.dtype, has_filters: bool = False, **sizes: int) -> None:
    logits, noise, offsets = case(B, each, V, dtype)
    noise = filtered(noise) if has_filters else noise
    x, there, moved = logits.to(DEVICE), on_device(noise), offsets.to(DEVICE) if V % 4 == 0 else None
    table = None if moved is None else offsets
    want_logp, want_ids = top_tokens(logits, k, table, noise=noise)
    scan = partial(noisy_scan(there, moved), **sizes)
    logp, ids = launch_top_tokens(x, k, moved, None, scan)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(logp.cpu(), want_logp, atol=2e-5, rtol=2e-6)
    if k == 1:
        assert torch.equal(launch_greedy_tokens(x, moved, scan=scan).cpu(), want_ids[:, 0])
    greedy = (noise.temperature_B == 0).repeat_interleave(each)  # of these rows nothing may change, not even by rounding
    if bool(greedy.any()):
        plain = launch_top_tokens(x[greedy.to(DEVICE)], k, moved, None, partial(launch_scan, **sizes))
        assert torch.equal(ids[greedy.to(DEVICE)], plain[1]) and torch.equal(logp[greedy.to(DEVICE)], plain[0])


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("B", "each", "V", "k", "dtype"),
    [
        (4, 1, 700, 1, torch.bfloat16),
        (4, 1, 300, 4, torch.float32),
        (2, 2, 90, 3, torch.float16),
        (1, 2, 2500, 2, torch.bfloat16),
    ],
)
def test_best_tokens_equal_the_definition(B: int, each: int, V: int, k: int, dtype: torch.dtype) -> None:
    """Keeps out: another sequence's noise, noise of draft ids, a second noise in a token's score, a changed greedy row."""
    check(B, each, V, k, dtype, has_filters=V == 300)


def test_slices_change_nothing() -> None:
    """Keeps out: noise by place in a slice; a slice of fewer than k tokens that gives a NaN."""
    check(2, 1, 100, 3, torch.bfloat16, has_filters=True, size=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_perturbed_logits_of_a_run_equal_the_definition(dtype: torch.dtype) -> None:
    """Keeps out: noise counted from a rank's own first id, another sequence's noise."""
    logits, noise, offsets = case(3, 2, 90, dtype)
    for each in (noise, filtered(noise)):
        cutoff = None if each.filters is None else approximate_cutoffs(logits, each.filters).to(DEVICE)
        got = launch_perturb(logits.to(DEVICE)[:, 40:77], on_device(each), offsets.to(DEVICE), 40, cutoff)
        torch.testing.assert_close(got.cpu(), perturb(logits, each, offsets)[:, 40:77], atol=3e-5, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "each", "V", "k"), [(1, 1, 32000, 1), (4, 1, 128256, 1), (4, 8, 32000, 8), (1, 10, 128256, 10)])
def test_real_sizes(B: int, each: int, V: int, k: int) -> None:
    check(B, each, V, k, torch.bfloat16)
    check(B, each, V, k, torch.bfloat16, has_filters=True)
