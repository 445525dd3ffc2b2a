"""What recurrent layers can't have on a GPU is refused at the door, and not by a kernel in the middle of a request."""

from dataclasses import replace

import pytest
import toolkit.recurrent.targets  # noqa: F401 (the zoo has its targets by name)
import torch
from toolkit.models import Zoo

from specdec import SpecConfig
from specdec.loading.resolve import check_recurrent
from specdec.models.recurrent.sizes import RecurrentConfig

FITS = RecurrentConfig(2, 4, 16, 32, 4)


@pytest.mark.parametrize(
    ("sizes", "changes", "said"),
    [
        (replace(FITS, key_width=8), {}, "key heads of 8; nearest setting that works: device='cpu'"),
        (replace(FITS, value_width=48), {}, "value heads of 48"),
        (FITS, {"dtype": torch.float64, "cuda_graphs": "round"}, "nearest setting that works: cuda_graphs=False"),
        (FITS, {"spec": SpecConfig(8, 8, 200)}, "at most 128 .* got 200; nearest setting that works: 128"),
    ],
)
def test_what_no_kernel_takes_is_refused(zoo: Zoo, sizes: RecurrentConfig, changes: dict[str, object], said: str) -> None:
    settings = zoo.decoder("qwen3_next", "eagle1", SpecConfig(3, 4, 12)).settings
    check_recurrent(settings, FITS)
    with pytest.raises(ValueError, match=said):
        check_recurrent(replace(settings, **changes), sizes)
