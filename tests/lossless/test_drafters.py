"""The drafter can't change the text: an oracle, an always-wrong and a random one give the same ids as plain decoding.

Keeps out: an acceptance rule that trusts the draft, and one that turns right drafts down.
"""

import pytest
from toolkit.drafters import Substitute
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig

SHAPES = [(4, 1, 5), (1, 1, 2), (4, 3, 14), (3, 8, 33)]
MAX_TOKENS = [19, 24, 3, 24, 11, 1]


@pytest.mark.slow_cases
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["oracle", "wrong", "random"])
def test_substitutes_give_the_same_ids(zoo: Zoo, kind: str, shape: tuple[int, int, int], temperature: float) -> None:
    spec = SpecConfig(*shape)
    decoder = zoo.decoder("llama", "eagle3", spec, max_batch_size=4)
    prompts = ragged_prompts(40, len(MAX_TOKENS))
    long = [SamplingParams(max_tokens=24 + 8, temperature=temperature, seed=i) for i in range(len(prompts))]
    texts = {tuple(out.prompt_token_ids): out.token_ids for out in decoder.generate(prompts, long, speculate=False)}
    driver = Driver(decoder)
    driver.replace_drafter(Substitute(driver, spec, kind, 40, texts))
    sampling = [SamplingParams(max_tokens=n, temperature=temperature, seed=i) for i, n in enumerate(MAX_TOKENS)]
    outputs = decoder.generate(prompts, sampling)
    assert [out.token_ids for out in outputs] == [texts[tuple(p)][:n] for p, n in zip(prompts, MAX_TOKENS, strict=True)]
    for out in outputs:
        S, rounds = spec.num_steps, out.stats.rounds
        if kind == "oracle":
            assert out.stats.accepted_per_round == [S] * rounds
            assert rounds == -(-(len(out.token_ids) - 1) // (S + 1))
        if kind == "wrong":
            assert out.stats.accepted == 0 and rounds == len(out.token_ids) - 1
    if temperature == 0:
        assert texts[tuple(prompts[0])][:24] == zoo.greedy("llama", prompts[0], 24)
