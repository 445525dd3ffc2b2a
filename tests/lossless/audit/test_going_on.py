"""A comparison that makes way goes on where it stopped: nothing twice, nothing lost, and the same numbers to the last bit."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import toolkit.families
import toolkit.own_attention.targets as own_attention
import torch
from toolkit.checkpoints.native import HYBRIDS, NAMES, SHORT, UNLIKE, NativeZoo
from toolkit.driver import Driver
from toolkit.families import Families
from toolkit.inside.round_faults import fault
from toolkit.models import Zoo, ragged_prompts
from toolkit.traffic.audit import (
    at_ends,
    auditor_of,
    begun_by,
    every_step,
    totals_of,
    wanted_at,
    weights,
    why_not_going_on,
    work_between_by_hand,
    work_by_hand,
)

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.lossless.choice import GeneratedText
from specdec.lossless.passage import MadeWay
from specdec.lossless.reference import ReferenceCheck, TextCheck, passes_of
from specdec.session import Session

PROMPTS = ragged_prompts(40, 6)
OTHERS = ("gemma2", "gemma3n", "gemma4", "gpt-oss", "llama4", "phi3-longrope", "qwen3-moe")
PIECE = 7
TREE = SpecConfig(3, 4, 12)
KEPT: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"kv_cache_dtype": "int8_keys", "int8_queries": True},
    "narrow": {"dtype": "float16"},
}


def open_text(decoder: SpecDecoder, **params: Any) -> tuple[TextCheck, GeneratedText]:
    """A check of a text with wrong tokens among right ones, after a prompt."""
    given = SamplingParams(max_tokens=16, seed=3, temperature=0.8)
    ids = list(decoder.generate([PROMPTS[4]], given)[0].token_ids)
    ids[5], ids[12] = (ids[5] + 1) % 40, (ids[12] + 7) % 40
    text = GeneratedText(PROMPTS[4], ids, given)
    return TextCheck(passes_of(Session(decoder)), text, [(2, 9), (5, ids[5]), (5, 1)], PIECE), text


def hold_going_on(decoder: SpecDecoder) -> None:
    """Stops the check before every step of it, with requests between, and compares it with one that nobody stops."""
    driver, before, polls = Driver(decoder), weights(Driver(decoder)), list[int]()
    assert not why_not_going_on(driver) and decoder.model.goes_on
    whole, _ = open_text(decoder)
    whole.passes.poll = lambda: polls.append(1)
    want = whole.run()
    assert not all(each.is_explained for each in want.off)
    check, _ = open_text(decoder)
    check.passes.poll, stops = every_step(), 0
    found: ReferenceCheck | None = None
    while found is None:
        with suppress(MadeWay):
            found = check.run()
        stops += found is None
        assert weights(driver) == before and not any("forward" in vars(layer) for layer in decoder.model.chain())
        if stops % 5 == 1:
            decoder.generate([PROMPTS[stops % 6]], SamplingParams(max_tokens=3))
    assert found == want and stops == len(polls) > 2 * decoder.model.config.num_layers


def loaded(folder: Path, **settings: Any) -> SpecDecoder:
    given = {"device": "cpu", "dtype": "bfloat16", "max_seq_len": 64, "smoke": False, **settings}
    return SpecDecoder.from_pretrained(folder, **given)


@pytest.mark.slow_cases
@pytest.mark.parametrize("family", [*NAMES, *HYBRIDS, *SHORT, *UNLIKE, "gpt_oss", "diffllama", "llama"])
def test_native_families_go_on(tmp_path: Path, family: str) -> None:
    """Keeps out: a state, a latent, a selection of keys, or keys of another layer that the second half of a pass lacks; layers
    that run twice; weights that stay wide, or layers that stay wrapped, while requests run."""
    folder = NativeZoo(tmp_path / "zoo").changed(family, {}, tmp_path)[0]
    with loaded(folder) as decoder:
        hold_going_on(decoder)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", [*OTHERS, *own_attention.FAMILIES])
def test_models_of_transformers_go_on(tmp_path: Path, name: str) -> None:
    """Keeps out: what layers of a model leave for each other, lost between two calls of it."""
    families = Families(tmp_path)
    folder = families.target(name) if name in toolkit.families.FAMILIES else own_attention.save(tmp_path / name, name)
    with loaded(folder, backend="transformers") as decoder:
        hold_going_on(decoder)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kept", KEPT)
def test_passes_nearby_go_on(zoo: Zoo, kept: str) -> None:
    """Keeps out: an embedding that moves otherwise when its pass goes on, and noise of half a pass."""
    with zoo.decoder("llama3-tied-dim8", "eagle3", TREE, **{"dtype": "bfloat16", **KEPT[kept]}) as decoder:
        hold_going_on(decoder)


def test_a_model_that_can_not_go_on_begins_anew(tmp_path: Path) -> None:
    """Keeps out: right answers called wrong, because layers of a model leave for each other what no call of it keeps; and a
    share of a busy server's time in which no comparison ever ends; a model's own error that nobody is told."""
    with loaded(Families(tmp_path).target("llama"), backend="transformers") as decoder:
        driver, left, first, last = Driver(decoder), dict[str, torch.Tensor](), *(decoder.model.chain()[i].mlp for i in (0, -1))
        hooks = [
            decoder.model.decoder.register_forward_pre_hook(lambda *_: left.clear()),
            first.register_forward_hook(lambda _module, _given, out: left.update(first=out)),
            last.register_forward_hook(lambda _module, _given, out: out + left.get("first", 0)),
        ]
        assert why_not_going_on(driver) == "one that does ends in other hidden states"
        want, polls, check = (
            open_text(decoder)[0].run(),
            iter([False] * 6 + [True] + [False] * 3 + [True]),
            open_text(decoder)[0],
        )

        def poll() -> None:
            if next(polls, False):
                raise MadeWay

        check.passes.poll, calls, found = poll, 0, None
        while found is None:
            calls += 1
            with suppress(MadeWay):
                found = check.run()
        assert found == want and calls == 3
        busy = decoder.settings.with_options(audit=1.0, audit_busy=0.5, audit_folder=str(tmp_path))
        with pytest.raises(ValueError, match=r"audit_busy must be 0 .*\(one that .*\), got 0\.5; nearest .* audit_busy=0"):
            SpecDecoder(decoder.model, None, busy, decoder.tokenizer)
        for hook in hooks:
            hook.remove()
        assert not why_not_going_on(driver)
        with pytest.warns(RuntimeWarning, match=r"can't go on \(one that does ends in KeyError: 'first'\)$"):
            fragile = [
                decoder.model.decoder.register_forward_pre_hook(lambda *_: left.clear()),
                first.register_forward_hook(lambda _module, _given, out: left.update(first=out)),
                last.register_forward_hook(lambda _module, _given, out: out + left["first"]),
            ]
            audited = decoder.settings.with_options(audit=1.0, audit_folder=str(tmp_path))
            SpecDecoder(decoder.model, None, audited, decoder.tokenizer)
        for hook in fragile:
            hook.remove()


def auditing(zoo: Zoo, folder: Path, **settings: Any) -> SpecDecoder:
    decoder = zoo.decoder("llama", "eagle3", TREE, **{"audit": 1.0, "audit_folder": str(folder), **settings})
    auditor_of(Driver(decoder)).tell = lambda said: None
    return decoder


def test_a_busy_server_ends_its_comparisons(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a long text that never ends between requests; tokens, wrong ones and files that count with each part of it; a
    finding that ends drafts while requests wait, and changes their texts; answers that come meanwhile, lost."""
    with auditing(zoo, tmp_path, audit_stop=True) as decoder:
        driver, params = Driver(decoder), SamplingParams(max_tokens=30, temperature=0.9, seed=1)
        with fault("both sides"):
            driver.submit(PROMPTS[3], params)
            driver.run_until_idle()
        calls, later = 0, list[Any]()
        while totals_of(driver).audit_texts == 0:
            work_by_hand(driver, lambda: True)
            calls += 1
            if calls % 4 == 1:
                later.append(driver.submit(PROMPTS[calls % 6], SamplingParams(max_tokens=6, seed=calls, temperature=0.7)))
                driver.run_until_idle()
        found = totals_of(driver)
        assert (found.audit_interrupted, found.audit_tokens, found.audit_waiting) == (calls - 1, 30, len(later)) and calls > 10
        assert found.audit_mismatch > 0 and found.drafting_stopped == 1 and len(list(tmp_path.iterdir())) == 1
        wrong = found.audit_mismatch
        while auditor_of(driver).has_work:
            work_by_hand(driver, wanted_at(2))
        found = totals_of(driver)
        assert (found.audit_texts, found.audit_tokens, found.audit_mismatch) == (1 + len(later), 30 + 6 * len(later), wrong)
        assert len(list(tmp_path.iterdir())) == 1 and begun_by(driver) is None


