"""What a benchmark takes, and what it does when something fails: prompts for the batches, versions, requests that die."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from toolkit.models import Zoo
from toolkit.paths import ROOT

from specdec import EngineOptions, SamplingParams, SpecConfig
from specdec.bench.run import BenchOptions, run_bench
from specdec.cli.bench import options_of
from specdec.cli.entry import build_parser
from specdec.session import Session

SPEC = SpecConfig(2, 2, 4)


def options(there: int, batch_sizes: tuple[int, ...], num_prompts: int | None = None) -> BenchOptions:
    return BenchOptions(
        target="t", draft="d", prompts=["text"] * there, prompts_source="p.jsonl", specs=(SPEC,), batch_sizes=batch_sizes,
        sampling=SamplingParams(max_tokens=9), num_prompts=num_prompts,
    )  # fmt: skip


def small(zoo: Zoo, **changes: Any) -> BenchOptions:
    """A benchmark of seconds."""
    fields: dict[str, Any] = {
        "target": zoo.target("llama"), "draft": zoo.head("llama", "eagle3"), "prompts": [[1, 2, 3], [4, 5, 6, 7]],
        "prompts_source": "p.jsonl", "specs": (SPEC,), "batch_sizes": (1, 2), "repeats": 1,
        "engine": EngineOptions(device="cpu"), "sampling": SamplingParams(max_tokens=6, ignore_eos=True),
    }  # fmt: skip
    return BenchOptions(**fields | changes)


@pytest.mark.parametrize(
    ("there", "batch_sizes", "num_prompts", "taken"),
    [(48, (1, 8), None, 8), (48, (1, 8, 32), None, 32), (48, (1,), None, 8), (5, (1, 4), None, 5), (48, (1, 8), 12, 12)],
)
def test_the_largest_batch_gets_enough_prompts(
    there: int, batch_sizes: tuple[int, ...], num_prompts: int | None, taken: int
) -> None:
    """Keeps out: `--batch-sizes 1,8,32` that fails beside a file of 48 prompts, since 8 are taken whatever the batch."""
    assert len(options(there, batch_sizes, num_prompts).taken) == taken


@pytest.mark.parametrize(
    ("there", "batch_sizes", "num_prompts", "message"),
    [
        (20, (1, 32), None, "at least 32 prompts to be full, but p.jsonl holds 20; nearest settings: --batch-sizes 20, or"),
        (48, (1, 32), 9, "32 prompts to be full, got --num-prompts 9; nearest settings: --num-prompts 32, or --batch-sizes 9$"),
        (20, (1,), 30, "p.jsonl holds 20 prompts, 30 were asked for; nearest: --num-prompts 20"),
        (20, (1,), 0, "--num-prompts must be >= 1, got 0"),
    ],
)
def test_too_few_prompts_name_a_setting_that_works(
    there: int, batch_sizes: tuple[int, ...], num_prompts: int | None, message: str
) -> None:
    """Keeps out: an advice to take more prompts than the file holds."""
    with pytest.raises(ValueError, match=message):
        options(there, batch_sizes, num_prompts)


def test_the_command_line_hands_all_prompts_over() -> None:
    """Keeps out: the page's own command for planning capacity, which failed as it is written there."""
    (command,) = (line for line in (ROOT / "docs/BENCHMARKS.md").read_text().splitlines() if "--synthetic-acceptance 0" in line)
    seen = options_of(build_parser().parse_args(command.split()[1:]))
    assert len(seen.taken) == max(seen.batch_sizes) == 32
    assert len(options_of(build_parser().parse_args(["bench", "--num-prompts", "3", "--batch-sizes", "1"])).taken) == 3


