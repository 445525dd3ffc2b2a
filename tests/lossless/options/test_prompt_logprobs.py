"""Log-probabilities of a prompt's tokens are those of transformers' own pass over it, however the prompt is cut and batched."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.families import save_family
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import with_ranks
from transformers import AutoModelForCausalLM

from specdec import AsyncSpecDecoder, Generation, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.generation import TokenLogprob
from specdec.runner.workers import Workers
from specdec.session import Session

TOLERANCE = 1e-4


def check(scores: list[TokenLogprob | None] | None, logits_TV: torch.Tensor, ids: list[int], top: int) -> None:
    """logits_TV: transformers' own of the whole prompt."""
    assert scores is not None and len(scores) == len(ids) and scores[0] is None
    logp_TV = logits_TV.double().log_softmax(-1)
    for place, each in enumerate(scores[1:], 1):
        assert each is not None and each.token == ids[place]
        assert each.logprob == pytest.approx(logp_TV[place - 1, ids[place]].item(), abs=TOLERANCE)
        values, best = logp_TV[place - 1].topk(top)
        assert list(each.top) == best.tolist() and list(each.top.values()) == pytest.approx(values.tolist(), abs=TOLERANCE)


@pytest.fixture(scope="module")
def shipped_logits() -> dict[tuple[int, ...], torch.Tensor]:
    """By prompt, transformers' logits of the shipped target."""
    model = AutoModelForCausalLM.from_pretrained(shipped.target_folder(), dtype=torch.float32)
    prompts = ragged_prompts(2048, 3, seed=3)
    with torch.no_grad():
        return {tuple(ids): model(torch.tensor([ids])).logits[0] for ids in (*prompts, [77], [5, *prompts[0], *prompts[1]])}


def score_by_three(workers: Workers) -> None:
    """Logits of three tokens are computed at once."""
    workers.verifier.scored_logits = 3 * 2048


def test_prompts_of_the_shipped_target(shipped_logits: dict[tuple[int, ...], torch.Tensor]) -> None:
    """In chunks of 7 tokens, logits in slices of 3, beside a prompt that nobody asks about, while drafts are verified; then
    again where pages of the same prompts are kept.  Keeps out: a chunk's last token without its next one, numbers of a
    neighbour, tokens that a kept page answers for, and texts that differ because somebody asked."""
    folders = shipped.target_folder(), shipped.draft_folder()
    settings = dict(device="cpu", dtype="float32", max_batch_size=3, prefill_chunk=7, prefix_caching=True)
    with SpecDecoder.from_pretrained(*folders, SpecConfig(3, 2, 6), **settings) as decoder:
        Session(decoder).on_all_ranks(score_by_three)
        prompts = [*map(list, shipped_logits), [9, 8, 7]]
        params = [SamplingParams(6, prompt_logprobs=top, logprobs=1) for top in (0, 2, 30, 1, 1)] + [SamplingParams(6)]
        first = decoder.generate(prompts, params)
        again = decoder.generate(prompts, params)
        plain = decoder.generate(prompts, SamplingParams(6), speculate=False)
        for outputs in (first, again):
            for out, asked, logits_TV in zip(outputs, params, shipped_logits.values(), strict=False):
                check(out.prompt_logprobs, logits_TV, out.prompt_token_ids, asked.prompt_logprobs or 0)
                assert out.stats.cached_tokens == 0
            assert outputs[5].prompt_logprobs is None
            assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
        assert sum(out.stats.cached_tokens for out in plain), "the prompts' pages are kept"
        assert sum(out.stats.accepted for out in first)
        longest = prompts[4]
        check(decoder.score(longest, 3)[0], shipped_logits[tuple(longest)], longest, 3)
        assert asyncio.run(AsyncSpecDecoder(decoder).score(longest, 3)) == decoder.score(longest, 3)[0]
        for wrong in (None, -1, "a", 10**9):  # None would give nothing, in silence
            with pytest.raises((TypeError, ValueError), match="^top must be "):
                decoder.score(longest, wrong)  # type: ignore[arg-type]
        (chunk, *rest) = decoder.stream(longest, SamplingParams(6, prompt_logprobs=0))
        assert chunk.prompt_logprobs == first_of(decoder, longest).prompt_logprobs
        assert rest and all(each.prompt_logprobs is None for each in rest)


