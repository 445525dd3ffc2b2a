"""The benchmark's honesty: same work on both sides, numbers that follow from counters, and no speed-up for wrong text."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from toolkit.bench import StubSession
from toolkit.deepseek import DeepseekZoo
from toolkit.families import COMMON, FAMILIES
from transformers import CONFIG_MAPPING

from specdec.bench.cell import measure_cell
from specdec.bench.measurement import Divergence, Measurement, Outputs, repeat_ratio
from specdec.bench.prompt_file import read_prompts
from specdec.bench.run import BenchOptions
from specdec.bench.show.report import print_report
from specdec.config import SamplingParams, SpecConfig
from specdec.models.deepseek.config import parse_deepseek
from specdec.models.registry import choose_target

PROMPTS = [[1, 2, 3], [4, 5]]
GREEDY = SamplingParams(max_tokens=9)


def bench(session: StubSession, sampling: SamplingParams = GREEDY, repeats: int = 3):
    return measure_cell(session, PROMPTS, sampling, repeats)


def measured(*cells) -> Measurement:
    sampling = {name: getattr(GREEDY, name) for name in GREEDY.__dataclass_fields__}
    settings = {
        "target": "/a/long/folder/of/a/target/model", "draft": "/a/long/folder/of/its/draft/head", "device": "cpu",
        "dtype": "float32", "attention": "torch", "attention_reason": "there is no GPU " * 5, "cuda_graphs": False,
        "page_size": 16, "max_seq_len": 64, "repeats": 3, "sampling": sampling,
    }  # fmt: skip
    tokens = {"min": 2, "max": 3, "sum": 5}
    prompts = {"source": "p.jsonl", "count": 2, "tokens": tokens, "sha256": "0" * 64, "chat_template": False}
    machine = {"runs_on": "a CPU", "gpus": [], "driver": None, "load_average": 3.0, "cpus_usable": 2, "cpu_steal": 0.5}
    return Measurement(machine, {"specdec": "0", "torch": "2"}, settings, prompts, list(cells))


def shown(measurement: Measurement, width: int = 80) -> str:
    out = io.StringIO()
    print_report(measurement, Console(file=out, width=width), details=True, explain=True)
    return out.getvalue()


def with_times(cell, baseline: float, speculative: float):
    sides = {"baseline": [baseline] * 3, "speculative": [speculative] * 3}
    return replace(cell, **{name: replace(getattr(cell, name), seconds=seconds) for name, seconds in sides.items()})


def test_both_sides_do_the_same_work_in_alternating_order():
    """Keeps out: a warm-up on one side only, drift that hits one side, and waiting for phases while speed is timed."""
    session = StubSession()
    cell = bench(session)
    plain, fast = (False, False), (True, False)
    assert session.calls == [plain, fast, plain, fast, fast, plain, plain, fast, (False, True), (True, True)]
    assert session.asked == (PROMPTS, [GREEDY, GREEDY])
    assert len(cell.baseline.seconds) == len(cell.speculative.seconds) == 3
    assert session.is_timing is False
    assert cell.outputs.passes == 4
    assert session.prepared == ["rehearsed", "captured"]


def test_phases_that_get_graphs_of_their_own_are_captured_first():
    """Keeps out: the seconds of a capture in the milliseconds of a phase."""
    session = StubSession()
    session.settings.cuda_graphs = "round"
    session.when_timing = lambda: session.prepared.append("timed")
    cell = bench(session)
    assert session.prepared == ["rehearsed", "captured", "captured", "timed", "captured", "timed"]
    session.when_timing = lambda: setattr(session, "readiness", (0, min(session.readiness[1] + 1, 3), 0))
    cell = bench(session)  # a capture in each of the first three passes of the phases: of two, and of one
    assert session.calls[-4:] == [(False, True), (False, True), (True, True), (True, True)]
    assert cell.speculative.phases.calls == {"prefill": 1, "draft": 1, "verify": 1, "extend": 1}


def test_phases_are_switched_off_when_a_pass_fails():
    """Keeps out: an engine that stays slow because its benchmark was interrupted."""
    session = StubSession()
    good = session.generate

    def generate(*args, **kwargs):
        if session.is_timing:
            raise KeyboardInterrupt
        return good(*args, **kwargs)

    session.generate = generate
    with pytest.raises(KeyboardInterrupt):
        bench(session)
    assert session.is_timing is False


def test_every_prompt_has_its_seed_and_keeps_it():
    """Keeps out: two sides that sample different texts, and prompts that all draw the same noise."""
    session = StubSession()
    bench(session, SamplingParams(max_tokens=9, temperature=1.0, seed=7))
    assert [params.seed for params in session.asked[1]] == [7, 8]


def test_derived_numbers_follow_from_the_counters():
    """Keeps out: accept lengths without the bonus, speed-ups of seconds at unequal tokens, phases divided by row-rounds."""
    cell = with_times(bench(StubSession()), 2.0, 0.5)
    assert cell.speculative.counters.accept_length == 3
    assert cell.speculative.counters.rounds == 2 * 2 * 3  # rounds x prompts x repeats
    assert cell.baseline.output_tokens == [12, 12, 12]
    assert cell.speed_up == pytest.approx(4)
    assert cell.speed_ups == pytest.approx([cell.speed_up] * 3), "repeats that took the same time say what the cell says"
    assert cell.speculative.phases.rounds == 1 and cell.baseline.phases.rounds == 5
    assert cell.speculative.phases.ms("draft") == pytest.approx(1)
    phases = cell.speculative.phases
    assert sum(phases.ms(name) for name in ("draft", "verify", "extend", "rest")) == pytest.approx(phases.ms_per_round)
    expected = 3 * cell.baseline.phases.ms_per_round / phases.ms_per_round
    assert cell.predicted_speed_up == pytest.approx(expected)


def test_plain_steps_of_auto_are_a_phase_of_their_own():
    """Keeps out: parts of a round that don't add up because the steps without a draft have no column."""
    cell = bench(StubSession())
    phases = cell.speculative.phases
    both = replace(phases, seconds={**phases.seconds, "decode": 0.003}, calls={**phases.calls, "decode": 3})
    auto = replace(cell, spec=("auto", 64, 1024), speculative=replace(cell.speculative, phases=both))
    title = "Milliseconds by phase"
    parts = measured(auto).as_json()["cells"][0]["derived"]["ms_per_round_by_phase"]
    assert parts["decode"] == pytest.approx(3 / 4) and sum(parts.values()) == pytest.approx(both.ms_per_round)
    assert measured(cell).as_json()["cells"][0]["derived"]["ms_per_round_by_phase"]["decode"] == 0
    assert "decode" not in shown(measured(cell)).split(title)[1]
    forced = replace(auto, spec=("auto", 4, 16), outputs=replace(auto.outputs, is_synthetic=True))
    for cells in ([auto, cell], [forced, forced]):
        text = shown(measured(*cells)).split(title)[1].split("\n\n")[0]
        assert "decode" in text and "0.75" in text and "…" not in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_depths_never_reached_have_no_acceptance():
    """Keeps out: 0.00 for a depth of which nothing is known."""
    cell = bench(StubSession())
    stats = replace(cell.speculative.counters, reached_by_depth=[12, 0], accepted_by_depth=[0, 0])
    measurement = measured(replace(cell, speculative=replace(cell.speculative, counters=stats)))
    assert measurement.as_json()["cells"][0]["derived"]["acceptance_by_depth"] == [0.0, None]
    row = shown(measurement).split("Acceptance by depth")[1].split("\n\n")[0].splitlines()[-1]
    assert row.split() == ["2", "2,2,4", "0.00", "-"]