@pytest.mark.slow
def test_a_request_that_fails_leaves_the_other_cells(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a traceback that loses what was measured, and a run with a failed request that ends as a success."""
    generate = Session.generate

    def failing(self: Session, *args: Any, **kwargs: Any) -> Any:
        if self.settings.options.max_batch_size == 2 and kwargs["speculate"]:
            raise RuntimeError("the request failed while it ran: logits are not finite")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Session, "generate", failing)
    measurement = run_bench(small(zoo))
    assert [cell.batch_size for cell in measurement.cells] == [1]
    (failure,) = measurement.failures
    assert (failure.batch_size, failure.name) == (2, "2,2,4") and "logits are not finite" in failure.message
    assert measurement.cells[0].outputs.verdict == "equal" and measurement.diverged


def test_shapes_of_one_drafter_and_of_several_sources(zoo: Zoo) -> None:
    """Keeps out: room for the shape that looks widest while matches reach further in another one; a shape that means nothing
    beside one drafter, found out after others were measured."""
    narrow, wide = SpecConfig(3, 4, 37), SpecConfig(10, 6, 12)
    one, joined = (small(zoo, draft=draft, specs=(narrow, wide)) for draft in ("d", ["d", "suffix"]))
    assert max(one.specs, key=lambda spec: one.resolved(spec).lookahead) == wide
    assert max(joined.specs, key=lambda spec: joined.resolved(spec).lookahead) == narrow
    told: list[str] = []
    with pytest.raises(ValueError, match="max_depth says how deep paths of other sources reach"):
        run_bench(small(zoo, specs=(SpecConfig(5, 4, 16), SpecConfig(2, 1, 5, 4))), lambda what, *_: told.append(what))
    assert set(told) == {"loading"}


def test_records_name_the_whole_shape(zoo: Zoo) -> None:
    """Keeps out: two shapes under one name, of which one reaches deeper than its drafter."""
    draft = [str(zoo.head("llama", "eagle3")), "suffix"]
    measurement = run_bench(small(zoo, draft=draft, specs=(SpecConfig(2, 1, 5, 4),), batch_sizes=(1,)))
    (cell,) = measurement.cells
    assert cell.spec == (2, 1, 5, 4) and cell.name == "2,1,5,4"


def test_a_session_times_phases(zoo: Zoo) -> None:
    """Keeps out: times that carry on from the round before, and an engine that goes on waiting for every phase."""
    session = Session(zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2))
    submitted = session.submit([[1, 2], [3, 4, 5], [6]], [SamplingParams(max_tokens=40)] * 3, speculate=True)
    with session.timed_phases() as phases:
        while session.num_running < 2:
            session.step()
        before = [request.num_tokens for request in submitted]
        assert phases.calls["prefill"] >= 1
        phases.clear()
        wall, waited = session.timed_step()
        assert [phases.calls.get(name) for name in ("prefill", "draft", "verify", "extend")] == [None, 1, 1, 1]
        assert 0 < sum(phases.seconds.values()) <= wall and waited == 0
    assert [request.num_tokens > tokens for request, tokens in zip(submitted, before)] == [True, True, False]
    phases.clear()
    session.step()
    assert phases.calls == {}
    session.cancel()
    assert session.num_running == 0 and all(request.is_done for request in submitted)


def test_a_cancelled_session_frees_its_rows_and_pages(zoo: Zoo) -> None:
    """Keeps out: a profile after which the decoder still holds rows and pages, so that the next one finds no room."""
    session = Session(zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2, max_seq_len=48))
    sampling = [SamplingParams(max_tokens=40, ignore_eos=True)] * 2
    for _ in range(4):
        session.submit([[1, 2, 3], [4, 5]], sampling, speculate=True)
        while session.num_running < 2:
            session.step()
        session.cancel()
    assert [len(output.token_ids) for output in session.generate([[1, 2], [3]], sampling, speculate=False)] == [40, 40]


def engine_uses(path: Path) -> list[str]:
    """Places of a file that reach into a decoder or import the engine's parts."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] == "decoder":
            if node.attr == "engine" or node.attr.startswith("_"):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("specdec.engine", "specdec.runner")):
            found.append(f"{path.name}:{node.lineno} {node.module}")
    return found


def test_one_file_knows_the_engine() -> None:
    """Keeps out: a benchmark that breaks in ten places when the engine changes inside."""
    files = {path for room in ("specdec/bench", "benchmarks") for path in (ROOT / room).rglob("*.py")}
    allowed = {ROOT / "specdec" / "session.py", ROOT / "benchmarks" / "engine_internals.py"}
    allowed.add(ROOT / "benchmarks" / "serving" / "mixed_load.py")  # the scheduler on a simulated clock
    assert [use for path in sorted(files - allowed) for use in engine_uses(path)] == []
    assert all(engine_uses(path) for path in allowed)
