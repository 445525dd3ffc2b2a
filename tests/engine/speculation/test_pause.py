"""num_steps="auto" in the engine: pauses change neither the text nor how many draft tokens are accepted after them.

Keeps out: a drafter that reads keys after a pause which it never wrote.  The text stays right, and only acceptance falls.
"""

from dataclasses import fields
from typing import Any

import pytest
import toolkit.heads.block_zoo  # noqa: F401 (the zoo has its heads by name)
import torch
from toolkit.driver import Driver, new_request
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.batch.state import BatchState
from specdec.limits import MAX_PAUSE
from specdec.steps import Needs

LENGTH = 60


def make(zoo: Zoo, kind: str, topk: int, depth: int = 0) -> SpecDecoder:
    spec = SpecConfig("auto", topk, 12 if topk > 1 else 8)
    decoder = zoo.decoder("llama", kind, spec, page_size=4, max_batch_size=4, max_seq_len=160)
    Driver(decoder).set_depth(depth)
    return decoder


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("kind", "topk", "pause", "depth"),  # any two of the four meet
    [
        ("eagle3", 1, 1, 0),
        ("eagle3", 3, MAX_PAUSE, 1),
        ("eagle1", 1, MAX_PAUSE, 0),
        ("eagle1", 3, 1, 1),
        ("eagle1", 3, MAX_PAUSE + 5, 0),
        ("eagle3", 1, MAX_PAUSE + 5, 1),
    ],
)
def test_acceptance_after_a_pause_is_that_of_a_run_without_one(zoo: Zoo, kind: str, topk: int, pause: int, depth: int) -> None:
    """Two rounds, a pause, more rounds: every round after the pause accepts what it would accept after a fresh prefill."""
    decoder = make(zoo, kind, topk, depth)
    before = 2
    Driver(decoder).script_levels(*[3] * before, *[0] * pause, 3)
    (whole,) = decoder.generate([5, 9, 2, 7], SamplingParams(max_tokens=before * 4 + pause + 24))
    accepted = whole.stats.accepted_per_round
    emitted = sum(a + 1 for a in accepted[: before + pause])
    assert accepted[before : before + pause] == [0] * pause
    prompt = [5, 9, 2, 7, *whole.token_ids[:emitted]]  # without the bonus token, which the fresh prefill samples
    Driver(decoder).script_levels(3)
    (fresh,) = decoder.generate(prompt, SamplingParams(max_tokens=len(whole.token_ids) - emitted))
    assert fresh.token_ids == whole.token_ids[emitted:]
    assert fresh.stats.accepted_per_round == accepted[before + pause :]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_rows_that_enter_and_leave_during_pauses(zoo: Zoo, depth: int) -> None:
    """Keeps out: a row moved without its pending tokens, a new row that inherits another's, a first level overwritten."""
    decoder = make(zoo, "eagle3", 3, depth)
    prompts = ragged_prompts(40, 9, seed=5)
    params = [SamplingParams(max_tokens=length) for length in (3, 17, 9, 24, 12, 5, 21, 24, 8)]
    want = [zoo.greedy("llama", prompt, 24)[: p.max_tokens] for prompt, p in zip(prompts, params, strict=True)]
    Driver(decoder).script_levels(*[2, 0, 0, 0, 3, 0, 0, 1, 0, 5] * 30)
    outputs = decoder.generate(prompts, params)
    assert [out.token_ids for out in outputs] == want
    alone = make(zoo, "eagle3", 3)
    for out, p in zip(outputs, params, strict=True):
        assert out.stats.emitted - out.stats.truncated + 1 == p.max_tokens
    Driver(alone).script_levels(0)
    assert [out.token_ids for out in alone.generate(prompts, params)] == want


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("topk", [1, 4])
def test_auto_writes_the_same_text(zoo: Zoo, topk: int) -> None:
    """With the real chooser, which probes: the text is the greedy text, and all pages and rows are free at the end."""
    decoder = make(zoo, "eagle3", topk)
    prompts = ragged_prompts(40, 9, seed=2)
    for _ in range(2):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=24))
        assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    Driver(decoder).assert_nothing_leaked()


