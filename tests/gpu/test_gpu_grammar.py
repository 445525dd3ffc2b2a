"""Rows with a grammar on a GPU: captured phases and masks made on the host write what the CPU writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.models import save_eagle3, save_target
from toolkit.parallel.gpus import in_turn
from toolkit.parallel.many import GRAMMARS, WORDS

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.config import GraphMode
from specdec.grammar.wait import Thought, Wait
from specdec.shipped import draft_folder, prompts_file, target_folder
from specdec.steps import RunRound

pytestmark = pytest.mark.gpu

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
EACH: list[dict[str, Any]] = [
    dict(json_schema=SCHEMA),
    {},
    dict(json_schema=SCHEMA, temperature=0.9, seed=4, logprobs=2),
    dict(regex=r"[A-Z][a-z]{2,9}( [a-z]{1,9}){4}\."),
    dict(temperature=0.8, seed=5),
    dict(json_schema=SCHEMA, repetition_penalty=1.2, logit_bias={5: 2.0}),
    dict(grammar='start: ("yes" | "no") (", " ("yes" | "no"))~3', temperature=0.7, seed=6, top_p=0.9),
]


def load(device: str = "cuda", **settings: Any) -> SpecDecoder:
    merged = {"spec": SpecConfig(5, 4, 16), "dtype": "float32", "max_seq_len": 256, **settings}
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), device=device, **merged)


def prompts() -> list[str]:
    return [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[: len(EACH)]]


def params() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=36, **each) for each in EACH]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The ids of plain decoding on the CPU, each request alone in its batch."""
    decoder = load("cpu", max_batch_size=1)
    return [decoder.generate(text, one, speculate=False)[0].token_ids for text, one in zip(prompts(), params(), strict=True)]


@pytest.mark.parametrize("spec", [SpecConfig(5, 4, 16), SpecConfig(5, 1, 6), SpecConfig("auto", 4, 16)], ids=str)
@pytest.mark.parametrize("cuda_graphs", ["round", "step", False])
def test_float32_ids_equal_the_cpu_s(spec: SpecConfig, cuda_graphs: GraphMode, expected: list[list[int]]) -> None:
    """Keeps out: a warm-up that moves keys and values twice; masks of another round, copied too early or too late; phases that
    overwrite each other's memory; a row that takes the place, and the grammar, of another."""
    decoder = load(spec=spec, cuda_graphs=cuda_graphs, max_batch_size=4)
    for speculate in (True, True, False):
        outputs = decoder.generate(prompts(), params(), speculate=speculate)
        assert [out.token_ids for out in outputs] == expected
    for out, each in zip(outputs, EACH, strict=True):
        if "json_schema" in each:
            assert out.finish_reason == "eos" and json.loads(out.text).keys() == {"name", "n"}


@pytest.mark.parametrize("spec", [SpecConfig(5, 4, 16), SpecConfig(5, 1, 6), SpecConfig(7, 8, 32)], ids=str)
def test_graphs_read_completed_trees(spec: SpecConfig) -> None:
    """Keeps out: a completed tree that is written after a captured pass has read the drafted one, or where no graph reads it;
    drafts of a row without a grammar that are overwritten.  Fewer drafts are accepted then, and the text is the same."""
    accepted = {}
    for device, cuda_graphs in (("cpu", False), ("cuda", False), ("cuda", "step"), ("cuda", "round")):
        decoder = load(device, spec=spec, cuda_graphs=cuda_graphs, max_batch_size=4)
        for _ in range(2):  # the second time everything is replayed
            outputs = decoder.generate(prompts(), params())
        accepted[device, cuda_graphs] = [out.stats.accepted for out in outputs]
    eager = accepted["cuda", False]
    assert accepted["cuda", "step"] == eager == accepted["cuda", "round"]
    # A drafter's scores differ in their last bits between devices, so a tree may have another node here and there.
    assert abs(sum(eager) - sum(accepted["cpu", False])) <= 0.05 * sum(eager)


