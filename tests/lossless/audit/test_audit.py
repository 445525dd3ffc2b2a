"""A decoder that audits itself: right answers raise no alarm, planted faults are found, and requests never wait for it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.driver import Driver
from toolkit.inside.round_faults import fault
from toolkit.models import Zoo, ragged_prompts
from toolkit.traffic.audit import audited, auditor_of, switch_drafting, totals_of, wanted_at, weights, work_by_hand
from toolkit.traffic.live_bytes import LiveBytes
from toolkit.traffic.traffic import Traffic, World, drive

from specdec import EngineOptions, SamplingParams, SpecConfig, SpecDecoder, cli, shipped
from specdec.grammar.wait import Wait
from specdec.loading.memory import AUDIT_PIECE, pool_bytes
from specdec.loading.plan import plan_memories
from specdec.lossless.reference import ReferenceCheck
from specdec.lossless.replay import FinishedText, ReplayFile, replay
from specdec.session import Session

PROMPTS = ragged_prompts(40, 6)
TREE = SpecConfig(3, 4, 12)
EVERY: list[dict[str, Any]] = [
    {}, {"temperature": 0.9}, {"temperature": 1.2, "top_k": 5, "seed": 4}, {"logit_bias": {3: 2.0}, "repetition_penalty": 1.4},
    {"min_tokens": 6, "bad_words": [[5], [7, 9]]}, {"temperature": 0.8, "frequency_penalty": 0.5, "min_p": 0.1},
]  # fmt: skip


def faulty() -> Any:
    """A runner that writes a wrong token now and then."""
    return fault("both sides")


def no_memory(*_: Any) -> None:
    raise MemoryError("none left")


def auditing(zoo: Zoo, folder: Path, **settings: Any) -> SpecDecoder:
    decoder = zoo.decoder("llama", "eagle3", TREE, **{"audit": 1.0, "audit_folder": str(folder), **settings})
    auditor_of(Driver(decoder)).tell = lambda said: None
    return decoder


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_answers_raise_no_alarm(zoo: Zoo, tmp_path: Path, dtype: str) -> None:
    """Keeps out: an audit that draws other noise than the row did, knows less of its options, or counts wrongly."""
    with auditing(zoo, tmp_path, dtype=dtype) as decoder:
        params = [SamplingParams(max_tokens=12, **each) for each in EVERY]
        texts = decoder.generate(PROMPTS, params)
        found = audited(Driver(decoder))
    tokens = sum(len(text.token_ids) for text in texts)
    assert (found.audit_texts, found.audit_tokens, found.audit_mismatch) == (len(PROMPTS), tokens, 0)
    assert not found.drafting_stopped and not list(tmp_path.iterdir())


def test_texts_under_grammars_are_compared(tmp_path: Path) -> None:
    """Keeps out: tokens that a grammar made the target take, called wrong."""
    pair = shipped.target_folder(), shipped.draft_folder()
    settings: dict[str, Any] = {"device": "cpu", "audit": 1.0, "audit_folder": tmp_path, "smoke": False}
    with SpecDecoder.from_pretrained(*pair, SpecConfig(3, 2, 6), **settings) as decoder:
        decoder.generate(
            ["Once", "The"], SamplingParams(max_tokens=16, regex="(The|A) [a-z]{2,6} [a-z]{2,7}\\.", temperature=0.7)
        )
        found = audited(Driver(decoder))
    assert found.audit_texts == 2 and found.audit_mismatch == 0


def test_masks_of_a_long_text_make_way(tmp_path: Path) -> None:
    """Keeps out: requests that wait while an audit computes all masks of a long text in one part, or copies them; masks that
    lack a part."""
    pair, params = (shipped.target_folder(), shipped.draft_folder()), SamplingParams(max_tokens=200, regex="[a-z .]+")
    settings: dict[str, Any] = {"device": "cpu", "audit": 1.0, "audit_folder": tmp_path, "smoke": False}
    with SpecDecoder.from_pretrained(*pair, SpecConfig(3, 2, 6), **settings) as decoder:
        driver, auditor, parts = Driver(decoder), auditor_of(Driver(decoder)), list[Any]()
        compare, calls, held = auditor.compare, 0, list[int]()

        def counted(*given: Any) -> Any:
            parts.append(given[2])
            held.append(live.most)
            return compare(*given)

        auditor.compare = counted
        request = driver.submit(decoder.encode("Once"), params)
        driver.run_until_idle()
        with LiveBytes() as live:
            while auditor.has_work:
                work_by_hand(driver, lambda: True)
                calls += 1
        found, ids = totals_of(driver), request.output.token_ids
        assert (found.audit_texts, found.audit_mismatch, found.audit_interrupted) == (1, 0, calls - 1) and len(ids) == 200
        assert calls - len(parts) == -(-len(ids) // AUDIT_PIECE), "a part of masks a call, before the first layer"
        whole = Session(decoder).masks(request.choice, ids)
        assert whole is not None and torch.equal(parts[0].masks_IX, whole) and held[0] == whole.nbytes


def test_a_wrong_token_is_found_kept_and_ends_drafts(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: an audit that looks away, a file that nobody can run again, and drafts that go on or never come back."""
    with auditing(zoo, tmp_path, audit_stop=True) as decoder:
        driver, said = Driver(decoder), list[str]()
        auditor_of(driver).tell = said.append
        with faulty():
            (text,) = decoder.generate([PROMPTS[3]], SamplingParams(max_tokens=40, temperature=0.9, seed=1))
        found = audited(driver)
        wrong = [place for place in range(40) if (len(PROMPTS[3]) + place - 1) % 16 == 0]
        assert 0 < found.audit_mismatch <= len(wrong) and found.drafting_stopped == 1 and not decoder.is_drafting
        (path,) = tmp_path.iterdir()
        assert len(said) == 1 and str(path) in said[0] and "nothing is drafted any more" in said[0]
        file = ReplayFile.read(path)
        assert file.token_ids == text.token_ids and file.params.seed is not None and file.texts is None
        assert {each["index"] for each in file.wrong} <= set(wrong) and path.stat().st_mode & 0o077 == 0
        plain = decoder.generate([PROMPTS[3]], SamplingParams(max_tokens=20))[0]
        assert plain.stats.drafted == 0
        decoder.set_drafting(True)
        assert decoder.generate([PROMPTS[3]], SamplingParams(max_tokens=20))[0].stats.drafted > 0 and decoder.is_drafting
        recorded, *now = replay(Session(decoder), file)
        assert recorded.wrong == found.audit_mismatch and [each.wrong for each in now] == [0, 0]
        assert {each.parts_at for each in now} == {file.wrong[0]["index"]}
        with faulty():
            assert any(each.wrong for each in replay(Session(decoder), file)[1:])


