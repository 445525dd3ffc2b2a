"""SpecConfig("auto") with several sources in an engine: pauses and shapes of every kind leave the text the target's."""

from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.heads.block_zoo import HEADS
from toolkit.models import Zoo, ragged_prompts
from toolkit.parallel.decoders import with_ranks

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.options import EngineOptions

BLOCK_HEADS = sorted(HEADS)  # whose names the zoo knows once they are imported
WITH = {"device": "cpu", "dtype": "float32", "max_seq_len": 160, "smoke": False, "max_batch_size": 3, "page_size": 4}


def auto(zoo: Zoo, target: str, draft: list[str], topk: int = 2, **settings: Any) -> SpecDecoder:
    named = [str(zoo.head(target, draft[0])) if draft[0] not in ("mtp", "ngram") else draft[0], *draft[1:]]
    return SpecDecoder.from_pretrained(zoo.target(target), named, SpecConfig("auto", topk, 10), **{**WITH, **settings})


def scripted(decoder: SpecDecoder, *indices: int) -> Driver:
    """Rounds of these shapes in turn; -1 is a round of no levels."""
    driver, shapes = Driver(decoder), Driver(decoder).speculation.shapes
    driver.script_shapes(*[None if index < 0 else shapes[index % len(shapes)] for index in indices])
    return driver


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("target", "draft", "settings"),
    [
        ("llama", ["eagle3", "suffix"], {"prefix_caching": True}),
        ("mistral", ["eagle3", "suffix", "answers"], {}),  # every layer has a window: the text lies in a ring of pages
        ("llama", ["eagle1", "suffix", "answers"], {"prefix_caching": False}),
        ("qwen3", ["p-eagle-window", "suffix"], {}),
    ],
    ids=str,
)
def test_text_is_the_target_s(zoo: Zoo, target: str, draft: list[str], settings: dict[str, Any]) -> None:
    """Keeps out: a pause in which a source's state stands still, a shape deeper than the look-ahead, a first choice that is
    longer than the drafter's levels."""
    decoder = auto(zoo, target, draft, **settings)
    assert decoder.settings.spec == SpecConfig("auto", 2, 10, 9)
    prompts, every = ragged_prompts(40, 5), range(len(Driver(decoder).speculation.shapes))
    predicted = SamplingParams(max_tokens=20, prediction=zoo.greedy(target, prompts[1], 24)[4:])
    for turn in range(2):  # the second time cached pages and answers are found
        driver = scripted(decoder, *[index for some in every for index in (some, -1, -1, some + turn)])
        params = [predicted if index == 1 else SamplingParams(max_tokens=24) for index in range(len(prompts))]
        outputs = decoder.generate(prompts, params)
        want = [zoo.greedy(target, prompt, 24)[: p.max_tokens] for prompt, p in zip(prompts, params, strict=True)]
        assert [out.token_ids for out in outputs] == want
        for out in outputs:
            out.stats.check_identity(len(out.token_ids))
    sampled = SamplingParams(max_tokens=14, temperature=1.1, seed=3)
    scripted(decoder, *every)
    fast, plain = (decoder.generate(prompts[:2], sampled, speculate=on) for on in (True, False))
    assert [out.token_ids for out in fast] == [out.token_ids for out in plain]
    driver.assert_nothing_leaked()


def test_a_prediction_goes_on_through_a_pause(zoo: Zoo) -> None:
    """Keeps out: a place in the prediction that stands still while nobody drafts, and matches that end where a pause began."""
    text = zoo.greedy("llama", [5, 9, 2, 7], 90)
    decoder = auto(zoo, "llama", ["eagle3", "suffix"], topk=1)
    roomy = len(Driver(decoder).speculation.shapes) - 1
    for levels in ([roomy, *[-1] * 9, roomy], [roomy, roomy, -1]):
        driver = scripted(decoder, *levels)
        (paused,) = decoder.generate([5, 9, 2, 7], SamplingParams(max_tokens=90, prediction=text))
        assert paused.token_ids == text
    assert int(driver.drafter.finders[1].rows.at_R[0]) == 90
    scripted(decoder, roomy, *[-1] * 9, roomy)
    (paused,) = decoder.generate([5, 9, 2, 7], SamplingParams(max_tokens=90, prediction=text))
    accepted = paused.stats.accepted_per_round
    assert accepted[1:10] == [0] * 9 and min(accepted[10:-1]) > 5 and max(accepted[10:]) == 9, "the prediction is the text"


def test_the_chooser_learns_from_sources(zoo: Zoo) -> None:
    """On a text that a prediction knows.  Keeps out: rounds whose sources the host does not hand on."""
    decoder = auto(zoo, "llama", ["eagle3", "suffix"])
    speculation = Driver(decoder).speculation
    controller: Any = speculation.controller
    controller.choose = lambda *asked: speculation.shapes[-1] if len(controller.books) else None
    text = zoo.greedy("llama", [5, 9, 2, 7], 120)
    (out,) = decoder.generate([5, 9, 2, 7], SamplingParams(max_tokens=120, prediction=text))
    assert out.token_ids == text
    controller._learn()
    assert controller.of_predicted.matches.reached[0] > 5 and controller.of_predicted.matches.rates(1)[0] > 0.6
    assert not controller.acceptance.matches.reached[0]


@pytest.mark.slow_cases(keep=0)
def test_ranks_run_the_same_shapes(zoo: Zoo) -> None:
    """Keeps out: rates that a pause leaves unlike on ranks."""
    prompts, draft = ragged_prompts(40, 3), [str(zoo.head("llama", "eagle3")), "suffix"]

    def use(decoder: SpecDecoder) -> list[list[int]]:
        scripted(decoder, 0, -1, 3, -1, -1, 9, 5)
        return [out.token_ids for out in decoder.generate(prompts, SamplingParams(max_tokens=20))]

    found = with_ranks(
        zoo.target("llama"), draft, SpecConfig("auto", 2, 10), 2, use, page_size=4, max_batch_size=2, dtype="float32"
    )
    assert found == [zoo.greedy("llama", prompt, 20) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["eagle3", "dflash-pruned"])
def test_captured_rounds_of_all_shapes(zoo: Zoo, head: str) -> None:
    """Keeps out: a shape that is tried with another one's paths, and what trials leave in survival's counts."""
    decoder = auto(zoo, "llama", [head, "suffix"], device="cuda", cuda_graphs="round", prefix_caching=True)
    prompts = ragged_prompts(40, 6)
    for turn in range(3):
        if turn == 1:
            Driver(decoder).make_ready()
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=40))
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 40) for prompt in prompts]
    assert EngineOptions().cuda_graphs == "round" and Driver(decoder).num_graphs("round") > 4