def test_a_slower_run_says_so():
    """Keeps out: a loss that has to be worked out from two columns."""
    text = shown(measured(with_times(bench(StubSession()), 1.0, 2.0)))
    assert "SLOWER THAN BASELINE (0.50x)" in text
    assert "load 3.0 on 2 CPUs" in text and "50% of the CPU time" in text
    assert "SLOWER" not in shown(measured(with_times(bench(StubSession()), 2.0, 1.0)))


def test_different_outputs_have_no_speed_up():
    """Keeps out: a speed-up of wrong text."""
    cell = bench(StubSession(wrong=[5, 6, 1, 8, 5, 6]))
    assert (cell.outputs.verdict, cell.outputs.num_equal, cell.speed_up) == ("DIVERGED", 0, None)
    assert len(cell.outputs.differing) == 2  # one a prompt, though all five passes differ
    measurement = measured(cell)
    text = shown(measurement)
    assert "speed-up not shown: outputs differ (0 of 2 equal)" in text
    assert measurement.diverged
    derived = measurement.as_json()["cells"][0]["derived"]
    assert derived["speed_up"] is None and derived["speed_up_of_each_repeat"] is None


def test_what_diverged_is_shown_before_near_ties():
    """Keeps out: a red cell below which only near-ties are listed."""
    cell = bench(StubSession(wrong=[5, 6, 1, 8, 5, 6]))
    near = [Divergence(prompt, 1, 5, 6, 1, 2, 0.0, 0.1, "near-tie") for prompt in range(4)]
    text = shown(measured(replace(cell, outputs=Outputs(6, 5, [*near, Divergence(5, 2, 5, 6, 1, 9, 3.0, 0.1)]))))
    assert text.index("prompt 6: DIVERGED") < text.index("prompt 1: near-tie") < text.index("and 2 more")


