"""What recurrent layers can't have on a GPU is refused at the door, and not by a kernel in the middle of a request."""

from dataclasses import replace

import pytest
import toolkit.recurrent.targets  # noqa: F401 (the zoo has its targets by name)
import torch
from toolkit.models import Zoo

from specdec import SpecConfig
from specdec.loading.memory import plan_states
from specdec.loading.resolve import check_recurrent
from specdec.models.recurrent.pool import StatePool
from specdec.models.recurrent.sizes import RecurrentConfig, RuleSizes

RULE, HOPPER = RuleSizes(2, 4, 16, 32), 227 << 10
FITS = RecurrentConfig(4, RULE)
BLOCKS = replace(RULE, key_width=96, value_width=192, in_blocks=True)  # OLMo's


@pytest.mark.parametrize(
    ("sizes", "changes", "said"),
    [
        (RecurrentConfig(4, replace(RULE, key_width=8)), {}, "key heads of 8; nearest setting that works: device='cpu'"),
        (RecurrentConfig(4, replace(RULE, value_width=48)), {}, "a power of two wide, from 16 on, got value heads of 48"),
        (RecurrentConfig(4, replace(BLOCKS, value_width=200)), {}, "a multiple of 16 wide, got value heads of 200"),
        (FITS, {"dtype": torch.float64, "cuda_graphs": "round"}, "nearest setting that works: cuda_graphs=False"),
        (FITS, {"spec": SpecConfig(8, 8, 200)}, "at most 128 .* got 200; nearest setting that works: 128"),
        (RecurrentConfig(4, replace(RULE, by_channel=True)), {"spec": SpecConfig(8, 8, 129)}, "at most 128 .* got 129"),
    ],
)
def test_what_no_kernel_takes_is_refused(zoo: Zoo, sizes: RecurrentConfig, changes: dict[str, object], said: str) -> None:
    settings = zoo.decoder("qwen3_next", "eagle1", SpecConfig(3, 4, 12)).settings
    check_recurrent(settings, FITS, HOPPER)
    check_recurrent(settings, RecurrentConfig(4, BLOCKS), HOPPER)
    with pytest.raises(ValueError, match=said):
        check_recurrent(replace(settings, **changes), sizes, HOPPER)


def test_small_chips_take_half_as_many_nodes(zoo: Zoo) -> None:
    """Keeps out: a tree that a consumer's GPU has no shared memory for, which fails in the middle of a request."""
    settings = zoo.decoder("qwen3_next", "eagle1", SpecConfig(3, 4, 12)).settings
    check_recurrent(replace(settings, spec=SpecConfig(8, 8, 100)), FITS, HOPPER)
    check_recurrent(replace(settings, spec=SpecConfig(8, 8, 64)), FITS, 99 << 10)
    with pytest.raises(ValueError, match="at most 64 .* got 65; nearest setting that works: 64"):
        check_recurrent(replace(settings, spec=SpecConfig(8, 8, 65)), FITS, 99 << 10)


def test_states_take_what_is_planned(zoo: Zoo) -> None:
    """Keeps out: a plan that leaves memory for pages which the states take."""
    settings = zoo.decoder("qwen3_next", "eagle1", SpecConfig(3, 4, 12), prefix_caching=True).settings
    config = zoo.decoder("qwen3_next", None, None).model.config
    plan = plan_states([config], settings, memory=1e6)
    assert plan is not None and config.recurrent is not None and plan.kept > 0
    sizes = plan.numbers, plan.with_nodes, plan.nodes
    pool = StatePool(config.recurrent, config.recurrent_layers, *sizes, settings.dtype, "cpu")
    assert pool.bytes == plan.bytes
