"""Texts that wait for their grammars run in rounds without masks until they halt, and are those of rounds with masks alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import toolkit.recurrent.targets  # noqa: F401  (the zoo has its targets by name)
from toolkit.checkpoints.grammars import letters_json
from toolkit.driver import Driver
from toolkit.heads.block_zoo import HEADS  # noqa: F401  makes heads of one pass known to the Zoo
from toolkit.inside.warm_ups import Replays, WarmUps
from toolkit.models import Zoo
from toolkit.mtp_layers.targets import MtpZoo

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.request import Request
from specdec.grammar.library import Grammars
from specdec.grammar.wait import Thought, Wait
from specdec.steps import RunRound

V, EOS = 40, 39  # of the small targets
PAIRS = ("ab", "bc", "ca", "hk", "k0", "0a")  # tokens that write the end of one mark and go on, or the beginnings of others
HELD = SamplingParams(max_tokens=16, regex="([a-f]{1,9}[0-2]|gh(ij)+k){1,9}", stop_token_ids=[EOS])
KINDS = [  # target, drafter, shape
    ("llama", "eagle3", (4, 3, 12)),
    ("llama", "eagle3+suffix", (3, 3, 9)),
    ("qwen3_5_text", "eagle3", (3, 2, 6)),
    ("llama", "eagle3", (4, 1, 5)),
    ("llama", "ngram", (3, 3, 10)),
    ("llama", "p-eagle", (4, 1, 5)),
    ("llama", "dflash2", (4, 3, 14)),
    ("llama", "eagle3", ("auto", 3, 8)),
    ("mimo", "mtp", (3, 2, 8)),
]


class Asked(NamedTuple):
    """A request.  wait: None: its grammar holds from the first token on, if it has one."""

    prompt: list[int]
    params: SamplingParams
    wait: Wait | None = None


def load(zoo: Zoo, root: Path, target: str, draft: str | None, spec: Any, **settings: Any) -> SpecDecoder:
    merged: dict[str, Any] = {"max_batch_size": 3, "page_size": 4, **settings}
    if target == "mimo":
        decoder = MtpZoo(root).decoder(target, draft, SpecConfig(*spec), **merged)
    else:
        decoder = zoo.decoder(target, draft, SpecConfig(*spec), **merged)
    Driver(decoder).use_grammars(Grammars(lambda: letters_json(V, PAIRS), V, [EOS]))
    return decoder


def request_of(decoder: SpecDecoder, asked: Asked, speculate: bool = True, masked: bool = False) -> Request:
    """masked: whether all its rounds have masks, as if the device could not follow the text."""
    request = decoder.new_request(asked.prompt, asked.params, speculate=speculate, wait=None if masked else asked.wait)
    if masked and asked.wait is not None:
        request.wait_for(asked.wait, None)
    return request


def texts_of(decoder: SpecDecoder, each: Sequence[Asked], **how: bool) -> list[list[int]]:
    return [out.token_ids for out in decoder.run([request_of(decoder, asked, **how) for asked in each])]


def spelled(tokens: Sequence[int]) -> str:
    singles = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEF"[: V - 1 - len(PAIRS)]
    return "".join([*singles, *PAIRS, "</s>"][token] for token in tokens)


def requests(decoder: SpecDecoder, seed: int) -> list[Asked]:
    """Free rows, rows under a grammar, and rows that wait for what they will write somewhere, or for what never comes."""
    draw, found = random.Random(seed), list[Asked]()
    prompts = [[draw.randrange(V - 1) for _ in range(draw.randrange(3, 9))] for _ in range(6)]
    sampled: list[dict[str, Any]] = [
        {} if number % 2 else {"temperature": 1.0, "seed": number, "top_p": 0.95} for number in range(6)
    ]
    free = decoder.generate(prompts, [SamplingParams(max_tokens=16, **each) for each in sampled], speculate=False)
    for number, (prompt, out) in enumerate(zip(prompts, free, strict=True)):
        params, text = replace(HELD, **sampled[number]), spelled(out.token_ids)
        begin = draw.choice([0, 1, draw.randrange(12), draw.randrange(12), len(text) - 1])
        mark = text[begin : begin + draw.randrange(1, 4)] or "zzz"
        waits = [
            Wait(None, (mark, "zzz")),
            Wait(Thought("yyy", mark, is_open=True)),
            Wait(Thought(text[:1], mark)),
            Wait(Thought("yyy", mark, is_open=True), (text[-2:],)),
            Wait(None, ("zzz",)),
            Wait(None, (mark, text[:2]), at_start=draw.random() < 0.5),
        ]
        found.append(Asked(prompt, params, waits[number]))
    found.insert(draw.randrange(6), Asked([3, 1, 4], HELD))
    found.insert(draw.randrange(6), Asked([2, 7], replace(HELD, regex=None, min_tokens=5, max_tokens=12)))
    return found


@pytest.mark.slow_cases
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("target", "draft", "shape"), KINDS, ids=str)
def test_texts_are_those_of_rounds_with_masks(zoo: Zoo, tmp_path: Path, target: str, draft: str, shape: Any, seed: int) -> None:
    """Greedy and sampled, on three rows, so that rows move; read at once, and one launch late, when a row that has halted is
    in one more round.  Keeps out: tokens after a mark that were chosen freely; an end within a thought; a draft, a state or a
    pause that a halted row takes from a round in which it was padding; a text that goes on from another row's place."""
    decoder = load(zoo, tmp_path, target, draft, shape)
    driver, each = Driver(decoder), requests(decoder, seed)
    expected = texts_of(decoder, each, speculate=False, masked=True)
    for depth in (1, 0):
        driver.set_depth(depth)
        assert texts_of(decoder, each) == expected, depth
        assert texts_of(decoder, each, speculate=False) == expected, depth
    driver.assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize("whole", [True, False], ids=["whole rounds", "phases"])
