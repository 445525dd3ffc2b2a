"""Assistants in an engine: the text stays the target's, and each draft is what transformers' assistant says along its own path.

Keeps out: keys of the round's own tree that a query reads, a window or a position one off, another layer's keys, the state of
another token: after prompts, chunks, cached pages, rounds and pauses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.heads.kinds.assistants import ASSISTANTS, AloneAssistant
from toolkit.models import Zoo, ragged_prompts
from toolkit.oracles.drawn import TOLERANCE, draw, hold_best_siblings, row_errors, running_decoder
from toolkit.parallel.decoders import fill_with_nan, with_ranks
from toolkit.unlike.targets import TARGETS

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.ops.noise.gumbel import gumbel_noise

assert ASSISTANTS and TARGETS  # which these imports give the zoo
SCORES = [  # target, drafter, shape, page size, batch, whether prompts are cached
    ("gemma", "assistant", (4, 4, 16), 1, 3, False),
    ("gemma", "assistant", (5, 1, 6), 16, 3, True),
    ("gemma-small", "assistant-ordered", (4, 3, 12), 4, 2, True),
    ("gemma-small", "assistant-ordered", (4, 1, 5), 4, 2, False),
    ("gemma-mixture", "assistant-small", (3, 8, 30), 4, 1, False),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "drafter", "shape", "page_size", "batch", "is_known"), SCORES, ids=str)
def test_every_node_equals_its_own_path(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, target: str, drafter: str, shape: tuple[int, int, int], page_size: int,
    batch: int, is_known: bool,
) -> None:  # fmt: skip
    settings = {"prefix_caching": True} if is_known else {}
    spec = SpecConfig(*shape)
    decoder, requests = running_decoder(zoo, target, drafter, spec, page_size, batch, is_known=is_known, **settings)
    drawn = draw(decoder, spec, batch, monkeypatch)
    for row, request in enumerate(requests):
        alone = AloneAssistant.of(zoo, target, drafter, request.prompt_ids + request.output.token_ids)
        assert spec.topk == 1 or max(row_errors(drawn, row, alone)) < TOLERANCE
        hold_best_siblings(drawn, row, alone, shape[1])


def test_sampled_rows_are_drafted_with_the_target_s_noise(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: noise of another position or level, by which drafts would be other tokens.  The rule is written out anew."""
    spec, temperatures = SpecConfig(4, 1, 5), (0.8, 0.0, 1.4)
    decoder, requests = running_decoder(zoo, "gemma", "assistant", spec, 4, 3, temperatures)
    drawn = draw(decoder, spec, 3, monkeypatch)
    for row, (request, temperature) in enumerate(zip(requests, temperatures, strict=True)):
        text = request.prompt_ids + request.output.token_ids
        alone = AloneAssistant.of(zoo, "gemma", "assistant", text)
        for path in drawn.paths[row]:
            logp_V = torch.tensor(list(alone.log_probs(path[:-1]).values()), dtype=torch.float64)
            at = torch.tensor([len(text) + len(path) - 1])
            noise_V = gumbel_noise(torch.tensor([request.sampling.seed]), at, 40)[0].double() if temperature else 0.0
            assert path[-1] == int((1.5 * logp_V + 1.2 * temperature * noise_V).argmax())


