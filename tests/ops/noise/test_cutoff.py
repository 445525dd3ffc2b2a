"""The cutoff of filters: the definition as whole numbers say it, token by token; the kernels as the definition.

Shapes: R rows, V vocabulary.
"""

from fractions import Fraction

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.batch.sampling import RowSampling
from specdec.ops.noise.cutoff import WEIGHT_OF_BEST, Cutoff, cutoffs, min_p_cutoffs
from specdec.ops.noise.cutoff_triton import launch_cutoffs
from specdec.ops.noise.gumbel import gumbel_noise
from specdec.ops.noise.sample import sampled_tokens
from specdec.ops.noise.sample_triton import launch_sampled_tokens
from specdec.steps import RowOptions

# temperature, top_k, top_p, min_p
CASES = [
    (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 0, 0.2, 0.05), (0.6, 20, 0.95, 0.0), (1.0, 1, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5), (1.0, 0, 1e-6, 0.0), (2.0, 7, 0.5, 0.0), (0.05, 0, 0.99, 0.0), (1.0, 100000, 0.8, 1.0),
    (1.5, 40, 0.999, 0.0),
]  # fmt: skip


def sampling_on(device: torch.device | str) -> RowSampling:
    return RowSampling.of(
        [RowOptions.of(temperature=t, top_p=top_p, min_p=min_p, top_k=top_k) for t, top_k, top_p, min_p in CASES], device
    )


