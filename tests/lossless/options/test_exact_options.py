"""Every sampling option is exact at every node of the tree: the text of transformers with the same option, and the text that
plain decoding writes, whatever the draft accepts.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from toolkit.drafters import Substitute
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts
from transformers import LogitsProcessor, LogitsProcessorList

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.choose import scores_at

V, TOKENS, EOS = 40, 20, 7
TREE, CHAIN = SpecConfig(4, 3, 12), SpecConfig(4, 1, 5)
# Each option alone, and all of them together; and the keyword of transformers' `generate` that means the same.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "logit_bias": (
        dict(logit_bias={token: (-4.0 if token % 3 else 4.0) for token in range(0, V, 2)}),
        dict(sequence_bias={(token,): (-4.0 if token % 3 else 4.0) for token in range(0, V, 2)}),
    ),
    "repetition_penalty": (dict(repetition_penalty=1.8), dict(repetition_penalty=1.8)),
    "presence_penalty": (dict(presence_penalty=1.5), {}),
    "frequency_penalty": (dict(frequency_penalty=0.9), {}),
    "bad_words": (
        dict(bad_words=[[token] for token in range(0, V, 5)]),
        dict(bad_words_ids=[[token] for token in range(0, V, 5)]),
    ),
    "min_tokens": (dict(min_tokens=14), dict(min_new_tokens=14)),
}
ALL = {key: value for ours, _ in OPTIONS.values() for key, value in ours.items()}
THEIRS = {key: value for _, theirs in OPTIONS.values() for key, value in theirs.items()}


class Counted(LogitsProcessor):
    """The penalties that transformers lacks, after the repetition penalty and before words are banned."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts_BV = torch.zeros_like(scores)
        output_BT = input_ids[:, self.prompt :]
        counts_BV.scatter_add_(1, output_BT, torch.ones(output_BT.shape))
        return scores - self.frequency * counts_BV - self.presence * (counts_BV > 0)


def of_transformers(zoo: Zoo, prompt: list[int], params: SamplingParams, **options: Any) -> list[int]:
    """transformers' greedy text with these options.  Refuses near-ties, which rounding could decide."""
    ids_1T = torch.tensor([prompt])
    counted = Counted(len(prompt), params.presence_penalty, params.frequency_penalty)
    out = zoo.hf("llama").generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=TOKENS, eos_token_id=EOS,
        pad_token_id=0, logits_processor=LogitsProcessorList([counted]), return_dict_in_generate=True, output_scores=True,
        **options,
    )  # fmt: skip
    best, second = torch.stack(out.scores).topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-4, "a near-tie: choose another seed for the prompt"
    return out.sequences[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def decoder(zoo: Zoo) -> SpecDecoder:
    return zoo.decoder("llama", "eagle3", TREE, max_batch_size=8)


def bad_phrases(decoder: SpecDecoder, prompts: list[list[int]]) -> list[list[int]]:
    """Words of two to four tokens that the plain outputs hold, so that banning them changes every output."""
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=TOKENS))
    return [out.token_ids[at : at + 2 + at % 3] for out in outputs for at in (0, 4, 9)]


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [*OPTIONS, "phrases", "all"])
def test_greedy_text_equals_transformers(zoo: Zoo, decoder: SpecDecoder, name: str) -> None:
    """Keeps out: an option that only the bonus token obeys; counts that miss path or prompt; another order of options."""
    prompts = [[EOS, *prompt] for prompt in ragged_prompts(V, 3, seed=6)]
    ours, theirs = OPTIONS.get(name, (ALL, THEIRS) if name == "all" else ({}, {}))
    if name in ("phrases", "all"):
        words = [*bad_phrases(decoder, prompts), *([[5], [11]] if name == "all" else [])]
        ours, theirs = {**ours, "bad_words": words}, {**theirs, "bad_words_ids": words}
    params = SamplingParams(max_tokens=TOKENS, stop_token_ids=[EOS], **ours)
    want = [of_transformers(zoo, prompt, params, **theirs) for prompt in prompts]
    got = decoder.generate(prompts, params)
    assert [out.token_ids for out in got] == want
    assert [out.token_ids for out in decoder.generate(prompts, params, speculate=False)] == want
    without = decoder.generate(prompts, SamplingParams(max_tokens=TOKENS, stop_token_ids=[EOS]))
    assert [out.token_ids for out in without] != want