def test_a_replay_file_runs_on_the_command_line(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a file that lacks what runs it again, flags that are taken and ignored, and other files taken for one."""
    with auditing(zoo, tmp_path / "replays") as decoder, faulty():
        decoder.generate([PROMPTS[3]], SamplingParams(max_tokens=24))
        audited(Driver(decoder))
    (path,) = (tmp_path / "replays").iterdir()
    out = tmp_path / "out.json"
    assert cli.main(["verify", "--replay", str(path), "--json", str(out)]) == 1
    texts = json.loads(out.read_text())["texts"]
    assert [bool(each["off_target"]) for each in texts] == [True, False, False]
    capsys.readouterr()
    for more, said in (
        (["--max-tokens", "9"], "--max-tokens would do nothing"),
        (["--replay", __file__], "must be a file that"),
    ):
        assert cli.main(["verify", "--replay", str(path), *more]) == 2 and said in capsys.readouterr().err


def test_what_a_request_said_of_its_drafts_is_replayed(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: files that `verify --replay` refuses, because a shape became a dict, or a plain text was to have sources."""
    given = SamplingParams(max_tokens=24, sources=["suffix", "prediction"], prediction=[5] * 9, prompt_logprobs=1)
    settings: dict[str, Any] = {"audit": 1.0, "audit_folder": str(tmp_path), "shapes": "2,1,4,3"}
    with zoo.decoder("llama", "eagle3+suffix", SpecConfig(3, 3, 9), **settings) as decoder:
        auditor_of(Driver(decoder)).tell = lambda said: None
        auditor_of(Driver(decoder)).keeps_texts = True
        with faulty():
            decoder.generate([PROMPTS[3]], replace(given, shape=SpecConfig(2, 1, 4, 3)))
        assert audited(Driver(decoder)).audit_mismatch
        file = ReplayFile.read(next(tmp_path.iterdir()))
        assert file.options().shapes == decoder.settings.options.shapes and file.params.shape == SpecConfig(2, 1, 4, 3)
        recorded, *now = replay(Session(decoder), file)
        assert recorded.wrong and [each.wrong for each in now] == [0, 0]


def test_a_grammar_that_begins_late_is_replayed(tmp_path: Path) -> None:
    """Keeps out: answers of tools that are called wrong, because a file takes their grammar to hold from the first token."""
    pair = shipped.target_folder(), shipped.draft_folder()
    with SpecDecoder.from_pretrained(*pair, SpecConfig(3, 2, 6), device="cpu", smoke=False) as decoder:
        wait, params = Wait(None, (" a",)), SamplingParams(max_tokens=20, regex="[A-Z ]+")
        request = decoder.new_request(decoder.encode("Once"), params, wait=wait)
        (text,) = decoder.run([request])
        assert not text.text.isupper() and text.text.split(" a", 1)[1].strip().isupper(), "it held late"
        check = ReferenceCheck([], [], 0.0, 0)
        names = {"target": "", "draft": None, "versions": {}}
        path = ReplayFile.of(FinishedText.of(request), check, decoder.settings, names, None).write(tmp_path)
        file = ReplayFile.read(path)
        assert file.grammar_wait == wait
        assert [(each.wrong, each.parts_at) for each in replay(Session(decoder), file)] == [(0, None)] * 3


def test_it_makes_way_between_two_layers(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a request that waits for a whole pass, and weights that stay wide when a pass ends early."""
    with auditing(zoo, tmp_path, dtype="bfloat16") as decoder:
        driver, before = Driver(decoder), weights(Driver(decoder))
        request = driver.submit(PROMPTS[2], SamplingParams(max_tokens=10))
        driver.run_until_idle()
        layers = decoder.model.config.num_layers
        for interrupted in range(1, 2 * layers):  # a layer each time; in the middle they are those of the second pass
            work_by_hand(driver, wanted_at(0))
            assert auditor_of(driver).has_work and weights(driver) == before, interrupted
            found = totals_of(driver)
            assert (found.audit_interrupted, found.audit_texts, found.audit_tokens) == (interrupted, 0, 0)
        work_by_hand(driver)
        assert totals_of(driver).audit_texts == 1 and not auditor_of(driver).has_work and weights(driver) == before
        again = driver.submit(PROMPTS[2], SamplingParams(max_tokens=10))
        driver.run_until_idle()
        assert again.output.token_ids == request.output.token_ids


def test_what_is_not_compared_is_counted(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: texts of any length in memory, skipped ones that look like compared ones, and a server that is never idle and
    whose operator believes that it is audited."""
    with auditing(zoo, tmp_path, audit_max_tokens=30) as decoder:
        driver, auditor = Driver(decoder), auditor_of(Driver(decoder))
        for tokens in (40, 4):
            driver.submit(PROMPTS[1], SamplingParams(max_tokens=tokens))
        driver.run_until_idle()
        said, since = list[str](), totals_of(driver).audit_waits_since
        auditor.max_waiting, auditor.tell = 1, said.append
        assert totals_of(driver).audit_waiting == 1 and since is not None
        for _ in range(2):
            driver.submit(PROMPTS[1], SamplingParams(max_tokens=4))
            driver.run_until_idle()
        assert dict(totals_of(driver).audit_skipped) == {"long": 1, "queue": 2, "failed": 0}
        assert totals_of(driver).audit_waits_since == since, "the oldest one's time"
        (late,) = said  # once, not with every answer
        assert late.startswith("the audit is late: 1 answers wait, the oldest for ") and "further ones are skipped" in late
        auditor.compare = no_memory
        work_by_hand(driver)
        assert totals_of(driver).audit_skipped["failed"] == 1 and not auditor.has_work
        assert (totals_of(driver).audit_waiting, totals_of(driver).audit_waits_since) == (0, None)
        for _ in range(2):
            driver.submit(PROMPTS[1], SamplingParams(max_tokens=4))
        driver.run_until_idle()
        assert [each.startswith("the audit is late") for each in said] == [True, False, True], (
            "and once more after it has caught up"
        )


def test_only_a_share_is_compared(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: an audit of everything, or of nothing."""
    with auditing(zoo, tmp_path, audit=0.25) as decoder:
        auditor_of(Driver(decoder))._chance = random.Random(3)
        decoder.generate([PROMPTS[0]] * 40, SamplingParams(max_tokens=2))
        assert 4 <= audited(Driver(decoder)).audit_texts <= 18


@pytest.mark.slow_cases
@pytest.mark.parametrize("world", ["tree", "auto", "kept"])
def test_random_traffic_raises_no_alarm(zoo: Zoo, tmp_path: Path, world: str) -> None:
    """Keeps out: answers of rows that stepped back, paused, shared pages or failed beside others, called wrong."""
    specs: dict[str, dict[str, Any]] = {
        "tree": {"spec": TREE}, "auto": {"spec": SpecConfig("auto", 2, 8)}, "kept": {"spec": TREE, "prefix_caching": True},
    }  # fmt: skip
    settings = {**specs[world], "audit": 1.0, "audit_folder": str(tmp_path)}
    traffic = Traffic(zoo, World("llama", "eagle3", settings), random.Random(world))
    _, finished = drive(traffic, events=20)
    while auditor_of(traffic.driver).has_work:
        work_by_hand(traffic.driver)
    found = totals_of(traffic.driver)
    assert found.audit_texts == finished - found.audit_skipped["queue"] > 0 and found.audit_mismatch == 0


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("world", ["tree", "auto", "kept"])
def test_drafts_may_stop_and_go_on_at_any_time(zoo: Zoo, world: str) -> None:
    """Keeps out: a row that speculates again where the drafter does not know its text, and texts that change."""
    settings = {"prefix_caching": True} if world == "kept" else {}
    spec = SpecConfig("auto", 2, 8) if world == "auto" else TREE
    chance, params = random.Random(world), [SamplingParams(max_tokens=30, **each) for each in EVERY[:3]]
    with zoo.decoder("llama", "eagle3", spec, max_batch_size=3, **settings) as decoder:
        want = {i: decoder.generate([PROMPTS[i]], params[2], speculate=False)[0].token_ids for i in range(6)}
        driver = Driver(decoder)
        for _ in range(4):
            asked = [(i, driver.submit(PROMPTS[i], params[2])) for i in range(6)]
            while not driver.is_idle:
                switch_drafting(driver, chance.random() < 0.7)
                driver.step()
            assert {i: request.output.token_ids for i, request in asked} == want
        switch_drafting(driver, True)
        driver.assert_nothing_leaked()
        assert decoder.generate([PROMPTS[0]], params[2])[0].token_ids == want[0]


def test_memory_is_kept_free(zoo: Zoo) -> None:
    """Keeps out: a pool of keys and values that takes what the audit's passes need, and a plan that does not know of them."""
    more = {"audit": 0.5, "audit_max_tokens": 64}
    (plain,), (planned,) = (
        plan_memories(zoo.target("llama"), None, None, EngineOptions(max_seq_len=128, **settings), [1 << 30])  # type: ignore[arg-type]
        for settings in ({}, more)
    )
    size = planned.parts["passes of the audit"]
    assert size > 0 and planned.total - plain.total == size and "passes of the audit" not in plain.parts
    device = torch.device("cpu")
    assert pool_bytes(device, 0.5, reserved=1 << 30) == pool_bytes(device, 0.5) - (1 << 29)
    with pytest.raises(ValueError, match="beside the audit's passes"):
        pool_bytes(device, int(pool_bytes(device, 0.999)), reserved=1 << 34)


@pytest.mark.slow
def test_all_ranks_take_part(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: ranks that end a pass at different layers, and then wait for each other for ever."""
    with auditing(zoo, tmp_path, tensor_parallel_size=2) as decoder:
        driver = Driver(decoder)
        driver.submit(PROMPTS[2], SamplingParams(max_tokens=10, temperature=0.9))
        driver.run_until_idle()
        calls = 0
        while auditor_of(driver).has_work:
            work_by_hand(driver, wanted_at(0 if calls % 2 else 1))
            calls += 1
        found = totals_of(driver)
        assert (found.audit_interrupted, found.audit_texts, found.audit_mismatch) == (calls - 1, 1, 0) and calls > 5
        with faulty():
            driver.submit(PROMPTS[3], SamplingParams(max_tokens=20))
            driver.run_until_idle()
        work_by_hand(driver, wanted_at(3))
        work_by_hand(driver)
        assert totals_of(driver).audit_mismatch > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"audit": 1.5}, r"audit must be in \[0.0, 1.0\], got 1.5; nearest setting that works: audit=1.0"),
        ({"audit_max_tokens": 9}, "audit_max_tokens=9 does nothing without audit; nearest .* audit_max_tokens=2048"),
        ({"audit_stop": True}, "audit_stop=True does nothing without audit; nearest .* audit=0.001"),
        ({"audit": 1.0, "audit_folder": __file__ + "/kept"}, "audit_folder must be a folder in which .* is a file"),
        ({"audit": 1, "audit_stop": True}, "audit_stop would do nothing without a drafter; nearest .* audit_stop=False"),
        ({"audit": 1, "audit_folder": " "}, "audit_folder must be the name of a folder, got an empty one"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(zoo: Zoo, settings: dict[str, Any], said: str) -> None:
    """Keeps out: a setting that is taken and ignored."""
    with pytest.raises(ValueError, match=said):
        zoo.decoder("llama", **settings)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sampling", [], "sampling must be an object, got"), ("sampling", {"top_p": 7}, "top_p must be"),
        ("token_ids", ["a"], "token_ids must be a list of ints"), ("spec", {"odd": 1}, "odd"), ("spec", 5, "must be objects"),
        ("settings", {"odd": 1}, "odd"), ("bound", None, "bound must be a number"), ("wrong", [1], "list of objects"),
        ("odd", 1, "odd"), ("speculate", 1, "speculate must be"),
    ],
)  # fmt: skip
def test_a_damaged_replay_file_is_named(tmp_path: Path, name: str, value: Any, said: str) -> None:
    """Keeps out: a traceback, or minutes of loading, for a file of which a field is wrong, or that nests too deeply."""
    given: dict[str, Any] = {
        "format": "specdec replay 1", "target": "t", "draft": None, "spec": None, "settings": {}, "versions": {}, "date": "",
        "prompt_token_ids": [1], "token_ids": [2], "origins": [0], "speculate": True, "sampling": {}, "wrong": [], "bound": 0.1,
    }  # fmt: skip
    path = tmp_path / "replay.json"
    path.write_text(json.dumps(given))
    assert ReplayFile.read(path).token_ids == [2]
    path.write_text(json.dumps({**given, name: value}))
    with pytest.raises(ValueError, match=f"--replay must be a file that an audit has written .*{said}"):
        ReplayFile.read(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="--replay must be .*nested too deeply"):
        ReplayFile.read(path)
