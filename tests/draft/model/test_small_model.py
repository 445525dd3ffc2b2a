"""A small model as drafter in an engine: the text stays the target's, and a copy of the target is always right.

Keeps out: tokens whose keys a drafter never wrote, or wrote a slot or a position beside their own: after prompts, chunks,
cached pages, rounds and pauses.
"""

from __future__ import annotations

from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.heads.kinds.small_models import SMALL
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import fill_with_nan, with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder

TEXTS = [  # target, drafter, shape, settings
    ("llama", "model-near", (4, 1, 5), {"page_size": 1}),
    ("llama", "model-near", (4, 3, 13), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("llama", "model-near", ("auto", 2, 6), {"page_size": 4, "prefix_caching": True}),
    ("llama", "model-window", (3, 2, 7), {"page_size": 4, "prefill_chunk": 5}),
    ("mistral", "model-llama", ("auto", 1, 5), {"page_size": 4}),
    ("mistral", "model-mixed", (4, 1, 5), {"page_size": 4, "prefill_chunk": 5}),
    ("qwen2", "model-differential", (3, 3, 12), {"page_size": 16}),
    ("mistral", "model-latent", ("auto", 2, 6), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("words", "model-more-ids", (4, 4, 16), {"page_size": 16, "prefix_caching": True}),
    ("words", "model-fewer-ids", (4, 1, 5), {"page_size": 4}),
    ("bytes", "model-permuted", (3, 2, 7), {"page_size": 4, "prefix_caching": True}),
]


def from_nan(zoo: Zoo, target: str, drafter: str, shape: Any, **settings: Any) -> tuple[SpecDecoder, Driver]:
    """A decoder whose caches hold NaN where nothing was written."""
    decoder = zoo.decoder(target, drafter, SpecConfig(*shape), max_batch_size=3, **settings)
    driver = Driver(decoder)
    for cache in (driver._workers.verifier.cache, *driver.drafter.caches):
        fill_with_nan(cache)
    return decoder, driver


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize(("target", "drafter", "shape", "settings"), TEXTS, ids=str)
def test_text_is_the_target_s(zoo: Zoo, target: str, drafter: str, shape: Any, settings: dict[str, Any]) -> None:
    decoder, driver = from_nan(zoo, target, drafter, shape, **settings)
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    prompts = ragged_prompts(40, 5)
    for _ in range(1 + settings.get("prefix_caching", False)):  # the second time cached pages are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=16))
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 16) for prompt in prompts]
    sampled = SamplingParams(max_tokens=8, temperature=1.1, top_k=12, seed=3)
    fast, plain = (decoder.generate(prompts[3:], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


COPIES = [  # target, shape, settings
    ("llama", (4, 1, 5), {"page_size": 1, "prefill_chunk": 5}),
    ("mistral", (5, 1, 6), {"page_size": 4}),
    ("qwen2", (3, 1, 4), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 7}),
    ("qwen3", (4, 4, 24), {"page_size": 4, "prefix_caching": True}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "shape", "settings"), COPIES, ids=str)
def test_a_copy_of_the_target_is_always_right(zoo: Zoo, target: str, shape: Any, settings: dict[str, Any]) -> None:
    """Every draft of a chain is accepted, in each round: one key beside its place would show.  Of a tree the first level is."""
    decoder, driver = from_nan(zoo, target, "model-copy", shape, **settings)
    for _ in range(1 + settings.get("prefix_caching", False)):
        for out in decoder.generate(ragged_prompts(40, 5), SamplingParams(max_tokens=21)):
            accepted = out.stats.accepted_per_round
            assert accepted == [shape[0]] * len(accepted) if shape[1] == 1 else min(accepted) >= 1
    driver.assert_nothing_leaked()


def test_a_copy_whose_tokens_have_other_ids_is_always_right(zoo: Zoo) -> None:
    """Keeps out: ids of one vocabulary taken for those of the other, in prompts, drafts, accepted tokens or noise."""
    decoder, _ = from_nan(zoo, "bytes", "model-permuted", (4, 1, 5), page_size=4)
    for out in decoder.generate(ragged_prompts(300, 4), SamplingParams(max_tokens=21)):
        accepted = out.stats.accepted_per_round
        assert accepted == [4] * len(accepted)
    copy = zoo.decoder("bytes", "model-copy", SpecConfig(4, 1, 5))
    sampled = SamplingParams(max_tokens=40, temperature=0.8, seed=1)
    outputs, same = (each.generate(ragged_prompts(300, 4), sampled) for each in (decoder, copy))
    assert [out.stats.accepted_per_round for out in outputs] == [out.stats.accepted_per_round for out in same]


@pytest.mark.parametrize("shape", [("auto", 1, 5), ("auto", 3, 9)], ids=str)
def test_it_catches_up_after_pauses(zoo: Zoo, shape: Any) -> None:
    """Keeps out: tokens of paused rounds that the drafter never reads.  A copy of the target then drafts other tokens."""
    decoder, driver = from_nan(zoo, "llama", "model-copy", shape, page_size=4)
    driver.script_levels(2, 0, 0, 0, 3, 0, 1, 0, 0, 2)
    for out in decoder.generate(ragged_prompts(40, 3), SamplingParams(max_tokens=30)):
        rounds = list(zip(out.stats.accepted_per_round, (2, 0, 0, 0, 3, 0, 1, 0, 0), strict=False))
        assert all(accepted == levels if shape[1] == 1 else accepted >= min(levels, 1) for accepted, levels in rounds)


def test_sampled_drafts_know_the_target_s_noise(zoo: Zoo) -> None:
    """Keeps out: a level whose noise is another position's, by which a copy would be right no more often than without noise."""
    decoder = zoo.decoder("llama", "model-copy", SpecConfig(4, 1, 5))
    sampled = [SamplingParams(max_tokens=60, temperature=0.8, seed=seed) for seed in range(3)]
    found = []
    for shares in (True, False):
        Driver(decoder).drafter.shares_noise = shares
        outputs = decoder.generate(ragged_prompts(40, 3), sampled)
        accepted, rounds = (sum(getattr(out.stats, name) for out in outputs) for name in ("accepted", "rounds"))
        found.append(accepted / rounds)
    assert found[0] > 1.5 * found[1]


@pytest.mark.slow_cases
@pytest.mark.parametrize("drafter", ["model-near", "model-window"])  # the second has a key head that both ranks hold
def test_ranks_share_a_model(zoo: Zoo, drafter: str) -> None:
    """Keeps out: sums that are not added up, a vocabulary's run taken for the whole.  Unwritten slots hold NaN."""
    prompts, spec = ragged_prompts(40, 4)[2:], SpecConfig(3, 2, 6)

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        return [(out.token_ids, out.stats.accepted_per_round) for out in outputs]

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32"}
    shared = with_ranks(zoo.target("llama"), zoo.head("llama", drafter), spec, 2, use, **settings)
    assert shared == use(zoo.decoder("llama", drafter, spec, **settings))
    assert [ids for ids, _ in shared] == [zoo.greedy("llama", prompt, 12) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("shape", [(4, 1, 5), (4, 4, 16)], ids=str)
def test_captured_rounds(zoo: Zoo, shape: tuple[int, int, int], graphs: Any) -> None:
    """Keeps out: a replay with the lengths or the tables of its capture."""
    settings: dict[str, Any] = {"device": "cuda", "cuda_graphs": graphs, "prefix_caching": True, "max_batch_size": 3}
    decoder = zoo.decoder("llama", "model-copy", SpecConfig(*shape), page_size=4, **settings)
    prompts = ragged_prompts(40, 6)
    for _ in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24) for prompt in prompts]
        for out in outputs:
            accepted = out.stats.accepted_per_round
            assert accepted == [shape[0]] * len(accepted) if shape[1] == 1 else min(accepted) >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", sorted({*SMALL} - {"model-copy"}))
def test_texts_on_a_gpu(zoo: Zoo, drafter: str) -> None:
    """Keeps out: kernels that a kind of layer lacks as a drafter, masks of ids that the target has not, ids beyond a table."""
    target = "words" if drafter.endswith("ids") else "bytes" if drafter == "model-permuted" else "llama"
    decoder = zoo.decoder(target, drafter, SpecConfig("auto", 3, 12), device="cuda", page_size=4, max_batch_size=3)
    Driver(decoder).script_levels(2, 0, 0, 3, 0, 1)
    prompts = ragged_prompts(40, 5)
    for temperature in (0.0, 0.9):
        sampled = SamplingParams(max_tokens=24, temperature=temperature, seed=5 if temperature else None)
        fast, plain = (decoder.generate(prompts, sampled, speculate=on) for on in (True, False))
        assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
