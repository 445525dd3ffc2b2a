"""Eight ranks: processes of a CPU that exchange over gloo write what one writes, in float32, token for token.

On most days one of these cases runs.  `scripts/many_ranks` has every family and feature.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from toolkit.parallel.compared import both_texts, options_of, traffic
from toolkit.parallel.ends import how_it_ends
from toolkit.parallel.forked import launched_ranks
from toolkit.parallel.many import COMMON, EIGHT, FAMILIES, PairFeature

from specdec.loading.ranks import Ranks
from specdec.models.config import ModelConfig
from specdec.models.mixtures.dividing import ExpertSharing
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.recurrent.sizes import RecurrentConfig, RuleSizes
from specdec.models.sharding import share_of, with_sharing
from specdec.ops.products.routing import RouterRule
from specdec.parallel.shard import Shard

SIZE = 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with launched_ranks(SIZE):
        ranks = Ranks(options_of(SIZE))
        yield ranks
        ranks.close()


@pytest.fixture(scope="module")
def alone() -> Ranks:
    return Ranks(options_of(1))


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("feature", EIGHT[COMMON:], ids=lambda feature: feature.name)
def test_eight_ranks_write_what_one_writes(feature: PairFeature, ranks: Ranks, alone: Ranks, tmp_path: Path) -> None:
    """Sampled, with trees and chains, prompts in chunks, prefixes that are found again.

    Keeps out: what holds for two or four ranks alone: ranks without an expert or a token, four ranks that hold one key/value
    head, pieces of a text whose owner is no neighbour, the order of eight sums."""
    want, got = both_texts(feature.pair.make(tmp_path), feature, ranks, alone)
    assert got == want and sum(len(ids) for ids, *_ in want) > 10


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("feature", EIGHT[:COMMON], ids=lambda feature: feature.name)
def test_random_traffic_over_eight_ranks(feature: PairFeature, ranks: Ranks, alone: Ranks, tmp_path: Path) -> None:
    """Prompts in chunks, kept prefixes, requests that are cancelled, greedy and sampled, with drafts and without.

    Keeps out: a row that leaves on the first rank and stays on another; a chunk or a kept prefix that one cuts otherwise.
    """
    finished, wrong = traffic(feature.pair.make(tmp_path), feature, ranks, alone, seed=0)
    assert finished > 3 and wrong == []


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize(
    ("when", "said"), [("start", "rank 7 failed: it has ended without a word, with exit code -9"), ("interrupt", "interrupted")]
)
def test_eight_processes_end_together(when: str, said: str, tmp_path: Path) -> None:
    """As users start them; `scripts/many_ranks --ends` has more ways.

    Keeps out: a reason that names a rank which only noticed, advice that has nothing to do with it, and a process that stays,
    with its GPU, after a rank or Ctrl-C in the terminal has ended the others."""
    target, draft = FAMILIES[0].make(tmp_path)
    end = how_it_ends(when, SIZE, "cpu", target, Path(draft))
    assert end.said == said and end.left == []


def test_what_eight_ranks_can_not_share_is_named() -> None:
    """Keeps out: a nearest setting that does not work either, and a refusal of what could be shared."""
    config = ModelConfig("llama", 96, 480, 2, 32, 4, 8, 43, 1e-5)
    mixture = replace(config, has_experts=True, experts=ExpertsConfig(10, 100, RouterRule(2, "softmax")))
    whole = with_sharing(mixture, ExpertSharing(True, ""))
    assert share_of(config, Shard(7, SIZE)).kv_copies == 2, "two ranks hold each key/value head"
    assert [len(share_of(whole, Shard(rank, SIZE)).experts.own) for rank in range(SIZE)] == [2] * 5 + [0] * 3
    rule = RuleSizes(key_heads=6, value_heads=16, key_width=8, value_width=8)
    assert RecurrentConfig(4, rule).misfit(SIZE) == "6 key heads of recurrent layers"
    for odd, why in (
        (replace(config, intermediate_size=484), "intermediate_size 484 evenly, got 8; .*: tensor_parallel_size=4$"),
        (mixture, "moe_intermediate_size 100 evenly, got 8; .*: tensor_parallel_size=4, or expert_parallel='experts'"),
        (replace(config, num_heads=28), "28 attention heads evenly, got 8; .*: tensor_parallel_size=4$"),
        (replace(config, num_kv_heads=3), "3 key/value heads evenly, got 8; .*: tensor_parallel_size=1$"),
    ):
        with pytest.raises(ValueError, match=why):
            share_of(odd, Shard(0, SIZE))