@pytest.mark.parametrize(("topk", "nodes"), [(1, 2), (1, 5), (1, None), (2, 5), (4, None), (4, 40), (10, 60), (64, 1024)])
def test_what_auto_chooses_from(topk: int, nodes: int | None) -> None:
    """Keeps out: a shape that asks for more nodes than its tree has or than was allowed, and more look-ahead than was kept."""
    spec = SpecConfig("auto", topk, nodes)
    chains = [shape.max_steps for shape in spec.shapes if shape.topk == 1]
    assert any(shape.topk > 1 for shape in spec.shapes) == (topk > 1)  # a topk that does nothing is refused
    assert chains == [levels for levels in (1, 2, 3, 4, 5, 7, 10) if levels < spec.num_draft_tokens]
    assert len(set(spec.shapes)) == len(spec.shapes) and SpecConfig(5, 1).shapes == (SpecConfig(5, 1),)
    for shape in spec.shapes:
        assert shape.topk <= topk and shape.num_draft_tokens <= spec.num_draft_tokens and shape.max_steps <= spec.max_steps
        assert spec.lookahead >= max(shape.lookahead, MAX_PAUSE)
    assert (SpecConfig(5, 4, 16) in spec.shapes) == (topk > 1 and spec.num_draft_tokens in (16, 64, 1024))
    with pytest.raises(ValueError, match="num_steps must be an int or 'auto', got 'best'; nearest setting: 'auto'"):
        SpecConfig("best")  # type: ignore[arg-type]


def test_a_pause_longer_than_a_text_leaves_no_hole(zoo: Zoo) -> None:
    """Keeps out: a short text within a pause, whose pages are kept as if the drafter had seen all of it."""
    decoder = zoo.decoder("llama", "eagle3", SpecConfig("auto", 3, 12), page_size=4, max_batch_size=2, prefix_caching=True)
    driver = Driver(decoder)
    driver.poison_free_slots(1e4, "draft")
    driver.script_levels(3, *[0] * 200)
    long, short = new_request([5, 9, 2, 7, 1], 80), new_request([11, 3, 8], 17)
    driver.add(long)
    while driver.pause < 13:
        driver.step()
    driver.add(short)
    while not short.is_done:
        driver.step()
    assert driver.pause > len(short.prompt_ids) + len(short.output.token_ids)
    kept = driver.kept_pages(short.prompt_ids + short.output.token_ids)
    assert not any(bool((driver.page_kv("draft", page) == 1e4).any()) for page in kept)
    driver.cancel(long)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle", "dflash2", "dspark"])
def test_catching_up_changes_those_rows_alone_that_have_missed_something(zoo: Zoo, kind: str) -> None:
    """Keeps out: drafts of a row that entered in a pause made of what its neighbours have missed, or of what the row's last
    owner had; a row that drafts on as if no round had been paused."""
    decoder = zoo.decoder("llama", kind, SpecConfig("auto", 2, 6), page_size=4, max_batch_size=2)
    driver, seen = Driver(decoder), set[tuple[bool, bool]]()
    drafter = driver.drafter
    kept = [field.name for field in fields(drafter.rows) if "pending" not in field.name]

    class Watched:
        inner = drafter

        def catch_up(self, state: BatchState, needs: Needs) -> None:
            missed_B = drafter.rows.pending_B.clone()
            before = [getattr(drafter.rows, name).clone() for name in kept]
            drafter.catch_up(state, needs)
            for row in state.active_B.nonzero().flatten().tolist():
                now = [getattr(drafter.rows, name) for name in kept]
                same = all(torch.equal(old[row], new[row]) for old, new in zip(before, now, strict=True))
                seen.add((bool(missed_B[row]), not same))

        def __getattr__(self, name: str) -> Any:
            return getattr(drafter, name)

    driver.replace_drafter(Watched())
    driver.set_depth(0)
    driver.script_levels(*[2, 0, 0] * 20)
    decoder.generate(ragged_prompts(40, 7), [SamplingParams(max_tokens=n) for n in (3, 14, 5, 4, 9, 5, 6)])
    assert kept and seen == {(True, True), (False, False)}