@pytest.mark.ranks(2)
def test_two_ranks_obey_the_first_one_s_grammars(tmp_path: Path) -> None:
    """Keeps out: a rank whose target reads the drafted tree, or chooses with the masks of another round."""
    target = save_target(tmp_path / "target", "bytes", eos_token_id=383)
    draft = save_eagle3(tmp_path / "head", target)

    def texts(ranks: int) -> list[list[int]]:
        settings: dict[str, Any] = {
            "device": "cuda",
            "dtype": "float32",
            "max_batch_size": 2,
            "max_seq_len": 80,
            "smoke": False,
        }
        with SpecDecoder.from_pretrained(target, draft, SpecConfig(3, 3, 8), tensor_parallel_size=ranks, **settings) as decoder:
            outputs = [
                out for speculate in (True, True, False) for out in decoder.generate(WORDS, GRAMMARS, speculate=speculate)
            ]
        assert sum(out.stats.accepted for out in outputs), "drafts that the grammar has proposed"
        return [out.token_ids for out in outputs]

    with in_turn():
        assert texts(2) == texts(1)


WAITS: list[tuple[Wait, dict[str, Any]]] = [
    (Wait(None, (". She",)), {}),
    (Wait(Thought("<think>", " the ", is_open=True)), {"temperature": 0.8, "seed": 3, "top_p": 0.95}),
    (Wait(None, ("<tool_call>",)), {}),
    (Wait(Thought("<think>", "</think>"), (" big",)), {"temperature": 0.7, "seed": 4}),
    (Wait(None, ("One", "Once"), at_start=True), {"min_tokens": 12}),
]


def waiting_texts(decoder: SpecDecoder, speculate: bool, masked: bool = False) -> list[list[int]]:
    """Those that wait, a free one, and one under a grammar from its start.  masked: whether the first get masks always."""
    requests = []
    for text, (wait, options) in zip(prompts(), WAITS, strict=False):
        held = SamplingParams(max_tokens=48, regex="[A-Z]+( [a-z]{2,5})*!", **options)
        ids = decoder.encode(text)
        requests.append(decoder.new_request(ids, held, speculate=speculate, wait=None if masked else wait))
        if masked:
            requests[-1].wait_for(wait, None)
    for text, given in zip(prompts()[-2:], ({}, {"json_schema": SCHEMA}), strict=True):
        requests.append(decoder.new_request(decoder.encode(text), SamplingParams(max_tokens=40, **given), speculate=speculate))
    return [out.token_ids for out in decoder.run(requests)]


@pytest.mark.parametrize("spec", [SpecConfig(5, 4, 16), SpecConfig(5, 1, 6), SpecConfig("auto", 4, 16)], ids=str)
@pytest.mark.parametrize("cuda_graphs", ["round", "step", False])
def test_texts_that_wait_for_their_grammars(spec: SpecConfig, cuda_graphs: GraphMode) -> None:
    """Rounds are captured, and read one launch late, until a text halts.  Keeps out: a captured round that goes on past a mark,
    a warm-up that leads a text on twice, a row that a graph takes for running though it has halted, and a rule for ends that
    a graph keeps."""
    expected = waiting_texts(load("cpu", max_batch_size=1), speculate=False, masked=True)
    decoder = load(spec=spec, cuda_graphs=cuda_graphs, max_batch_size=4)
    for speculate in (True, True, False):
        assert waiting_texts(decoder, speculate) == expected


def test_rounds_of_waiting_texts_are_whole_graphs() -> None:
    """Keeps out: a batch whose rounds run phase by phase because somebody may call a tool."""
    decoder = load(cuda_graphs="round", max_batch_size=1)
    text, held = decoder.encode(prompts()[0]), SamplingParams(max_tokens=64, regex="x+")

    def run() -> None:
        decoder.run([decoder.new_request(text, held, wait=Wait(None, ("<tool_call>",)))])

    run()
    driver = Driver(decoder)
    rounds, waits, captured = list[RunRound](), driver.waits, [driver.num_graphs("round"), driver.num_graphs("phase")]
    driver.watch(lambda step: rounds.append(step) if isinstance(step, RunRound) else None)
    run()
    assert rounds and not any(step.needs.grammar for step in rounds)
    assert captured == [driver.num_graphs("round"), driver.num_graphs("phase")] == [1, 0]
    # The engine reads a round's tokens, and the text takes its own copy of them without a wait, once that has come; a few are
    # the prompt's.
    assert driver.waits - waits <= len(rounds) + 4