def test_the_facts_name_what_is_no_default():
    """Keeps out: a table of 8-bit KV, or of transformers' code, that looks like one of 16 bit and our own modules."""
    plain, other = measured(bench(StubSession())), measured(bench(StubSession()))
    plain.settings.update(kv_cache_dtype="auto", backend="native", backend_reason="a native module for 'llama'")
    other.settings.update(kv_cache_dtype="int8", backend="transformers", backend_reason="no native module for 'phi3'")
    text = " ".join(shown(other, 120).split())
    assert "float32, KV int8, CUDA graphs" in text and "model by transformers: no native module for 'phi3' draft" in text
    assert ", KV " not in shown(plain, 120) and "native" not in shown(plain, 120)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_router_flip_is_named_and_stays_diverged(dtype):
    """Keeps out: a 16-bit mixture of experts that looks like a broken kernel, and an excuse where rounding is none."""
    for mixes in (True, False):
        measurement = measured(bench(StubSession(wrong=[5, 6, 1, 8, 5, 6])), bench(StubSession()))
        measurement.settings.update(mixture_of_experts=mixes, dtype=dtype)
        text = " ".join(shown(measurement).split())
        assert text.count("a router flip") == (mixes and dtype == "bfloat16") and "speed-up not shown" in text


@pytest.mark.slow
def test_mixtures_of_experts_are_known(tmp_path):
    """Keeps out: a note about routers that no model gets, because each family writes its experts under another key."""
    for name, (model_type, changes) in FAMILIES.items():
        CONFIG_MAPPING[model_type](**COMMON | changes).save_pretrained(tmp_path / name)
        mixes = name in ("gpt-oss", "llama4", "qwen3-moe", "mixtral")
        assert choose_target(tmp_path / name, "transformers").config.has_experts is mixes, name
    raw = json.loads((DeepseekZoo(tmp_path).target("v3") / "config.json").read_text())
    for dense, mixes in ((1, True), (raw["num_hidden_layers"], False)):
        assert parse_deepseek(raw | {"first_k_dense_replace": dense}, "v3").has_experts is mixes