@pytest.mark.parametrize(("target", "draft", "shape"), [each for each in KINDS if "auto" not in each[2]], ids=str)
def test_captures_and_replays_change_nothing(
    zoo: Zoo, tmp_path: Path, target: str, draft: str, shape: Any, whole: bool
) -> None:
    """Keeps out: a warm-up that leads a text on, or the place that it follows; a graph that rounds of other needs share, or
    that reads what only its own capture has made.  All of it would show on GPUs alone."""
    found, replays, each = [], Replays(), list[Asked]()
    for graphs in (None, WarmUps([]), replays):
        decoder = load(zoo, tmp_path, target, draft, shape)
        driver, each = Driver(decoder), each or requests(decoder, seed=1)
        waiting = [asked for asked in each if asked.wait is not None]
        if graphs is not None:
            driver.use_graphs(graphs, whole)
        driver.set_depth(1)
        outs = [out for some in (each, waiting) for out in decoder.run([request_of(decoder, asked) for asked in some])]
        found.append([(out.token_ids, out.stats.accepted_per_round) for out in outs])
    assert found[0] == found[1] == found[2]
    assert replays.replays["round" if whole else "verify"] and replays.replays["accept"], "without masks, and with them"


def test_rounds_have_no_masks_until_a_text_halts(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a batch that runs phase by phase because somebody may call a tool; masks that come too late, or for ever."""
    decoder, rounds = load(zoo, tmp_path, "llama", "eagle3", (4, 3, 12)), list[RunRound]()
    driver, prompt = Driver(decoder), [3, 1, 4, 1, 5]
    driver.watch(lambda step: rounds.append(step) if isinstance(step, RunRound) else None)
    (whole,) = decoder.generate(prompt, SamplingParams(max_tokens=HELD.max_tokens))
    plain = list(rounds)
    rounds.clear()
    never = Asked(prompt, HELD, Wait(None, ("zzzz",)))
    assert texts_of(decoder, [never]) == [whole.token_ids]
    assert [step.spec for step in rounds] == [step.spec for step in plain], "full drafts, as of a text that waits for nothing"
    assert not any(step.needs.grammar for step in rounds) and all(step.needs.waits for step in rounds)
    mark = spelled(whole.token_ids[8:10])
    for depth in (0, 1):
        driver.set_depth(depth)
        rounds.clear()
        (out,) = decoder.run([request_of(decoder, Asked(prompt, HELD, Wait(None, (mark,))))])
        masked = [step.needs.grammar for step in rounds]
        assert masked == sorted(masked) and masked[0] is False and masked[-1] is True
        assert out.stats.rounds == len(rounds) - depth, "the row that has halted takes no part in the round that was on its way"
        assert out.stats.drafted == 11 * out.stats.rounds


def test_a_mark_may_come_first_or_last(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a row that waits for ever because its first token was the mark; a text that goes on after max_tokens."""
    decoder = load(zoo, tmp_path, "llama", "eagle3", (4, 3, 12))
    driver, prompt = Driver(decoder), [3, 1, 4, 1, 5]
    (whole,) = decoder.generate(prompt, SamplingParams(max_tokens=7))
    each = [
        Asked(prompt, replace(HELD, max_tokens=length), Wait(None, (spelled(whole.token_ids[place : place + 1]),)))
        for place in (0, 6)
        for length in (1, place + 1, place + 2, 9)
    ]
    expected = texts_of(decoder, each, speculate=False, masked=True)
    for depth in (0, 1):
        driver.set_depth(depth)
        assert texts_of(decoder, each) == texts_of(decoder, each, speculate=False) == expected
    driver.assert_nothing_leaked()


def test_what_else_rows_ask_for_stays_the_same(zoo: Zoo, tmp_path: Path) -> None:
    """Log-probabilities, penalties, ends that are banned early, rows that step back, a prefix cache.  Keeps out: numbers of
    tokens after the place where a path was cut; a rule for ends that stays when the grammar holds."""
    decoder = load(zoo, tmp_path, "llama", "eagle3", (3, 3, 9), max_batch_size=2)
    driver, draw = Driver(decoder), random.Random(1)
    prompts = [[draw.randrange(V - 1) for _ in range(14)] for _ in range(4)]
    more: list[dict[str, Any]] = [
        dict(logprobs=2, logprobs_mode="processed"),
        dict(min_tokens=9, repetition_penalty=1.3),
        dict(temperature=1.0, seed=5, logprobs=1, min_tokens=12),
        dict(temperature=0.9, seed=6, top_k=5, bad_words=[[1], [2, 3]]),
    ]
    each = []
    free = decoder.generate(prompts, [SamplingParams(max_tokens=20, **options) for options in more])
    for number, (prompt, options, out) in enumerate(zip(prompts, more, free, strict=True)):
        text = spelled(out.token_ids)
        wait = Wait(Thought("yyy", text[6:8], is_open=True)) if number % 2 else Wait(None, (text[6:7],))
        each.append(Asked(prompt, replace(HELD, max_tokens=30, **options), wait))
    expected = decoder.run([request_of(decoder, asked, speculate=False, masked=True) for asked in each])
    for depth in (0, 1):
        driver.set_depth(depth)
        with driver.stepping_back(random.Random(depth), 0.1):
            outputs = decoder.run([request_of(decoder, asked) for asked in each])
        for out, want in zip(outputs, expected, strict=True):
            assert out.token_ids == want.token_ids
            for got, other in zip(out.logprobs or (), want.logprobs or (), strict=True):
                assert got.token == other.token and got.top.keys() == other.top.keys()
                assert got.logprob == pytest.approx(other.logprob, abs=1e-4)
    driver.assert_nothing_leaked()
