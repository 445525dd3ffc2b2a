"""Whatever shares a batch with a request, and however memory and prompts are cut: its ids and its acceptance are the same.

Acceptance is compared round by round, because a fault of the draft path never shows in the text.  tests/gpu/test_gpu.py does
the same with graphs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

from specdec import Generation, SamplingParams, SpecConfig, SpecDecoder

SPEC, CHAIN = SpecConfig(3, 4, 12), SpecConfig(3, 1, 4)
PROMPTS = ragged_prompts(40, 32, seed=2)
SAMPLING = [  # of other lengths, so that a batch of 32 shrinks row by row to 1
    SamplingParams(max_tokens=1 + index // 2, **({"temperature": 0.9, "seed": index} if index % 4 == 3 else {}))
    for index in range(32)
]
Seen = list[tuple[list[int], list[int]]]


def seen(outputs: list[Generation]) -> Seen:
    return [(out.token_ids, out.stats.accepted_per_round) for out in outputs]


def load(zoo: Zoo, spec: SpecConfig = SPEC, **settings: Any) -> SpecDecoder:
    return zoo.decoder("llama", "eagle3", spec, max_seq_len=64, **{"max_batch_size": 8, "page_size": 16, **settings})


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> Seen:
    """Every request alone."""
    outputs = seen(load(zoo, max_batch_size=1).generate(PROMPTS, SAMPLING))
    assert sum(sum(accepted) for _, accepted in outputs) > 10, "nothing was ever accepted, so a fault of it can't be seen"
    return outputs


def chunks_of(tokens: int) -> Callable[[Driver], None]:
    def prepare(driver: Driver) -> None:
        driver.set_chunk(tokens)

    return prepare


whole_chunks = chunks_of(10_000)


def padding_is_junk(driver: Driver) -> None:
    driver.before_each_round(driver.poison_padding)


def thousand_requests_before(driver: Driver) -> None:
    driver.decoder.generate([[index % 40] for index in range(1000)], SamplingParams(max_tokens=2))


CASES: dict[str, tuple[dict[str, Any], Callable[[Driver], None]]] = {
    "batch of 8": ({}, whole_chunks),
    "batch of 32 that shrinks to 1": ({"max_batch_size": 32}, whole_chunks),
    "pages of 1": ({"page_size": 1}, whole_chunks),
    "pages of 5": ({"page_size": 5}, whole_chunks),
    "pages of 64": ({"page_size": 64}, whole_chunks),
    "chunks of 1": ({}, chunks_of(1)),
    "chunks of 7": ({}, chunks_of(7)),
    "chunks of 64": ({"max_batch_size": 32}, chunks_of(64)),
    "junk in padding": ({"max_batch_size": 32, "page_size": 4}, padding_is_junk),
    "after 1,000 requests": ({"max_batch_size": 32}, thousand_requests_before),
}


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("case", CASES)
def test_a_request_is_the_same_in_any_company(zoo: Zoo, alone: Seen, case: str) -> None:
    """Keeps out: a row that reads another's keys, a page's edge, a chunk's end, padding, or what an earlier request left."""
    settings, prepare = CASES[case]
    decoder = load(zoo, **settings)
    prepare(Driver(decoder))
    assert seen(decoder.generate(PROMPTS, SAMPLING)) == alone


def test_a_tree_of_one_branch_is_a_chain(zoo: Zoo) -> None:
    """Keeps out: a chain's short cuts (one causal segment, no moves) that compute something else than a tree does."""
    chain, tree = load(zoo, CHAIN), load(zoo, CHAIN)
    driver = Driver(tree)
    grow, grown = driver.drafter.draft, []

    def as_tree(*args: Any) -> Any:
        grown.append(replace(grow(*args), is_chain=False))
        return grown[-1]

    driver.drafter.draft = as_tree
    assert seen(tree.generate(PROMPTS, SAMPLING)) == seen(chain.generate(PROMPTS, SAMPLING))
    assert grown and any(any(accepted) for _, accepted in seen(chain.generate(PROMPTS, SAMPLING)))