CHANGES: dict[str, dict[str, Any]] = {  # a value of each field that must change some output; beside them a temperature
    "max_tokens": dict(max_tokens=5), "temperature": dict(temperature=1.7), "top_p": dict(top_p=0.3), "top_k": dict(top_k=2),
    "seed": dict(seed=99), "stop_token_ids": dict(stop_token_ids=[*range(0, V, 2)]), "min_p": dict(min_p=0.5),
    "top_n_sigma": dict(top_n_sigma=1.0),
    "min_tokens": dict(min_tokens=9, stop_token_ids=[*range(0, V, 2)]),
    **{name: ours for name, (ours, _) in OPTIONS.items() if name != "min_tokens"},
}  # fmt: skip
# stop and ignore_eos need a tokenizer or a model with an end (tests/engine/test_endings.py), and so do the options that say
# what the text must be (test_grammar.py); logprobs and n change no text.
ELSEWHERE = {"stop", "ignore_eos", "logprobs", "logprobs_mode", "n", "json_schema", "regex", "grammar"} | {
    "prediction",
    "sources",
    "shape",  # tests/engine/speculation
    "speculate",  # tests/draft/prediction
}


@pytest.mark.slow_cases(keep=3)
@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams) if field.name not in ELSEWHERE])
def test_no_field_is_ignored(decoder: SpecDecoder, name: str) -> None:
    """Every field changes sampled text, and the text is the same with speculation and without, whoever shares the batch."""
    prompts, base = ragged_prompts(V, 3, seed=11), SamplingParams(max_tokens=12, temperature=0.9, seed=5)
    changed = replace(base, **CHANGES[name])
    want = [out.token_ids for out in decoder.generate(prompts, changed, speculate=False)]
    mixed = [out.token_ids for out in decoder.generate([*prompts, *prompts], [changed] * 3 + [base] * 3)]
    assert mixed[:3] == want
    assert mixed[:3] != mixed[3:], "the field is ignored"
    assert [out.token_ids for out in decoder.generate(prompts[1:], base)] == mixed[4:], "a neighbour's option reached a row"


@pytest.mark.slow_cases
@pytest.mark.parametrize("spec", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("name", ["all", "sampled"])
def test_whole_paths_are_accepted_under_options(zoo: Zoo, name: str, spec: SpecConfig) -> None:
    """A drafter that knows the text has every draft token accepted: the target's choice at each node is plain decoding's."""
    decoder = zoo.decoder("llama", "eagle3", spec, max_batch_size=3)
    prompts, more = ragged_prompts(V, 3, seed=4), spec.num_steps + 1
    params = SamplingParams(max_tokens=TOKENS + more, **{**ALL, "min_tokens": 9}, stop_token_ids=[EOS])
    if name == "sampled":
        params = replace(params, temperature=0.8, seed=3, top_k=12, top_p=0.95, min_p=0.05)
    params = replace(params, stop_token_ids=[])
    want = [out.token_ids for out in decoder.generate(prompts, params, speculate=False)]
    texts = {tuple(prompt): ids for prompt, ids in zip(prompts, want, strict=True)}
    driver = Driver(decoder)
    driver.replace_drafter(Substitute(driver, spec, "oracle", V, texts))
    got = decoder.generate(prompts, replace(params, max_tokens=TOKENS))
    assert [out.token_ids for out in got] == [ids[:TOKENS] for ids in want]
    assert all(out.stats.accepted == out.stats.rounds * spec.num_steps for out in got)


def test_n_generations_of_a_prompt(decoder: SpecDecoder) -> None:
    """Generation j is that of the seed + j.  Keeps out: generations that share their noise, or come in another order."""
    prompts, base = ragged_prompts(V, 2, seed=1), SamplingParams(max_tokens=8, temperature=1.2, seed=7)
    got = decoder.generate(prompts, [replace(base, n=3), base])
    want = [decoder.generate(prompts[0], replace(base, seed=7 + j))[0] for j in range(3)] + decoder.generate(prompts[1], base)
    assert [(out.prompt_token_ids, out.token_ids) for out in got] == [(out.prompt_token_ids, out.token_ids) for out in want]
    unseeded = decoder.generate(prompts[0], SamplingParams(max_tokens=12, temperature=1.5, n=4))
    assert len({tuple(out.token_ids) for out in unseeded}) == 4
    with pytest.raises(ValueError, match="n must be 1 .* got 3; nearest thing that works: SpecDecoder.generate"):
        decoder.stream(prompts[0], replace(base, n=3))


def test_a_finished_text_is_judged_by_the_same_rules(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Each token has the highest score at its place, given the text before it.  Keeps out: a near-tie check that looks at the
    whole text, or at none, and so calls every text under options wrong."""
    rules = {**ALL, "bad_words": [[5], [11, 3]], "stop_token_ids": [EOS]}
    params = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=2, **rules)
    (out,) = decoder.generate([3, 9, 20], params)
    choice = decoder.new_request([3, 9, 20], params).choice
    with torch.no_grad():
        logits_TV = zoo.hf("llama")(torch.tensor([[3, 9, 20, *out.token_ids]])).logits[0, 2:-1]
    places = range(len(out.token_ids))
    assert scores_at(logits_TV, choice, 3, out.token_ids, places).argmax(-1).tolist() == out.token_ids
    assert scores_at(logits_TV, choice, 3, [0] * len(out.token_ids), places).argmax(-1).tolist() != out.token_ids
