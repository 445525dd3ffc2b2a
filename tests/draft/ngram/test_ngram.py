"""The n-gram drafter in an engine: the text stays the target's, and repeated text is drafted right."""

from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.ngrams import accepted_by_round

from specdec import SamplingParams, SpecConfig
from specdec.draft.ngram.store import TokenStore

CASES = [  # target, shape, settings
    ("llama", (4, 1, 5), {"page_size": 1}),
    ("llama", (3, 2, 7), {"prefix_caching": True, "page_size": 4, "prefill_chunk": 5}),
    ("mistral", (4, 3, 13), {"page_size": 4}),  # every layer has a window: the text lies in a ring of pages
    ("mistral", ("auto", 2, 6), {"page_size": 4}),
    ("qwen2", ("auto", 1, 5), {"prefix_caching": True, "page_size": 4}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "shape", "settings"), CASES, ids=str)
def test_text_is_the_target_s(zoo: Zoo, target: str, shape: Any, settings: dict[str, Any]) -> None:
    """Keeps out: siblings of one token, entries of another row or of a page's earlier owner that are no ids."""
    decoder = zoo.decoder(target, "ngram", SpecConfig(*shape), max_batch_size=3, **settings)
    driver = Driver(decoder)
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    prompts = ragged_prompts(40, 6)
    for _ in range(2):  # the second time cached pages are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 24) for prompt in prompts]
    sampled = SamplingParams(max_tokens=12, temperature=1.1, seed=3)
    fast, plain = (decoder.generate(prompts[:2], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


def test_only_the_first_group_s_pages_hold_text() -> None:
    """Keeps out: pages of a second group, which are numbered anew, whose copies put text into pages of the first."""
    store = TokenStore(24, torch.device("cpu"))
    store.write(torch.arange(24), torch.arange(100, 124))
    pages = torch.tensor([1, 2]), torch.tensor([2, 5])  # sources and targets overlap
    store.copy_pages(*pages, 4, 1)
    assert store.tokens_N.tolist() == list(range(100, 124))
    store.copy_pages(*pages, 4, 0)
    assert store.tokens_N.tolist() == [*range(100, 108), *range(104, 108), *range(112, 120), *range(108, 112)]


def drafted_and_true(zoo: Zoo, spec: SpecConfig, text: list[int], chunk: int, **settings: Any) -> set[tuple[int, ...]]:
    """The paths of the tree that is drafted after the text, of which the last token is the bonus token."""
    decoder = zoo.decoder("llama", "ngram", spec, prefill_chunk=chunk, **settings)
    driver = Driver(decoder)
    request = driver.submit(text[:-1], SamplingParams(max_tokens=20))
    while not request.output.token_ids:
        driver.step()
    drafter = driver.drafter.drafter
    with torch.inference_mode():  # the target chose another first token than the text has
        state = driver._workers.state
        state.bonus_B[0] = text[-1]
        drafter.finder.store.write(state.pages.slots_at(state.lens_B[:1, None].long() - 1)[0], torch.tensor(text[-1:]))
    tree = driver.draft(1, spec)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens_BN[0, 1:].tolist(), tree.parents_BN[0, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    assert tree.tokens_BN[0, 0] == text[-1]
    return set(paths)


TEXT = [1, 7, 8, 9, 10, 11, 3, 7, 8, 9, 20, 21, 5, 6, 8, 9, 30, 31, 2, 7, 8, 9]


@pytest.mark.parametrize("chunk", [4, 64])
def test_drafts_what_followed(zoo: Zoo, chunk: int) -> None:
    """Keeps out: text shifted by one, chunks whose last token is lost.  Of places that end alike the later one comes first."""
    chain = drafted_and_true(zoo, SpecConfig(2, 1, 3), TEXT, chunk, page_size=4)
    assert chain == {(), (20,), (20, 21)}
    tree = drafted_and_true(zoo, SpecConfig(2, 3, 7), TEXT, chunk, page_size=4)
    assert tree == {(), (20,), (20, 21), (10,), (10, 11), (30,), (30, 31)}


@pytest.mark.slow_cases
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_each_round_accepts_what_a_search_by_hand_finds(zoo: Zoo, prefix_caching: bool) -> None:
    """Keeps out: emitted tokens that are not learnt or learnt in a wrong place, which only acceptance would show."""
    settings: dict[str, Any] = {"max_seq_len": 160, "prefix_caching": prefix_caching, "page_size": 4, "max_batch_size": 3}
    decoder = zoo.decoder("llama", "ngram", SpecConfig(4, 1, 5), **settings)
    for _ in range(1 + prefix_caching):
        for out in decoder.generate(ragged_prompts(40, 4), SamplingParams(max_tokens=60)):
            want = accepted_by_round(out.prompt_token_ids, out.token_ids, 4)
            assert out.stats.accepted_per_round[:-1] == want[:-1]  # the last round may go on after the end
            assert out.stats.rounds == len(want) and sum(want) > 4


def test_a_tree_wider_than_the_vocabulary_is_refused(zoo: Zoo) -> None:
    with pytest.raises(
        ValueError, match=r"needs a vocabulary of at least 48 tokens for SpecConfig\(5,8,41\), got 40; .* topk=1"
    ):
        zoo.decoder("llama", "ngram", SpecConfig(5, 8, 41))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("shape", [(4, 1, 5), (4, 4, 12)], ids=str)
def test_captured_rounds(zoo: Zoo, shape: tuple[int, int, int], graphs: Any) -> None:
    """Keeps out: a lookup that a replay repeats with the lengths of its capture."""
    settings: dict[str, Any] = {"device": "cuda", "cuda_graphs": graphs, "prefix_caching": True, "max_batch_size": 3}
    decoder = zoo.decoder("llama", "ngram", SpecConfig(*shape), **settings)
    prompts = ragged_prompts(40, 6)
    for _ in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    (again,) = decoder.generate([prompts[0]], SamplingParams(max_tokens=90))
    if shape[1] == 1:
        want = accepted_by_round(again.prompt_token_ids, again.token_ids, 4)
        assert again.stats.accepted_per_round[:-1] == want[:-1]


def test_nothing_is_caught_up_after_a_pause(zoo: Zoo) -> None:
    """Keeps out: a graph that captures no launch, of which torch warns, because sources beside the n-grams have tensors."""
    decoder = zoo.decoder("llama", "ngram", SpecConfig("auto", 2, 6))
    driver, prompt = Driver(decoder), ragged_prompts(40, 2)[1]
    driver.drafter.catch_up = None
    driver.script_levels(2, 0, 0, 3, 0, 1)
    (out,) = decoder.generate([prompt], SamplingParams(max_tokens=24))
    assert out.token_ids == zoo.greedy("llama", prompt, 24) and out.stats.accepted_per_round[1:3] == [0, 0]