def test_what_fails_after_it_has_made_way_is_dropped(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: the rest of a text that failed, taken for the next text's, and memory that a failed or closed audit keeps."""
    with auditing(zoo, tmp_path) as decoder:
        driver = Driver(decoder)
        for prompt in PROMPTS[2:4]:
            driver.submit(prompt, SamplingParams(max_tokens=9))
        driver.run_until_idle()
        work_by_hand(driver, wanted_at(2))
        begun = weakref.ref(begun_by(driver))
        hook = decoder.model.chain()[2].self_attn.register_forward_hook(lambda *_: [][0])
        while auditor_of(driver).has_work and not totals_of(driver).audit_skipped["failed"]:
            work_by_hand(driver, wanted_at(0))
        hook.remove()
        gc.collect()
        assert begun() is None and totals_of(driver).audit_skipped["failed"] == 1
        work_by_hand(driver, wanted_at(2))
        assert begun_by(driver) is not None
        work_by_hand(driver)
        found = totals_of(driver)
        assert (found.audit_texts, found.audit_tokens, found.audit_mismatch) == (1, 9, 0)
        driver.submit(PROMPTS[3], SamplingParams(max_tokens=9))
        driver.run_until_idle()
        work_by_hand(driver, wanted_at(2))
        begun = weakref.ref(begun_by(driver))
    del decoder, driver
    gc.collect()
    assert begun() is None


def test_requests_pay_no_more_than_their_share(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: an audit that takes more of the time than it was given, or none; that waits for an idle moment though it may
    not; and one that runs between steps though nobody allowed that."""
    with auditing(zoo, tmp_path, audit_busy=0.01) as decoder, auditing(zoo, tmp_path) as other:
        driver, auditor, now = Driver(decoder), auditor_of(Driver(decoder)), [5.0]
        auditor.clock = lambda: now[0]
        compare, took = auditor.compare, list[float]()

        def slowly(*given: Any) -> Any:
            now[0] += 0.25
            took.append(0.25)
            return compare(*given)

        for each in (driver, Driver(other)):
            each.submit(PROMPTS[2], SamplingParams(max_tokens=9))
            each.run_until_idle()
        assert not auditor_of(Driver(other)).is_due
        auditor.compare, begin = slowly, now[0]
        while auditor.has_work:
            if auditor.is_due:
                work_between_by_hand(driver)
                assert not auditor.is_due
            assert sum(took) <= 0.25 + 0.01 * (now[0] - begin)
            now[0] += 0.05
        found = totals_of(driver)
        assert (found.audit_texts, found.audit_mismatch, found.audit_interrupted) == (1, 0, 0) and len(took) >= 10


def test_the_thread_compares_between_steps(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a setting that the engine's thread does not look at, and texts that change because of it."""
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=90, temperature=0.8, seed=2)]
    with zoo.decoder("llama") as plain, auditing(zoo, tmp_path, audit_busy=1.0) as decoder:
        want = [text.token_ids for text in plain.generate(PROMPTS[2:4], params)]
        seen = at_ends(Driver(decoder))
        assert [text.token_ids for text in decoder.generate(PROMPTS[2:4], params, speculate=False)] == want
        assert seen == [0, 1], "the short one was compared while the long one ran"
