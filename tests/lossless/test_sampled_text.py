"""Sampled text follows the target's distribution with every drafter, and depends only on the seed.

Keeps out: a rule that favours or avoids drafted tokens, noise used twice, top-k and top-p applied to another distribution.
"""

import secrets
from typing import Any

import pytest
from toolkit.drafters import Substitute
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.statistics import filtered, p_value, pair_counts, token_distributions

from specdec import SamplingParams, SpecConfig

V, SAMPLES, LIMIT = 12, 1600, 1e-4
PROMPT = [3, 7, 1]
FILTERS = [(0.7, 0, 1.0), (1.3, 0, 1.0), (1.3, 5, 1.0), (1.3, 0, 0.8), (0.7, 6, 0.9)]
DRAFTERS = {
    "random-chain": SpecConfig(2, 1, 3),
    "random-tree": SpecConfig(2, 3, 10),
    "head-chain": SpecConfig(3, 1, 4),
    "head-tree": SpecConfig(2, 4, 12),
    "fixed-tree": SpecConfig(2, 3, 12),  # proposes one and the same text for ever
    "sources-tree": SpecConfig(2, 3, 10),  # a head, the text's matches, a corpus, earlier answers and predictions
}
CASES = [  # each drafter under two or more filters, each filter with chains and trees
    (drafter, *FILTERS[(index + step) % len(FILTERS)]) for index, drafter in enumerate(DRAFTERS) for step in (0, 2)
]


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "temperature", "top_k", "top_p"), CASES)
def test_tokens_follow_the_target(zoo: Zoo, drafter: str, temperature: float, top_k: int, top_p: float) -> None:
    """Pairs of the first three tokens: one from prefill, two from rounds, accepted or not."""
    spec, kind = DRAFTERS[drafter], drafter.split("-")[0]
    head = "eagle3+suffix+corpus+answers" if kind == "sources" else "eagle3"
    decoder = zoo.decoder("tiny-vocab", head, spec, max_batch_size=64, max_seq_len=32)
    if kind == "sources":
        Driver(decoder).bring_corpus([[*PROMPT, a, b, a] for a in range(V) for b in (a, 5, 2)])
    elif kind != "head":
        texts = {tuple(PROMPT): [0, 1, 2] * 6}
        as_kind = "oracle" if kind == "fixed" else "random"
        driver = Driver(decoder)
        driver.replace_drafter(Substitute(driver, spec, as_kind, V, texts))
    seeds = range(list(DRAFTERS).index(drafter) * SAMPLES, (list(DRAFTERS).index(drafter) + 1) * SAMPLES)
    shared: dict[str, Any] = dict(max_tokens=3, temperature=temperature, top_k=top_k, top_p=top_p)
    predicted = [{"prediction": [seed % V, 4, 4]} if kind == "sources" and seed % 3 else {} for seed in seeds]
    given = [SamplingParams(seed=seed, **shared, **more) for seed, more in zip(seeds, predicted, strict=True)]
    outputs = decoder.generate([PROMPT] * SAMPLES, given)
    if kind == "sources":
        drafted = {name for out in outputs for names in out.sources for name in names.split("+") if name}
        assert drafted == {"drafter", "suffix", "corpus", "answers", "prediction"}, drafted
    assert kind != "random" or sum(out.stats.accepted for out in outputs) > SAMPLES / 40
    ids = [out.token_ids for out in outputs]
    want = token_distributions(zoo.hf("tiny-vocab"), PROMPT, lambda x: filtered(x, temperature, top_k, top_p))
    counts = [pair_counts(ids, at, V) for at in (0, 1)]
    assert p_value(counts[0].sum(1), want[0].sum(1)) > LIMIT
    assert p_value(counts[0], want[0]) > LIMIT and p_value(counts[1], want[1]) > LIMIT
    hotter = token_distributions(zoo.hf("tiny-vocab"), PROMPT, lambda x: filtered(x, temperature * 1.3, top_k, top_p))
    assert p_value(counts[1], hotter[1]) < LIMIT  # the test would notice another distribution


@pytest.mark.slow
def test_text_depends_on_the_seed_alone(zoo: Zoo) -> None:
    """The same at batch 1 and in a batch, in any order, with and without speculation, tree or chain."""
    prompts = ragged_prompts(40, 8, seed=7)
    params = [SamplingParams(max_tokens=16, temperature=0.9, seed=i // 2, top_p=[1.0, 0.9][i % 2]) for i in range(8)]
    params[3] = SamplingParams(max_tokens=16)  # greedy among the sampled
    tree = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 14), max_batch_size=8)
    want = [out.token_ids for out in tree.generate(prompts, params)]
    assert want[3] == zoo.greedy("llama", prompts[3], 24)[:16]
    assert [tree.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)] == want
    assert [out.token_ids for out in tree.generate(prompts[::-1], params[::-1])] == want[::-1]
    assert [out.token_ids for out in tree.generate(prompts, params, speculate=False)] == want
    chain = zoo.decoder("llama", "eagle1", SpecConfig(4, 1, 5), max_batch_size=3, page_size=1)
    assert [out.token_ids for out in chain.generate(prompts, params)] == want


def test_seeds_differ_and_so_do_requests_without_one(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a default seed, and a batch whose rows share their noise."""
    decoder = zoo.decoder("words", max_batch_size=8)
    hot = SamplingParams(max_tokens=12, temperature=1.5)
    assert len({tuple(out.token_ids) for out in decoder.generate([[1, 2]] * 8, hot)}) == 8
    seeded = [SamplingParams(max_tokens=12, temperature=1.5, seed=seed) for seed in (0, 1, -1, 2**63 - 1, -(2**63))]
    assert len({tuple(out.token_ids) for out in decoder.generate([[1, 2]] * 5, seeded)}) == 5
    monkeypatch.setattr(secrets, "randbits", lambda bits: 1)
    assert decoder.generate([1, 2], hot)[0].token_ids == decoder.generate([1, 2], seeded[1])[0].token_ids
