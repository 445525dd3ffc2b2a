"""The start on a GPU: passes that are rehearsed so that their kernels are compiled side by side."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from toolkit.driver import Driver

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.bench.cell import measure_cell
from specdec.loading import build
from specdec.ops.compiling import rehearsal
from specdec.session import Session
from specdec.shipped import draft_folder, target_folder
from specdec.steps import Needs

pytestmark = pytest.mark.gpu

PROMPT = "Once upon a time there was a little girl who"
SAMPLED = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9, seed=3)


def load(spec: SpecConfig | None = None, **settings: object) -> SpecDecoder:
    merged = {"dtype": "bfloat16", "max_seq_len": 256, "device": "cuda", "smoke": False, **settings}
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), spec or SpecConfig(5, 4, 16), **merged)  # type: ignore[arg-type]


def test_a_rehearsal_writes_nothing() -> None:
    """Keeps out: a launch or an operation of torch that a rehearsal lets through."""
    with load() as decoder:
        decoder.generate(PROMPT, SamplingParams(max_tokens=8))  # everything is compiled, so that a launch would go through
        changed = Driver(decoder).rehearse(list(range(20)), Needs.of("sampled"), SpecConfig(5, 4, 16), rows=2)
    assert not changed


def test_whole_passes_are_rehearsed() -> None:
    """Keeps out: a rehearsal that ends early, so that most kernels are compiled one after the other again."""
    failures: list[BaseException] = []
    rehearse = rehearsal.Rehearsals.rehearse

    def watched(self: rehearsal.Rehearsals, run: Callable[[], object]) -> Callable[[], None]:
        def noted() -> None:
            try:
                run()
            except BaseException as error:  # of any kind: the test ends with it, since a rehearsal would drop it
                failures.append(error)
                raise

        return rehearse(self, noted)

    with patch.object(rehearsal.Rehearsals, "rehearse", watched):
        for spec in (SpecConfig(5, 4, 16), SpecConfig(3, 1)):
            with load(spec) as decoder:
                decoder.generate([PROMPT] * 2, SAMPLED)
    assert not failures


@pytest.mark.parametrize(
    ("spec", "sampling"),
    [(SpecConfig(5, 4, 16), SAMPLED), (SpecConfig(3, 1), SamplingParams(max_tokens=32)), (SpecConfig("auto"), SAMPLED)],
    ids=["tree", "chain", "auto"],
)
def test_rehearsal_changes_no_text(spec: SpecConfig, sampling: SamplingParams) -> None:
    """Keeps out: rehearsals that write to caches or rows, and constants of a rehearsal that later passes read."""
    with load(spec) as decoder:
        rehearsed = decoder.generate([PROMPT] * 3, sampling)
    with patch.object(build, "can_rehearse", lambda *_: False), load(spec) as decoder:
        expected = decoder.generate([PROMPT] * 3, sampling)
    assert [out.token_ids for out in rehearsed] == [out.token_ids for out in expected]


@pytest.mark.parametrize("spec", [SpecConfig(5, 4, 16), SpecConfig(3, 1), SpecConfig("auto")])
def test_a_benchmark_times_nothing_that_is_new(spec: SpecConfig) -> None:
    """Keeps out: kernels compiled and graphs captured in timed passes, and a count of both that stays 0."""
    prompts = [list(range(3, 3 + length)) for length in (7, 19, 40, 8, 23, 33)]
    with load(spec, max_batch_size=2) as decoder:
        session = Session(decoder)
        cell = measure_cell(session, prompts, SamplingParams(max_tokens=24), repeats=2)
        kernels, graphs, _ = before = session.readiness
        session.generate(prompts, [SamplingParams(max_tokens=24)] * len(prompts), speculate=False)
        assert session.readiness == before and kernels > 10 and graphs > 5
    assert cell.baseline.cold_timed == cell.speculative.cold_timed == 0
    assert cell.outputs.verdict in ("equal", "near-tie")
