"""Whole decoders on several ranks: the first one's scheduler decides, and all ranks run its steps, each with its share."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from toolkit.deepseek import DeepseekZoo
from toolkit.models import Zoo, ragged_prompts, save_eagle3, save_target
from toolkit.parallel.decoders import with_ranks
from toolkit.paths import ROOT

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.grammar import library
from specdec.grammar.matcher import GrammarState, LimitError, Matcher

TREE, CHAIN = SpecConfig(num_steps=3, topk=3, num_draft_tokens=8), SpecConfig(num_steps=3, topk=1, num_draft_tokens=4)
SAMPLINGS = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=14, temperature=0.9, seed=3),
    SamplingParams(max_tokens=14, temperature=0.8, top_k=7, top_p=0.9, seed=4),
    SamplingParams(
        max_tokens=14, temperature=0.9, min_p=0.02, seed=5, logit_bias={1: 2.0, 39: -9.0}, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, bad_words=[[3], [38], [0, 1], [30, 31, 32]], min_tokens=4, logprobs=3,
        logprobs_mode="processed",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def zoos(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Zoo], Zoo]:
    return {zoo: zoo(tmp_path_factory.mktemp("zoo")) for zoo in (Zoo, DeepseekZoo)}


def generated(target: Path, draft: Path, spec: SpecConfig, size: int, **settings: Any) -> list[list[int]]:
    """What `size` ranks write together, greedily and sampled."""
    prompts = ragged_prompts(40, len(SAMPLINGS), seed=5)

    def ids(decoder: SpecDecoder) -> list[list[int]]:
        return [out.token_ids for out in decoder.generate(prompts, SAMPLINGS)]

    return with_ranks(target, draft, spec, size, ids, **settings)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("zoo", "name", "kind", "spec", "size"), [
    (Zoo, "qwen3", "eagle3", TREE, 4), (Zoo, "llama3-tied-dim8", "eagle1", CHAIN, 2), (DeepseekZoo, "v3", "eagle3", TREE, 2),
])  # fmt: skip
def test_ranks_write_what_one_writes(
    zoo: type[Zoo], name: str, kind: str, spec: SpecConfig, size: int, zoos: dict[type[Zoo], Zoo]
) -> None:
    """Every family and shape on every number of ranks: scripts/many_ranks.

    Keeps out: a token that only one rank chooses; noise of a rank's own ids; a draft of a part of the head."""
    target, draft = zoos[zoo].target(name), zoos[zoo].head(name, kind)
    assert generated(target, draft, spec, size) == generated(target, draft, spec, 1)


def test_the_script_of_many_ranks_finds_what_it_names() -> None:
    """Keeps out: names that have moved since the script ran last, which takes too long for every change."""
    assert callable(runpy.run_path(str(ROOT / "scripts/many_ranks"), run_name="many_ranks")["main"])


def test_all_ranks_obey_the_same_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library fails at drafts of the first rank alone, which has also forgotten what it compiled.  Keeps out: a mask that
    begins at a rank's first id, trees of one rank that others do not read, and ranks that end drafts at different places."""
    target = save_target(tmp_path / "target", "bytes", eos_token_id=383)
    draft = save_eagle3(tmp_path / "head", target)
    rules: list[dict[str, Any]] = [
        dict(regex="[a-z]{2,4}( [0-9]{1,3}é)*"), {}, dict(grammar='start: ("ab" | "cd")+ "."', temperature=1.0, seed=3)
    ]  # fmt: skip
    params = [SamplingParams(max_tokens=12, **rule) for rule in rules]

    def texts(decoder: SpecDecoder) -> list[tuple[list[int], str, int]]:
        outputs = decoder.generate(["one", "two", "three"], params)
        return [(out.token_ids, out.text, out.stats.accepted) for out in outputs]

    alone, together = (with_ranks(target, draft, TREE, size, texts, max_batch_size=2) for size in (1, 2))

    assert together == alone
    plain = with_ranks(target, None, TREE, 2, texts, max_batch_size=2)
    assert [out[:2] for out in plain] == [out[:2] for out in alone], "without a drafter there are no drafts to end"
    assert re.match("[a-z]{2,4}( [0-9]{0,3}|$)", alone[0][1]) and re.match("(ab|cd)+", alone[2][1])
    go, calls = Matcher.go, iter(range(10**9))

    def fails(matcher: Matcher, state: GrammarState) -> None:
        if state.depth and next(calls) % 20 == 9:
            raise LimitError
        go(matcher, state)

    monkeypatch.setattr(library, "MAX_KEPT", 1)
    monkeypatch.setattr(Matcher, "go", fails)
    limited = with_ranks(target, draft, TREE, 2, texts, max_batch_size=2)
    assert [out[:2] for out in limited] == [out[:2] for out in alone]
    assert sum(out[2] for out in limited) < sum(out[2] for out in alone), "drafts have ended"