def test_forced_acceptance_is_marked_everywhere_and_compared_nowhere():
    """Keeps out: a plan that is read as a measurement, near-ties of a text that nobody chose, exit code 1 for it."""
    session = StubSession(wrong=[5, 6, 1, 8, 5, 6], synthetic=True)
    cell = replace(with_times(bench(session), 1.0, 2.0), spec=(64, 64, 1024), batch_size=64, repeat_ratio=0.5)
    measurement = replace(measured(cell, cell), synthetic_acceptance=[0.8, 0.5])
    text = shown(measurement)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "acceptance by depth is forced to 0.8, 0.5" in text and "not compared" in " ".join(text.split())
    for title in ("Speed", "Milliseconds by phase", "Acceptance by depth"):
        table = text[text.index(f"SYNTHETIC: {title}") :].split("\n\n")[0]
        rows = [line for line in table.splitlines() if "64,64,1024" in line]
        assert len(rows) >= 2 and all("SYNTHETIC" in row for row in rows)
    assert "SYNTHETIC batch 64, 64,64,1024: SLOWER THAN BASELINE" in text
    assert "DIVERGED" not in text and "repetitive" not in text and not measurement.diverged
    data = json.loads(json.dumps(measurement.as_json()))
    assert data["synthetic_acceptance"] == [0.8, 0.5] and "synthetic_acceptance" in data["definitions"]
    derived = data["cells"][0]["derived"]
    assert (derived["outputs"], derived["outputs_equal"], derived["speed_up"]) == ("SYNTHETIC", None, 0.5)


def test_averages_over_tokens_and_over_requests_are_two_numbers():
    """Keeps out: one accept length of which nobody knows whether long texts count more."""
    session = StubSession()
    outputs = session._output

    def uneven(prompt, ids, speculate):
        output = outputs(prompt, ids, speculate)
        if speculate and prompt == PROMPTS[0]:
            output.stats.count_round(3, 2, 0)
            output.stats.truncated += 1
        return output

    session._output = uneven
    side = bench(session).speculative
    assert side.counters.accept_length == pytest.approx(13 / 5)
    assert side.accept_length_by_request == pytest.approx((7 / 3 + 3) / 2)


