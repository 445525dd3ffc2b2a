"""Drafts that know the target's noise: more of them are accepted, and the text is the same to the last id."""

import json
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.paths import PAIR

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.generation import Generation, Stats

TEXTS, TOKENS = 8, 24


def ids(outputs: list[Generation]) -> list[list[int]]:
    return [out.token_ids for out in outputs]


def accept_length(outputs: list[Generation]) -> float:
    return Stats.total([out.stats for out in outputs]).accept_length


@pytest.mark.slow_cases
@pytest.mark.parametrize(("shape", "filters", "gain"), [((5, 4, 16), {}, 1.1), ((5, 1, 6), {"top_p": 0.6}, 1.0)], ids=str)
def test_more_drafts_are_accepted_and_the_text_is_the_same(shape: tuple[int, int, int], filters: Any, gain: float) -> None:
    """At temperature 1, on the shipped pair.  Keeps out: noise that the target does not use, or that filters make harmful."""
    prompts = [json.loads(line)["prompt"] for line in (PAIR / "prompts.jsonl").read_text().splitlines()[:TEXTS]]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch_size": TEXTS, "max_seq_len": 128}
    decoder = SpecDecoder.from_pretrained(PAIR / "target", PAIR / "draft", SpecConfig(*shape), **options)
    drafter = Driver(decoder).drafter
    params = [SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=i, ignore_eos=True, **filters) for i in range(TEXTS)]
    shared = decoder.generate(prompts, params)
    drafter.shares_noise = False
    by_probability = decoder.generate(prompts, params)
    assert ids(shared) == ids(by_probability) == ids(decoder.generate(prompts, params, speculate=False))
    assert accept_length(shared) > gain * accept_length(by_probability)


@pytest.mark.slow_cases
@pytest.mark.parametrize("spec", [SpecConfig(3, 1, 4), SpecConfig(3, 4, 14)], ids=str)
def test_greedy_rows_are_drafted_as_ever(zoo: Zoo, spec: SpecConfig) -> None:
    """Beside sampled ones, too.  Keeps out: counters of greedy requests that depend on who shares their batch."""
    decoder = zoo.decoder("llama", "eagle3", spec, max_batch_size=4)
    prompts, greedy = ragged_prompts(40, 4, seed=5), SamplingParams(max_tokens=14)
    alone = decoder.generate(prompts, greedy)
    Driver(decoder).drafter.shares_noise = False
    old = decoder.generate(prompts, greedy)
    Driver(decoder).drafter.shares_noise = True
    beside = decoder.generate(prompts, [greedy, SamplingParams(max_tokens=30, temperature=1.1, top_p=0.8)] * 2)
    for first, second, third in list(zip(alone, old, beside, strict=True))[::2]:
        assert first.token_ids == second.token_ids == third.token_ids
        assert first.stats.accepted_per_round == second.stats.accepted_per_round == third.stats.accepted_per_round


def test_a_pause_ends_with_the_noise(zoo: Zoo) -> None:
    """Keeps out: a first level without noise after paused rounds, whose scores and ids are then another rule's."""
    decoder = zoo.decoder("llama", "eagle3", SpecConfig("auto", 4, 16), max_batch_size=2)
    driver = Driver(decoder)
    driver.script_levels(0, 0, 3)
    requests = [
        driver.submit(p, SamplingParams(max_tokens=30, temperature=1.0, seed=i)) for i, p in enumerate(ragged_prompts(40, 2))
    ]
    calls, drafter = [], driver.drafter
    seen = drafter.set_first_level
    drafter.set_first_level = lambda state, noise: (calls.append(noise), seen(state, noise))
    driver.run_until_idle()
    assert calls and all(noise is not None for noise in calls)
    texts = [request.output.token_ids for request in requests]
    params = [SamplingParams(max_tokens=30, temperature=1.0, seed=i) for i in range(2)]
    assert texts == ids(decoder.generate(ragged_prompts(40, 2), params, speculate=False))
