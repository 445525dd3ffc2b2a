"""Log-probabilities of a prompt's tokens are those of transformers' own pass over it, however the prompt is cut and batched."""

import asyncio

import pytest
import torch
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
