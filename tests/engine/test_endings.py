"""EOS, stop ids, stop strings and max_tokens at every offset of an accepted run: the output ends exactly there.

An oracle drafter makes every round S + 1 tokens long; then one of its tokens is declared to be the end.
Keeps out: tokens after an EOS inside an accepted path, counters and texts that include them, and wrong finish reasons.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from toolkit.drafters import Substitute
from toolkit.driver import Driver, Request, new_request
from toolkit.models import Zoo, save_target

from specdec import SamplingParams, SpecConfig, SpecDecoder

S = 4
PROMPT = [5, 17, 300]
BASE = dict(temperature=1.5, seed=3)  # so hot that no token comes twice
POSITIONS = range(0, 2 * (S + 1) + 1)  # the first token, then every offset of two rounds


class Ending(NamedTuple):
    """What a request is declared to end at, and what it must say."""

    eos: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    max_tokens: int = 30
    reason: str = "length"
    text: str = ""


@pytest.fixture(scope="module", params=[(S, 1, S + 1), (S, 3, 14)], ids=["chain", "tree"])
def oracle(zoo: Zoo, request: pytest.FixtureRequest) -> tuple[SpecDecoder, list[int]]:
    """A decoder whose drafter knows the text, and the text: 40 different tokens."""
    spec = SpecConfig(*request.param)
    decoder = zoo.decoder("words", "eagle3", spec)
    (plain,) = decoder.generate([PROMPT], SamplingParams(max_tokens=40, **BASE), speculate=False)
    assert len(set(plain.token_ids[: POSITIONS[-1] + 1])) == len(POSITIONS)
    driver = Driver(decoder)
    driver.replace_drafter(Substitute(driver, spec, "oracle", 512, {tuple(PROMPT): plain.token_ids}))
    return decoder, plain.token_ids


def endings(decoder: SpecDecoder, ids: list[int], at: int) -> list[Ending]:
    """All ways to end at token number `at`; its text is shown only where max_tokens ends it."""
    word = [decoder.tokenizer.decode([token]) for token in ids]
    before, after = "".join(word[:at]), ids[at + 1]
    found = [
        Ending(eos=[ids[at]], reason="eos", text=before),
        Ending(eos=[ids[at], after], max_tokens=at + 1, reason="eos", text=before),
        Ending(eos=[ids[at]], stop_ids=[ids[at]], reason="eos", text=before),
        Ending(stop_ids=[ids[at]], reason="stop", text=before),
        Ending(stop_ids=[after, ids[at]], max_tokens=at + 2, reason="stop", text=before),
        Ending(stop=[word[at]], reason="stop", text=before),
        Ending(stop=[word[at + 1], word[at][:2]], reason="stop", text=before),
        Ending(stop=[word[at][1:]], max_tokens=at + 1, reason="stop", text=before + word[at][0]),
        Ending(max_tokens=at + 1, text=before + word[at]),
        Ending(eos=[after], stop=[word[at + 1]], max_tokens=at + 1, text=before + word[at]),
    ]
    if at:
        crossing = word[at - 1][1:] + word[at][:1]
        found.append(Ending(stop=[crossing], eos=[after], reason="stop", text=before[:-2]))
        whole = word[at - 1] + word[at]
        found.append(Ending(stop=[whole, word[at]], reason="stop", text=before[:-3]))
    return found


def run(decoder: SpecDecoder, ending: Ending, streaming: bool) -> tuple[Request, str, list[int]]:
    """The request, and what its chunks joined are."""
    sampling = SamplingParams(
        max_tokens=ending.max_tokens, stop=list(ending.stop) or None, stop_token_ids=list(ending.stop_ids) or None, **BASE
    )
    driver = Driver(decoder)
    request = driver.add(new_request(PROMPT, sampling, eos=ending.eos, decode=decoder.tokenizer.decode, streaming=streaming))
    text, ids = "", []
    while not request.is_done:
        driver.step()
        chunk = request.next_chunk()
        text, ids = text + chunk.text, ids + chunk.token_ids
        assert not any(stop in text for stop in ending.stop)
    return request, text, ids


@pytest.mark.slow_cases
@pytest.mark.parametrize("at", POSITIONS)
def test_the_output_ends_exactly_there(oracle: tuple[SpecDecoder, list[int]], at: int) -> None:
    """And the counters know what was cut off: every round emitted S + 1 tokens."""
    decoder, ids = oracle
    for ending in endings(decoder, ids, at):
        for streaming in (False, True):
            request, text, streamed = run(decoder, ending, streaming)
            out = request.result()  # asserts the counters' identity
            assert (out.token_ids, out.text, out.finish_reason) == (ids[: at + 1], ending.text, ending.reason), ending
            assert streamed == out.token_ids
            assert out.origins == [0, *([*range(1, S + 1), 0] * out.stats.rounds)][: at + 1]
            assert text == out.text or not streaming
            assert out.stats.rounds == -(-at // (S + 1)) and out.stats.accepted == S * out.stats.rounds
            assert out.stats.truncated == (S + 1) * out.stats.rounds - at
    Driver(decoder).assert_nothing_leaked()


def test_ends_only_count_where_they_are(oracle: tuple[SpecDecoder, list[int]]) -> None:
    """Keeps out: an end looked for in the prompt, in ids that were not emitted, or in spite of ignore_eos."""
    decoder, ids = oracle
    absent = next(token for token in range(512) if token not in ids)
    for ending in (Ending(eos=PROMPT), Ending(stop_ids=[absent]), Ending(stop=[decoder.tokenizer.decode([absent])])):
        request, _, _ = run(decoder, ending, True)
        assert request.result().token_ids == ids[:30] and request.result().finish_reason == "length"
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **BASE)
    driver = Driver(decoder)
    request = driver.add(new_request(PROMPT, sampling, eos=ids[:9], decode=decoder.tokenizer.decode))
    driver.run_until_idle()
    assert request.result().token_ids == ids[:12]


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_eos_comes_from_the_models_own_files(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """Keeps out: an EOS of config.json or generation_config.json that is not obeyed; transformers stops there too."""
    folder = save_target(tmp_path / "model", "words")
    plain = zoo.greedy("words", PROMPT, 24)
    at = next(i for i in range(5, 24) if plain[i] not in plain[:i])
    data = json.loads((folder / name).read_text())
    eos = plain[at] if name == "config.json" else [510, plain[at]]
    (folder / name).write_text(json.dumps({**data, "eos_token_id": eos}))
    decoder = SpecDecoder.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=64)
    (out,) = decoder.generate(PROMPT, SamplingParams(max_tokens=24))
    assert out.token_ids == plain[: at + 1] and out.finish_reason == "eos"
    (out,) = decoder.generate(PROMPT, SamplingParams(max_tokens=24, ignore_eos=True))
    assert out.token_ids == plain and out.finish_reason == "length"


def test_nothing_ends_the_text_before_the_least_tokens(oracle: tuple[SpecDecoder, list[int]]) -> None:
    """Keeps out: a stop string that ends a text too early, one that counts although it was over by then, and one overlooked."""
    decoder, ids = oracle
    for stop_at, least, length in ((3, 6, len(POSITIONS)), (5, 6, 6), (5, 5, 6), (8, 6, 9)):
        stop = decoder.tokenizer.decode([ids[stop_at]])
        sampling = SamplingParams(max_tokens=len(POSITIONS), stop=stop, min_tokens=least, **BASE)
        request = Driver(decoder).add(new_request(PROMPT, sampling, decode=decoder.tokenizer.decode))
        Driver(decoder).run_until_idle()
        assert len(request.result().token_ids) == length, (stop_at, least)
