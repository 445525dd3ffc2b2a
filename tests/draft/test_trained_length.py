"""What happens in texts longer than a head was trained on: nothing, a window, or plain decoding from there on."""

import warnings
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig
from specdec.attention.kinds import LayerKind
from specdec.loading.about.drafters import drafter_line

LENGTH = 64  # what the zoo's heads say


def text_of(zoo: Zoo, tokens: int) -> list[int]:
    return (ragged_prompts(40, 1)[0] * tokens)[:tokens]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("spec", [SpecConfig(3, 1, 4), SpecConfig(2, 2, 5), SpecConfig("auto", 2, 5)], ids=lambda s: s.label)
@pytest.mark.parametrize("caching", [False, True])
def test_stopped_rows_decode_plainly_beside_others(zoo: Zoo, spec: SpecConfig, caching: bool) -> None:
    """Keeps out: rounds that go on drafting, counters of a round that was launched before the stop, pages without the drafter's
    keys that a later prompt takes for drafted ones, tokens kept for a drafter that never catches up."""
    settings: dict[str, Any] = {"prefix_caching": caching, "page_size": 4, "max_batch_size": 3, "max_seq_len": 160}
    decoder = zoo.decoder("llama", "eagle3", spec, beyond_trained="stop", **settings)
    driver = Driver(decoder)
    driver.set_depth(1)
    if spec.is_auto:
        driver.script_levels(2, 0, 0, 1, 0, 0, 0, 2, 0, 0, 1, 0, 0)
    prompts = [text_of(zoo, tokens) for tokens in (10, 60, 70, 30, 63)]
    for _ in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=40))
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 40) for prompt in prompts]
        for prompt, out in zip(prompts, outputs, strict=True):
            assert len(prompt) >= LENGTH - 1 or spec.is_auto or out.stats.drafted > 0
            rounds = max(0, LENGTH + 1 - len(prompt))  # one launch may be on its way when the length is reached
            assert out.stats.drafted <= rounds * (spec.num_draft_tokens - 1) and (rounds or out.stats.accepted == 0)
        driver.assert_nothing_leaked()


def test_a_window_of_that_length(zoo: Zoo) -> None:
    """Keeps out: a policy that is named and does nothing."""
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(3, 2, 6), beyond_trained="window", max_seq_len=160, page_size=4)
    assert decoder.head is not None and decoder.head.config.model.layer_kinds == (LayerKind(window=LENGTH),)
    prompt = text_of(zoo, 90)
    (out,) = decoder.generate([prompt], SamplingParams(max_tokens=30))
    assert out.token_ids == zoo.greedy("llama", prompt, 30)
    assert "it reads the last 64 tokens alone (beyond_trained='window')" in drafter_line(decoder.head, decoder.settings)


def test_going_on_is_said_once_and_only_where_texts_are_longer(zoo: Zoo) -> None:
    """Keeps out: a head that drafts worse and worse in long texts, and a user who wonders why."""
    with pytest.warns(UserWarning, match=r"texts may have 160 tokens, and the head was trained on 64: it goes on there"):
        zoo.decoder("llama", "eagle3", SpecConfig(2, 1, 3), max_seq_len=160, smoke=True)
    for more in (dict(max_seq_len=64), dict(max_seq_len=160, beyond_trained="stop"), dict(max_seq_len=160, smoke=False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zoo.decoder("llama", "eagle3", SpecConfig(2, 1, 3), **{"smoke": True, **more})


def test_options_that_would_do_nothing(zoo: Zoo) -> None:
    cases: list[tuple[str | None, dict[str, Any]]] = [
        (None, {"beyond_trained": "stop"}), ("ngram", {"draft_format": "modelopt"}), (None, {"draft_pickle": True}),
    ]  # fmt: skip
    for draft, options in cases:
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}=.* would do nothing with draft={draft!r}; nearest setting .*: {name}="):
            zoo.decoder("llama", draft, None if draft is None else SpecConfig(3, 1, 4), **options)
