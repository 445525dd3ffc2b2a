"""Eight ranks: processes of a CPU that exchange over gloo write what one writes, in float32, token for token.

Two of these cases run on each of a week's days.  `scripts/many_ranks` has every family and feature.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from toolkit.parallel.compared import both_texts, options_of, traffic
from toolkit.parallel.forked import launched_ranks
from toolkit.parallel.many import EIGHT, MIXTURE, QWEN3, QWEN3_NEXT, V3, PairFeature

from specdec.loading.ranks import Ranks

SIZE = 8
DIVIDED = {"decode_context_parallel_size": SIZE, "prefix_caching": True}
TRAFFIC = (
    PairFeature("whole experts", MIXTURE, options={"expert_parallel": "experts", "prefix_caching": True}),
    PairFeature("a hybrid", QWEN3_NEXT),
    PairFeature("latents, divided", V3, options=DIVIDED),
    PairFeature("fewer key/value heads than ranks", QWEN3, options={"prefix_caching": True}),
)


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
@pytest.mark.parametrize("feature", EIGHT, ids=lambda feature: feature.name)
def test_eight_ranks_write_what_one_writes(feature: PairFeature, ranks: Ranks, alone: Ranks, tmp_path: Path) -> None:
    """Sampled, with trees and chains, prompts in chunks, prefixes that are found again.

    Keeps out: what holds for two or four ranks alone: ranks without an expert or a token, four ranks that hold one key/value
    head, pieces of a text whose owner is no neighbour, the order of eight sums."""
    want, got = both_texts(feature.pair.make(tmp_path), feature, ranks, alone)
    assert got == want and sum(len(ids) for ids, *_ in want) > 10


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("feature", TRAFFIC, ids=lambda feature: feature.name)
def test_random_traffic_over_eight_ranks(feature: PairFeature, ranks: Ranks, alone: Ranks, tmp_path: Path) -> None:
    """Keeps out: a row that leaves on the first rank and stays on another; a chunk, or a kept prefix, that one rank cuts otherwise."""
    finished, wrong = traffic(feature.pair.make(tmp_path), feature, ranks, alone, seed=0)
    assert finished > 3 and wrong == []