def test_looping_text_is_flagged():
    """Keeps out: an accept length won on a loop."""
    assert repeat_ratio([[1, 2] * 20, list(range(40)), [1]]) == pytest.approx((1 - 2 / 35) / 3)
    cell = bench(StubSession())
    assert "repetitive" not in shown(measured(cell))
    assert "repetitive outputs (50%" in shown(measured(replace(cell, repeat_ratio=0.5)))


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_width(width):
    """Keeps out: tables that wrap their numbers into garbage at 80 columns."""
    spec = (64, 64, 1024)
    bad = replace(bench(StubSession(wrong=[5, 1])), spec=spec, batch_size=64)
    text = shown(measured(bad, bench(StubSession())), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "64,64,1024" in text and " DIVERGED\n" in text and " not shown " in text and "…" not in text


def test_the_json_holds_raw_counters_and_definitions():
    """Keeps out: results nobody can recompute."""
    data = json.loads(json.dumps(measured(bench(StubSession())).as_json()))
    cell = data["cells"][0]
    for side in ("baseline", "speculative"):
        counters = cell[side]["counters"]
        emitted = counters["prefill_tokens"] + counters["emitted"] - counters["truncated"]
        assert emitted == sum(cell[side]["output_tokens"])
    assert {"accept_length", "speed_up", "acceptance_by_depth"} <= data["definitions"].keys()
    assert cell["derived"]["acceptance_by_depth"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ('{"token_ids": [1, 2], "prompt": "x"}', [1, 2]),
        ('{"task_id": "HumanEval/0", "prompt": "def f():\\n"}', "def f():\n"),
        ('{"text": "a"}', "a"),
        ('{"question": "q", "answer": "a"}', "q"),
        ('{"task": "t"}', "t"),
        ('{"turns": ["first", "second"]}', "first"),
    ],
)
def test_prompts_of_the_usual_layouts(tmp_path, line, prompt):
    """Keeps out: a loader that knows one data set."""
    file = tmp_path / "p.jsonl"
    file.write_text(f"{line}\n\n{line}\n")
    assert read_prompts(file) == [prompt, prompt]
    assert read_prompts(file, 1) == [prompt]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"promt": "b"}', "p.jsonl:2 must have one of the keys .* got promt"),
        ("p.jsonl", "once upon", "p.jsonl:1 is not JSON"),
        ("p.jsonl", '["a"]', "must be a JSON object, got list"),
        ("p.jsonl", '{"token_ids": [1, true]}', "list of ints"),
        ("p.jsonl", '{"turns": []}', "'turns' must be a list"),
        ("p.jsonl", '{"prompt": ""}', "not empty"),
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.txt", "a\nb", "holds 2 prompts, 5 were asked for"),
    ],
)
def test_a_wrong_prompts_file_names_the_line(tmp_path, name, text, message):
    """Keeps out: prompts skipped in silence, which change what was measured."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name, 5)


def test_a_text_file_holds_one_prompt_a_line(tmp_path):
    """Keeps out: text that is read as one long prompt."""
    (tmp_path / "p.txt").write_text("one\n\ntwo \n")
    assert read_prompts(tmp_path / "p.txt") == ["one", "two "]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_sizes": (1, 8)}, "a batch of 8 needs at least 8 prompts"),
        ({"batch_sizes": (1, 1)}, "batch_sizes must name each value once"),
        ({"specs": ()}, "spec must name at least one value, got none"),
        (
            {"specs": (SpecConfig(), SpecConfig(5, 1, 6), SpecConfig())},
            "once, got 5,4,16 and 5,1,6 and 5,4,16; more than once: 5,4,16$",
        ),
        ({"sampling": SamplingParams(max_tokens=1)}, "max_tokens must be >= 2.* got 1; nearest .*: --max-tokens 2"),
        (
            {"sampling": SamplingParams(temperature=1.0, seed=2**63 - 1)},
            "seed must be at most 9223372036854775806.*: --seed 9223372036854775806",
        ),
        ({"repeats": 0}, "repeats must be >= 1"),
        ({"sampling": SamplingParams(temperature=1.0)}, "sampling needs a seed"),
        ({"synthetic_acceptance": (0.5,) * 4}, "one probability a level, 5 for the shape 5,4,16; got 4"),
        ({"synthetic_acceptance": (0.5,) * 6}, "nearest setting that works: a --spec of 6 levels, or 5 numbers"),
        ({"synthetic_acceptance": (0.5, 1.5, 0.5, 0.5, 0.5)}, r"synthetic_acceptance\[1\] must be in \[0.0, 1.0\], got 1.5"),
        ({"synthetic_acceptance": (float("nan"),) * 5}, "got nan"),
        ({"synthetic_acceptance": (0.5,) * 5, "draft": ["d", "suffix"]}, r"one drafter's best path, .* got draft=d \+ suffix"),
        ({"profile": True}, "max_tokens of at least 25 with num_steps=5.* got 9"),
        ({"profile": True, "specs": (SpecConfig("auto", 1, 8),)}, "a profile needs a number of levels"),
    ],
)
def test_options_that_measure_nothing_are_refused(change, message):
    """Keeps out: a batch size of 8 that was never more than 2 full, and runs that compare different draws."""
    options = {
        "target": "t", "draft": "d", "prompts": ["a", "b"], "prompts_source": "p", "specs": (SpecConfig(),),
        "batch_sizes": (1,), "sampling": GREEDY,
    }  # fmt: skip
    BenchOptions(**options)
    BenchOptions(**options | {"sampling": SamplingParams(max_tokens=2, temperature=1.0, seed=2**63 - 2)})
    with pytest.raises(ValueError, match=message):
        BenchOptions(**options | change)
