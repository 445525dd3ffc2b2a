"""Targets whose layers share keys and values write the oracle's text, token for token, in float32: any tree, page size, chunk.

Keeps out: a sharing layer that reads keys of a node's sibling or of another layer, a source whose keys a commit forgets to
move, and a cached prefix or a chunk that lacks the keys of later rows.
"""

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import ragged_prompts
from toolkit.oracles.sharing import SHARING, SharingZoo
from toolkit.oracles.stored import is_clearly_the_oracle_s_text

from specdec import SamplingParams, SpecConfig

CASES = [
    ("half", "eagle1", (4, 4, 16), 1, 3),
    ("half", "eagle3", (3, 8, 24), 16, 8),
    ("pairs", "eagle3", (5, 1, 6), 64, 3),
    ("pairs", "eagle1", (3, 2, 7), 16, 1),
    ("middle", "eagle3-full", (4, 2, 13), 1, 3),
    ("windows", "eagle1-window", (5, 4, 16), 16, 3),
    ("windows", "eagle3", (3, 2, 7), 64, 8),
    ("crossed", "eagle3", (5, 4, 16), 64, 3),
    ("crossed", "eagle1-two-layers", (2, 1, 3), 1, 8),
]
MAX_TOKENS = [20, 7, 24, 1, 13, 2, 24]
SAMPLING = [SamplingParams(max_tokens=n) for n in MAX_TOKENS]
PROMPTS = ragged_prompts(40, len(MAX_TOKENS))


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> SharingZoo:
    return SharingZoo(tmp_path_factory.mktemp("sharing"))


def expected(zoo: SharingZoo, name: str) -> list[list[int]]:
    return [zoo.greedy(name, prompt, 24)[:n] for prompt, n in zip(PROMPTS, MAX_TOKENS, strict=True)]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("name", "head", "shape", "page_size", "batch"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_generate_equals_the_oracle(
    zoo: SharingZoo, name: str, head: str, shape: tuple[int, int, int], page_size: int, batch: int
) -> None:
    """More prompts than rows, with speculation and without."""
    decoder = zoo.decoder(name, head, SpecConfig(*shape), page_size=page_size, max_batch_size=batch)
    assert decoder.settings.target_backend == "native"
    outputs = decoder.generate(PROMPTS, SAMPLING)
    assert [out.token_ids for out in outputs] == expected(zoo, name)
    assert sum(out.stats.drafted for out in outputs) > 0
    Driver(decoder).assert_nothing_leaked()
    plain = decoder.generate(PROMPTS, SAMPLING, speculate=False)
    assert [out.token_ids for out in plain] == expected(zoo, name)


@pytest.mark.slow_cases
@pytest.mark.parametrize("head", ["eagle3", "eagle1"])
def test_prompts_in_chunks(zoo: SharingZoo, head: str) -> None:
    """EAGLE-1 reads all final states of a prompt, EAGLE-3 only outputs of layers: the last layers run all rows, or few."""
    decoder = zoo.decoder("half", head, SpecConfig(4, 2, 10), page_size=4, prefill_chunk=5)
    outputs = decoder.generate(PROMPTS, SAMPLING)
    assert [out.token_ids for out in outputs] == expected(zoo, "half")


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("name", SHARING)
def test_unwritten_slots_and_kept_prefixes(zoo: SharingZoo, name: str) -> None:
    """Caches start as NaN, and the second run finds its prompts in the prefix cache."""
    prompts = [PROMPTS[6] * 2 + tail for tail in ([1, 2, 3], [4, 5], [6])]
    want = [zoo.greedy(name, prompt, 12) for prompt in prompts]
    decoder = zoo.decoder(name, "eagle1", SpecConfig(3, 4, 12), page_size=4, prefix_caching=True, max_batch_size=2)
    Driver(decoder).poison_free_slots(torch.nan)
    for run in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        assert [out.token_ids for out in outputs] == want
        assert (min(out.stats.cached_tokens for out in outputs) > 0) == (run > 0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_8_bit_caches(zoo: SharingZoo, kv_cache_dtype: str) -> None:
    """Each token is the best one of a dense pass with keys as the cache gives them, or as good within rounding.

    Keeps out: scales of a layer that stores nothing; a sharing layer that sets the fp8 scale of its source anew.
    """
    settings = dict(kv_cache_dtype=kv_cache_dtype, page_size=4, max_batch_size=3)
    decoder = zoo.decoder("pairs", "eagle3", SpecConfig(4, 4, 16), **settings)
    assert any([is_clearly_the_oracle_s_text(decoder, out) for out in decoder.generate(PROMPTS, SAMPLING)])