def logits_of(V: int, dtype: torch.dtype, spread: float = 3.0, each: int = 2) -> Tensor:
    """So many rows a case.  A quarter of them have banned tokens, some few different numbers, many of them equal, and both
    zeros."""
    logits = torch.randn(each * len(CASES), V, generator=torch.Generator().manual_seed(V)) * spread
    logits[::5] = (logits[::5] / 2).round()
    logits[::5, V // 2 :] *= -1.0
    logits[1::4, ::3] = -torch.inf
    return logits.to(dtype)


def scaled(logits: Tensor, sampling: RowSampling) -> Tensor:
    return logits.float() / sampling.filters.expand_rows(len(logits)).safe_temperature_B[:, None]


def kept_one_by_one(logits_V: list[float], scaled_V: Tensor, options: tuple[float, int, float, float]) -> list[bool]:
    """Which tokens of a row are kept, by adding up whole numbers in the tokens' order."""
    temperature, top_k, top_p, min_p = options
    order = sorted(range(len(logits_V)), key=lambda i: (-logits_V[i], i))
    weights = [int(w) for w in ((scaled_V - scaled_V.max()).exp() * WEIGHT_OF_BEST).long().tolist()]
    first = order[: top_k or None]
    share = Fraction(float(torch.tensor(top_p))) * sum(weights[i] for i in first)
    kept, before = [False] * len(order), 0
    for i in first:
        kept[i] = top_p == 1 or before < share
        before += weights[i]
    lowest = scaled_V.max() + (torch.tensor(min_p).double().log().float() if min_p else -torch.inf)
    return [is_kept and bool(scaled_V[i] >= lowest) for i, is_kept in enumerate(kept)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_definition_keeps_what_whole_numbers_say(dtype: torch.dtype) -> None:
    """Keeps out: top-p of all tokens beside top-k, a tie kept or dropped as a whole, a sum that is rounded, two zeros that are
    not in the order of their ids."""
    logits, sampling = logits_of(90, dtype), sampling_on("cpu")
    kept = cutoffs(logits, sampling.filters).keeps(logits, scaled(logits, sampling))
    for row, options in enumerate(case for case in CASES for _ in range(2)):
        if options[0] > 0:
            want = kept_one_by_one(logits[row].tolist(), scaled(logits, sampling)[row], options)
            assert kept[row].tolist() == want, (row, options)


def check(logits: Tensor) -> None:
    """The kernels keep what the definition keeps.  Exponentials of two libraries may differ in their last bits, so top-p may
    part at tokens before which there is as much as it wants, but for a millionth of all."""
    sampling, there = sampling_on("cpu"), sampling_on(DEVICE)
    cutoff = Cutoff(*(column.cpu() for column in launch_cutoffs(logits.to(DEVICE), there.filters)))
    want = cutoffs(logits, sampling.filters)
    torch.testing.assert_close(cutoff.min_scaled_R, want.min_scaled_R, atol=1e-6, rtol=1e-6)
    scaled_logits = scaled(logits, sampling)
    got, kept = cutoff.keeps(logits, scaled_logits), want.keeps(logits, scaled_logits)
    rows = sampling.expand_rows(len(logits) // len(CASES))
    for row in ((got != kept).any(1) & (rows.temperature_R > 0)).nonzero()[:, 0].tolist():
        weights = (scaled_logits[row] - scaled_logits[row].max()).double().exp()
        assert weights[got[row] != kept[row]].sum() < 1e-6 * weights[kept[row]].sum() and rows.column("top_p")[row] < 1, row


@pytest.mark.slow_cases
@pytest.mark.parametrize(("V", "dtype"), [(90, torch.float32), (4097, torch.float16)])
def test_the_kernels_equal_the_definition(V: int, dtype: torch.dtype) -> None:
    """Keeps out: another sequence's options, an edge that counts on the wrong side, ties of another slice, and the end of a
    vocabulary that fills no block."""
    check(logits_of(V, dtype, each=2 if V < 1000 else 1))


def test_rows_of_junk_reach_no_other_row() -> None:
    """Keeps out: a search that fails for all, or does not end, because of one row's NaN or infinity."""
    logits = logits_of(300, torch.float16, each=1)
    there = sampling_on(DEVICE)
    want = launch_cutoffs(logits.to(DEVICE), there.filters)
    for row, value in ((2, torch.nan), (5, torch.inf), (8, -torch.inf)):
        logits[row, 7 if value != -torch.inf else slice(None)] = value
    others = [row for row in range(len(logits)) if row not in (2, 5, 8)]
    got = launch_cutoffs(logits.to(DEVICE), there.filters)
    assert all(torch.equal(a[others], b[others]) for a, b in zip(got, want, strict=True))
    seeds, at = torch.arange(len(CASES), device=DEVICE), torch.arange(len(logits), device=DEVICE)
    tokens = launch_sampled_tokens(logits.to(DEVICE), there.temperature_R, seeds, at, got)
    assert (tokens == -1).nonzero()[:, 0].tolist() == [2, 5, 8]


def test_the_best_token_stays_whatever_top_p_is() -> None:
    """Keeps out: a share that is 0 in float32, by which all tokens go and none can be sampled."""
    logits = logits_of(90, torch.float32)[:2]
    for device in ("cpu", DEVICE):
        filters = RowSampling.of([RowOptions.of(temperature=1.0, top_p=1e-46)] * 2, device).filters
        cutoff = (cutoffs if device == "cpu" else launch_cutoffs)(logits.to(device), filters)
        kept = Cutoff(*(column.cpu() for column in cutoff)).keeps(logits, logits)
        assert torch.equal(kept.nonzero()[:, 1], logits.argmax(-1)) and kept.sum() == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_min_p_alone(dtype: torch.dtype) -> None:
    """Of a vocabulary that 16 bits can't count.  Keeps out: an id that the logits' dtype rounds or can't hold."""
    logits = (3 * torch.randn(2, 70001, generator=torch.Generator().manual_seed(3))).to(dtype)
    filters = RowSampling.of([RowOptions.of(temperature=0.7, min_p=min_p) for min_p in (0.1, 0.9)], "cpu").filters
    scaled_logits = logits.float() / 0.7
    kept = min_p_cutoffs(logits.amax(-1), filters, 70001).keeps(logits, scaled_logits)
    shares = (scaled_logits - scaled_logits.amax(-1, keepdim=True)).exp()
    far = (shares - torch.tensor([[0.1], [0.9]])).abs() > 1e-6
    assert torch.equal(kept[far], (shares >= torch.tensor([[0.1], [0.9]]))[far]) and kept.any(1).all() and not kept.all()


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tokens_are_sampled_from_what_is_kept(dtype: torch.dtype) -> None:
    """Keeps out: a dropped token whose noise is large, a greedy row that is filtered, a slice that wins with no token kept."""
    logits = logits_of(5000, dtype)
    logits[3, 4] = torch.nan
    sampling, there, at = sampling_on("cpu"), sampling_on(DEVICE), torch.arange(len(logits)) * 7
    cutoff = cutoffs(logits, sampling.filters)
    seeds = torch.arange(len(CASES)) - 5
    want = sampled_tokens(logits, sampling.temperature_R, seeds, at, cutoff)
    kept, greedy = cutoff.keeps(logits, scaled(logits, sampling)), sampling.expand_rows(2).temperature_R == 0
    noise = gumbel_noise(seeds.repeat_interleave(2), at, 5000)
    scores = torch.where(greedy[:, None], logits.float(), (scaled(logits, sampling) + noise).where(kept, -torch.inf))
    assert torch.equal(want, scores.argmax(-1).masked_fill(torch.arange(len(logits)) == 3, -1))
    moved = Cutoff(*(column.to(DEVICE) for column in cutoff))
    got = launch_sampled_tokens(logits.to(DEVICE), there.temperature_R, seeds.to(DEVICE), at.to(DEVICE), moved)
    assert torch.equal(got.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [0.3, 6.0])
def test_real_sizes(dtype: torch.dtype, spread: float) -> None:
    check(logits_of(128256, dtype, spread))
