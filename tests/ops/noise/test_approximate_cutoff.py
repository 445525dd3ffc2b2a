"""The approximate cutoff of filters: as the sort finds it, but for a bin's width; the kernel as the definition.

Shapes: R rows, V vocabulary.
"""

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.batch.sampling import RowSampling
from specdec.ops.noise.approximate_cutoff import PER_UNIT, approximate_cutoffs
from specdec.ops.noise.approximate_cutoff_triton import launch_approximate_cutoffs
from specdec.ops.noise.cutoff import cutoffs
from specdec.ops.noise.filters import Filters
from specdec.steps import RowOptions

CASES = [
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.0, 0, 0.9),
    (1.3, 0, 0.2),
    (0.6, 20, 0.95),
    (1.0, 1, 1.0),
    (0.0, 3, 0.5),
    (1.0, 0, 1e-6),
]


def sampling_of(min_p: float = 0.0) -> RowSampling:
    return RowSampling.of(
        [RowOptions.of(temperature=t, top_p=top_p, min_p=min_p, top_k=top_k) for t, top_k, top_p in CASES], "cpu"
    )


def filters_of(sampling: RowSampling, device: torch.device | str = "cpu") -> Filters:
    columns = sampling.floats_RF.to(device), sampling.ints_RI.to(device)
    return RowSampling(*columns).filters


def logits_of(V: int) -> Tensor:
    logits = torch.randn(2 * len(CASES), V, generator=torch.Generator().manual_seed(V)) * 4
    logits[1::4, ::3] = -torch.inf
    return logits


def test_the_cutoff_is_the_least_kept_logit_but_for_a_bin() -> None:
    """Keeps out: a cutoff that drops what the filters keep, one that lies far too low, top-p of all tokens beside top-k."""
    logits, sampling = logits_of(300), sampling_of()
    cutoff = approximate_cutoffs(logits, filters_of(sampling))
    rows = sampling.expand_rows(2)
    temperature = rows.filters.safe_temperature_B
    kept = cutoffs(logits, rows.filters).keeps(logits, logits / temperature[:, None])
    for row, (cut, is_kept) in enumerate(zip(cutoff.tolist(), kept, strict=True)):
        least, most_dropped = logits[row][is_kept].min(), logits[row][~is_kept].max(dim=0).values if not is_kept.all() else None
        if rows.temperature_R[row] == 0 or most_dropped is None or most_dropped == -torch.inf:
            assert cut == -torch.inf
        else:  # masses are those of a bin's middle, so the cutoff may lie a bin lower or higher
            width = 2.001 * float(temperature[row]) / PER_UNIT
            assert least - width <= cut <= least + width / 2, row


def test_min_p_is_exact() -> None:
    logits, sampling = logits_of(100), sampling_of(min_p=0.3)
    sampling.column("top_p").fill_(1.0)
    sampling.column("top_k").fill_(0)
    cutoff = approximate_cutoffs(logits, filters_of(sampling))
    temperature = sampling.expand_rows(2).temperature_R
    want = torch.where(temperature > 0, logits.amax(-1) + temperature * torch.tensor(0.3).log(), -torch.inf)
    torch.testing.assert_close(cutoff, want)


def check(V: int, dtype: torch.dtype) -> None:
    logits = logits_of(V).to(dtype)
    logits[0, V // 2] = torch.nan  # a row of junk may get any cutoff, and must not reach another row
    for min_p in (0.0, 0.05):
        sampling = sampling_of(min_p)
        got = launch_approximate_cutoffs(logits.to(DEVICE), filters_of(sampling, DEVICE)).cpu()
        torch.testing.assert_close(got[1:], approximate_cutoffs(logits, filters_of(sampling))[1:], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("V", "dtype"), [(90, torch.float32), (1300, torch.bfloat16)])
def test_the_kernel_equals_the_definition(V: int, dtype: torch.dtype) -> None:
    """Keeps out: the padding of a block that counts as tokens, another sequence's filters."""
    check(V, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [32000, 128256])
def test_real_sizes(V: int) -> None:
    check(V, torch.bfloat16)