TEXTS = [  # target, drafter, shape, settings
    ("gemma", "assistant", (4, 1, 5), {"page_size": 1}),
    ("gemma", "assistant", (4, 4, 16), {"page_size": 4, "prefix_caching": True, "prefill_chunk": 5}),
    ("gemma", "assistant", ("auto", 2, 6), {"page_size": 4, "prefix_caching": True}),
    ("gemma-small", "assistant-ordered", (3, 3, 10), {"page_size": 4, "prefill_chunk": 5}),
    ("gemma-mixture", "assistant-small", ("auto", 1, 5), {"page_size": 16}),
]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "drafter", "shape", "settings"), TEXTS, ids=str)
def test_text_is_the_target_s(zoo: Zoo, target: str, drafter: str, shape: Any, settings: dict[str, Any]) -> None:
    decoder = zoo.decoder(target, drafter, SpecConfig(*shape), max_batch_size=3, **settings)
    driver = Driver(decoder)
    fill_with_nan(driver._workers.verifier.cache)
    if shape[0] == "auto":
        driver.script_levels(2, 0, 0, 3, 0, 1)
    prompts = ragged_prompts(40, 5)
    for _ in range(1 + settings.get("prefix_caching", False)):  # the second time cached pages are found
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=16))
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 16) for prompt in prompts]
    assert shape[1] == 1 or sum(out.stats.accepted for out in outputs) > 0
    sampled = SamplingParams(max_tokens=8, temperature=1.1, top_k=12, seed=3)
    fast, plain = (decoder.generate(prompts[3:], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


def test_it_has_nothing_to_catch_up_with(zoo: Zoo) -> None:
    """Keeps out: a draft after paused rounds that starts from a state of before them.  A round accepts as many drafts as one at
    the same place of a run without pauses.
    """
    drafts = []
    for levels in ((2, 2, 2, 2, 2, 2, 2), (2, 0, 0, 0, 2, 0, 2)):
        decoder = zoo.decoder("gemma", "assistant", SpecConfig("auto", 4, 9), max_batch_size=1, page_size=4)
        driver = Driver(decoder)
        driver.script_levels(*levels)
        (out,) = decoder.generate([[3, 1, 4, 1, 5]], SamplingParams(max_tokens=30))
        accepted, at, found = out.stats.accepted_per_round, 1, dict[int, int]()
        for count, asked in zip(accepted, (*levels, *[levels[-1]] * len(accepted)), strict=False):
            found |= {at: count} if asked else {}
            at += count + 1
        drafts.append(found)
    both = drafts[0].keys() & drafts[1].keys()
    assert len(both) > 5 and all(drafts[0][at] == drafts[1][at] for at in both) and any(drafts[0][at] for at in both)


@pytest.mark.slow_cases
@pytest.mark.parametrize("shape", [(3, 2, 6), (3, 1, 4)], ids=str)
def test_ranks_share_an_assistant(zoo: Zoo, shape: tuple[int, int, int]) -> None:
    """Keeps out: sums that are not added up, heads that read another rank's keys.  A full layer's one head is on both ranks."""
    prompts, spec = ragged_prompts(40, 4)[2:], SpecConfig(*shape)

    def use(decoder: SpecDecoder) -> list[tuple[list[int], list[int]]]:
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=12))
        return [(out.token_ids, out.stats.accepted_per_round) for out in outputs]

    settings: dict[str, Any] = {"page_size": 4, "max_batch_size": 2, "dtype": "float32"}
    shared = with_ranks(zoo.target("gemma"), zoo.head("gemma", "assistant"), spec, 2, use, **settings)
    assert shared == use(zoo.decoder("gemma", "assistant", spec, **settings))
    assert [ids for ids, _ in shared] == [zoo.greedy("gemma", prompt, 12) for prompt in prompts]


def test_it_is_joined_by_the_text_s_own_matches(zoo: Zoo) -> None:
    """Keeps out: a joined drafter that does not hand the target's keys on."""
    draft, prompts = [str(zoo.head("gemma", "assistant")), "suffix"], [[5, 6, 7, 8] * 4, [9, 3, 9, 3, 9, 3]]
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_seq_len": 96, "smoke": False, "page_size": 4}
    with SpecDecoder.from_pretrained(zoo.target("gemma"), draft, SpecConfig(3, 2, 6), **settings) as decoder:
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=20))
    assert [out.token_ids for out in outputs] == [zoo.greedy("gemma", prompt, 20) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["round", "step", False], ids=str)
@pytest.mark.parametrize("shape", [(4, 1, 5), (4, 4, 16)], ids=str)
@pytest.mark.parametrize(("target", "drafter"), [("gemma", "assistant"), ("gemma-small", "assistant-ordered")])
def test_captured_rounds(zoo: Zoo, target: str, drafter: str, shape: tuple[int, int, int], graphs: Any) -> None:
    """Keeps out: a replay with the lengths, the tables or the states of its capture: drafts are those of a CPU."""
    settings: dict[str, Any] = {"prefix_caching": True, "max_batch_size": 3, "page_size": 4}
    spec, prompts = SpecConfig(*shape), ragged_prompts(40, 6)
    decoder = zoo.decoder(target, drafter, spec, device="cuda", cuda_graphs=graphs, **settings)
    same = zoo.decoder(target, drafter, spec, **settings)
    for _ in range(2):
        outputs, on_cpu = (each.generate(prompts, SamplingParams(max_tokens=24)) for each in (decoder, same))
        assert [out.token_ids for out in outputs] == [zoo.greedy(target, prompt, 24) for prompt in prompts]
        found, wanted = (sum(out.stats.accepted for out in each) for each in (outputs, on_cpu))
        assert abs(found - wanted) <= 2  # near-ties of drafts