def first_of(decoder: SpecDecoder, prompt: list[int]) -> Generation:
    return decoder.generate(prompt, SamplingParams(6, prompt_logprobs=0))[0]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("name", "size", "backend"), [("qwen3", 2, "auto"), ("llama", 1, "transformers"), ("llama3-tied-dim8", 1, "auto")]
)
def test_ranks_and_transformers_code(zoo: Zoo, name: str, size: int, backend: str) -> None:
    """Keeps out: a token or likeliest ones that only one rank's run of the vocabulary holds."""
    prompts = ragged_prompts(40, 2, seed=1)
    draft = zoo.head(name, "eagle3") if backend == "auto" else None

    def scores(decoder: SpecDecoder) -> list[list[TokenLogprob | None]]:
        return decoder.score(prompts, 4)

    found = with_ranks(zoo.target(name), draft, SpecConfig(2, 2, 4), size, scores, backend=backend)
    for ids, each in zip(prompts, found, strict=True):
        with torch.no_grad():
            check(each, zoo.hf(name)(torch.tensor([ids])).logits[0], ids, 4)


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", [(), (shipped.draft_folder(), SpecConfig(3, 2, 6)), ("ngram", SpecConfig(4, 2, 9))])
def test_a_prompt_that_fills_the_context(how: tuple[Any, ...]) -> None:
    """Beside texts that are decoded, in chunks, with pages to the last token.  Keeps out: the last token of a long text that
    nobody can score, a position after the last one that spoils a neighbour, and a prompt a token longer that is taken."""
    full, short = ragged_prompts(2048, 1, seed=4)[0] * 64, [[5, 6, 7], [9] * 10]
    full = full[:64]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(shipped.target_folder(), dtype=torch.float32)
        logits_TV = model(torch.tensor([full])).logits[0]
    settings = dict(device="cpu", dtype="float32", max_batch_size=4, max_seq_len=64, prefill_chunk=7, page_size=16)
    with SpecDecoder.from_pretrained(shipped.target_folder(), *how, prefix_caching=True, **settings) as decoder:
        alone, one = SamplingParams(0, prompt_logprobs=2, logprobs=1), SamplingParams(1, prompt_logprobs=2)
        outputs = decoder.generate([*short, full, full], [SamplingParams(40), SamplingParams(40), alone, one])
        for out in outputs[2:]:
            check(out.prompt_logprobs, logits_TV, full, 2)
        assert (outputs[2].token_ids, outputs[2].text, outputs[2].logprobs, outputs[2].finish_reason) == ([], "", [], "length")
        assert outputs[3].token_ids == [int(logits_TV[-1].argmax())]
        assert [out.token_ids for out in outputs[:2]] == [
            out.token_ids for out in decoder.generate(short, SamplingParams(40), speculate=False)
        ]
        check(asyncio.run(AsyncSpecDecoder(decoder).score(full, 1)), logits_TV, full, 1)
        (chunk,) = decoder.stream(full, alone)
        check(chunk.prompt_logprobs, logits_TV, full, 2)
        assert (chunk.token_ids, chunk.text) == ([], "")
        with pytest.raises(ValueError, match="has 65 tokens; expected at most max_seq_len = 64"):
            decoder.score([*full, 5])
        with pytest.raises(ValueError, match="max_seq_len - 1 = 63"):
            decoder.generate(full, SamplingParams(1))


def test_learnt_positions_to_the_last(tmp_path: Path) -> None:
    """Keeps out: a row of a table of learnt positions that is not there, read by the token that nobody is given."""
    save_family(tmp_path / "gpt2", "gpt2", 0, n_positions=64, n_embd=32, n_head=2, n_layer=2, head_dim=16)
    full = (ragged_prompts(40, 1, seed=2)[0] * 64)[:64]
    with torch.no_grad():
        logits_TV = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", dtype=torch.float32)(torch.tensor([full])).logits[0]
    with SpecDecoder.from_pretrained(tmp_path / "gpt2", "ngram", device="cpu", dtype="float32", max_batch_size=2) as decoder:
        outputs = decoder.generate([full, [1, 2]], [SamplingParams(1, prompt_logprobs=1), SamplingParams(40)])
        check(outputs[0].prompt_logprobs, logits_TV, full, 1)
        check(decoder.score(full, 1)[0], logits_TV, full, 1)
