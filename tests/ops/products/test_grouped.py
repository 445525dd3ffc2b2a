"""The rule for grouped products, held against what torch does."""

import pytest
import torch
import torch.nn.functional as F

from specdec.ops.products.grouped import has_grouped_product

CASES = [  # dtype, (O, I), whether a CPU and whether a Hopper GPU runs it
    (torch.bfloat16, (24, 16), True, True),
    (torch.float32, (8, 4), True, False),
    (torch.float16, (24, 16), True, False),
    (torch.float64, (8, 4), False, False),
    (torch.bfloat16, (24, 12), False, False),
    (torch.bfloat16, (20, 16), False, False),
    (torch.float32, (8, 6), False, False),
]


@pytest.mark.parametrize(("dtype", "shape", "on_cpu", "_"), CASES)
def test_what_the_rule_allows_runs(dtype: torch.dtype, shape: tuple[int, int], on_cpu: bool, _: bool) -> None:
    """Keeps out: rows that torch refuses, in the middle of a model's first pass."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, *shape, generator=generator).to(dtype)
    x, ends = torch.randn(5, shape[1], generator=generator).to(dtype), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert has_grouped_product([weights]) is on_cpu
    if on_cpu:
        want = torch.cat((x[:2] @ weights[0].T, x[2:] @ weights[2].T))
        torch.testing.assert_close(F.grouped_mm(x, weights.transpose(1, 2), offs=ends), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("capability", "some"), [((8, 6), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)]
)
def test_gpus_by_generation(capability: tuple[int, int], some: bool) -> None:
    """Keeps out: a GPU whose product reads the groups' sizes on the host, and one weight that decides for all."""

    class OnGPU:
        """What the rule reads of a weight."""

        device = torch.device("cuda", 0)

        def __init__(self, dtype: torch.dtype, shape: tuple[int, int]) -> None:
            self.dtype, self.shape = dtype, (3, *shape)

        def element_size(self) -> int:
            return self.dtype.itemsize

    def of_gpu(device: torch.device) -> tuple[int, int]:
        return capability

    weights = [OnGPU(dtype, shape) for dtype, shape, _, on_hopper in CASES if on_hopper]
    assert has_grouped_product(weights, of_gpu) is some
    for dtype, shape, _, on_hopper in CASES:
        assert has_grouped_product([*weights, OnGPU(dtype, shape)], of_gpu) is (some and on_hopper), (dtype, shape)
