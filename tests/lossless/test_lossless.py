"""Greedy text with speculation is the target's own: token for token what transformers writes, in float32.

Keeps out: whatever a draft, a tree, a page size, a batch or a queue could do to the text.  All bugs of a verifier end here.
"""

import pytest
from toolkit.driver import Driver
from toolkit.models import COMMON, FAMILIES, Zoo, hf_greedy, ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.generation import Generation

# A covering selection: every family (mistral: all layers windowed; qwen2: some), head, k in {1, 2, 4, 8}, page size in
# {1, 16, 64} and batch in {1, 3, 8}; every pair of (k, page size), (k, batch) and (head, k) occurs.
CASES = [
    ("llama", "eagle3", (4, 1, 5), 1, 8),
    ("llama", "eagle1", (3, 8, 40), 16, 3),
    ("llama", "eagle3-full", (1, 4, 5), 1, 3),
    ("llama3-tied-dim8", "eagle3", (3, 2, 7), 64, 3),
    ("llama3-tied-dim8", "eagle1", (4, 4, 16), 16, 8),
    ("llama3-tied-dim8", "eagle3-full", (5, 1, 6), 16, 1),
    ("llama-dim80-biases", "eagle3", (3, 8, 24), 64, 8),
    ("llama-dim80-biases", "eagle1", (4, 2, 10), 1, 1),
    ("llama-linear-8-layers", "eagle3", (5, 4, 16), 64, 1),
    ("mistral", "eagle3-full", (4, 2, 13), 16, 8),
    ("mistral", "eagle1-two-layers", (3, 8, 32), 1, 1),
    ("mistral", "eagle3-window", (6, 3, 20), 16, 3),
    ("qwen2", "eagle3", (5, 4, 53), 1, 8),
    ("qwen2", "eagle1-window", (7, 2, 14), 5, 8),
    ("qwen3", "eagle3-full", (3, 8, 20), 16, 3),
    ("qwen3", "eagle1-two-layers", (2, 4, 8), 64, 8),
]
MAX_TOKENS = [20, 7, 24, 1, 13, 2, 24, 18, 24, 5, 11]


def assert_greedy(zoo: Zoo, target: str, prompts: list[list[int]], outputs: list[Generation]) -> None:
    for prompt, max_tokens, out in zip(prompts, MAX_TOKENS, outputs, strict=True):
        assert out.prompt_token_ids == prompt and out.finish_reason == "length"
        assert out.token_ids == zoo.greedy(target, prompt, 24)[:max_tokens], (target, prompt)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("target", "head", "shape", "page_size", "batch"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_generate_equals_transformers(
    zoo: Zoo, target: str, head: str, shape: tuple[int, int, int], page_size: int, batch: int
) -> None:
    """More prompts than rows, each with its own length, so that rows change owners between other requests' rounds."""
    decoder = zoo.decoder(target, head, SpecConfig(*shape), page_size=page_size, max_batch_size=batch)
    prompts = ragged_prompts(COMMON["vocab_size"], len(MAX_TOKENS))
    sampling = [SamplingParams(max_tokens=n) for n in MAX_TOKENS]
    outputs = decoder.generate(prompts, sampling)
    assert_greedy(zoo, target, prompts, outputs)
    assert sum(out.stats.drafted for out in outputs) == (shape[2] - 1) * sum(out.stats.rounds for out in outputs) > 0
    Driver(decoder).assert_nothing_leaked()
    if (target, head) in {(case[0], case[1]) for case in CASES[::4]}:
        assert_greedy(zoo, target, prompts, decoder.generate(prompts, sampling, speculate=False))


def test_the_oracle_refuses_other_texts(zoo: Zoo) -> None:
    """Keeps out: an oracle that agrees with whatever it is asked about."""
    prompt = [3, 4, 5]
    right, asked = hf_greedy(zoo.hf("qwen3"), prompt, 9), zoo.greedy("qwen3", prompt, 9)
    wrong = [[*right[:at], right[at] ^ 1, *right[at + 1 :]] for at in range(9)]
    assert not any(text == asked for text in [*wrong, right[:8], [*right, 1]])
    assert right == asked and right[:4] == asked[:4] and not any(text == asked for text in wrong)
    assert zoo.greedy("qwen3", prompt, 12)[8] == right[8] and [*asked, 1] == [1][:0] + asked + [1] == [*right, 1]


def test_random_heads_are_sometimes_right(zoo: Zoo) -> None:
    """Keeps out: a suite that never accepts anything, and so never commits a path."""
    decoder = zoo.decoder("llama", "eagle1", SpecConfig(3, 8, 40))
    outputs = decoder.generate(ragged_prompts(40, 8), SamplingParams(max_tokens=24))
    assert sum(out.stats.accepted for out in outputs) > 20
    assert any(accepted > 1 for out in outputs for accepted in out.stats.accepted_per_round)


@pytest.mark.slow_cases
def test_plain_decoding_equals_transformers(zoo: Zoo, any_target: str) -> None:
    """Keeps out: a baseline that is wrong in the same way as speculation."""
    prompts = ragged_prompts(40, len(MAX_TOKENS))
    decoder = zoo.decoder(any_target, max_batch_size=3)
    outputs = decoder.generate(prompts, [SamplingParams(max_tokens=n) for n in MAX_TOKENS])
    assert_greedy(zoo, any_target, prompts, outputs)
    assert all(out.stats.drafted == out.stats.accepted == 0 for out in outputs)


def test_a_window_below_the_depth_of_the_tree(zoo: Zoo) -> None:
    """Keeps out: a window counted from one token before or after where the tree begins, which leaves wider windows right."""
    decoder = zoo.decoder("narrow", "ngram", SpecConfig(8, 2, 16), page_size=4, max_batch_size=3)
    prompts = ragged_prompts(COMMON["vocab_size"], 4)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=48))
    assert [out.token_ids for out in outputs] == [zoo.greedy("narrow", prompt, 48) for prompt in prompts]
    window = FAMILIES["narrow"][2]["sliding_window"]
    assert sum(accepted > window for out in outputs for accepted in out.stats.accepted_per_round) > 3, "no path is deep"


@pytest.mark.slow
def test_context_is_used_to_its_end(zoo: Zoo) -> None:
    """Keeps out: a look-ahead that runs off the page table or the rotary table at the last positions."""
    prompts = ragged_prompts(40, 3, seed=5)
    for shape, page_size in (((5, 4, 16), 1), ((5, 1, 6), 16), ((3, 8, 40), 64)):
        decoder = zoo.decoder("llama", "eagle3", SpecConfig(*shape), max_seq_len=48, page_size=page_size)
        outputs = decoder.generate(prompts, [SamplingParams(max_tokens=48 - len(p)) for p in prompts])
        for prompt, out in zip(prompts, outputs, strict=True):
            assert out.token_ids == zoo.greedy("llama", prompt, 48)[: 48 - len(prompt)]
