"""Rows with and without speculation in one batch: each writes, and counts, what it does alone.

The oracle of a text is transformers, or the request alone in a decoder of its own.  Float64, so that no near-tie decides.
"""

import itertools
import random
from typing import Any

import pytest
import torch
from toolkit.driver import Driver, new_request
from toolkit.models import Zoo, ragged_prompts
from toolkit.pages import nodes_of
from toolkit.prompts import SYSTEM

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.request import Request
from specdec.generation import Stats
from specdec.limits import MAX_PAUSE
from specdec.steps import CatchUp, RunChunk, RunRound, Step

CHAIN, TREE, AUTO = SpecConfig(3, 1, 4), SpecConfig(3, 4, 12), SpecConfig("auto", 2, 8)
SETTINGS: dict[str, Any] = {"dtype": "float64", "page_size": 4, "max_batch_size": 3, "max_seq_len": 160}


def watch(decoder: SpecDecoder) -> list[Step]:
    """A list that grows with every step that the runner gets."""
    seen: list[Step] = []
    Driver(decoder).watch(seen.append)
    return seen


def kinds(steps: list[Step]) -> list[str]:
    return [step.kind for step in steps if isinstance(step, RunRound)]


def random_requests(zoo_prompts: list[list[int]], rng: random.Random) -> list[tuple[list[int], SamplingParams, bool]]:
    """Prompts in random order, some with a common beginning, with random lengths, sampling and speculation."""
    asked = []
    for index in range(14):
        prompt = rng.choice([SYSTEM[: rng.choice([9, 33])], []]) + rng.choice(zoo_prompts)
        options = rng.choice([{}, {}, {"temperature": 0.9}, {"temperature": 1.2, "top_k": 5, "top_p": 0.9}])
        asked.append((prompt, SamplingParams(max_tokens=rng.choice([1, 4, 15, 30]), seed=index, **options), rng.random() < 0.5))
    return asked


def run_apart(decoder: SpecDecoder, asked: list[tuple[list[int], SamplingParams, bool]], rng: random.Random) -> list[Request]:
    """Submits the requests between random steps, so that rows enter and leave all the time."""
    driver, requests = Driver(decoder), []
    for prompt, sampling, speculate in asked:
        requests.append(driver.submit(prompt, sampling, speculate))
        for _ in range(rng.randrange(5)):
            driver.step()
            driver.assert_books_balance()
    driver.run_until_idle()
    driver.assert_nothing_leaked()
    return requests


def comparable(stats: Stats) -> dict[str, Any]:
    """What does not depend on who ran before: all but the tokens found in the prefix cache."""
    return {name: value for name, value in vars(stats).items() if name != "cached_tokens"}


CASES = [
    ("llama", "eagle3", CHAIN, 0, {}), ("llama", "eagle1-two-layers", TREE, 0, {}),
    ("llama", "eagle3", TREE, 1, {"prefix_caching": True}), ("qwen2", "eagle1", CHAIN, 0, {"prefix_caching": True}),
    ("mistral", "eagle3-window", TREE, 1, {}), ("llama", None, None, 1, {"prefix_caching": True}),
]  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.parametrize(("target", "head", "spec", "depth", "more"), CASES, ids=str)
def test_each_row_is_what_it_is_alone(
    zoo: Zoo, target: str, head: str | None, spec: SpecConfig | None, depth: int, more: dict[str, Any]
) -> None:
    """Keeps out: a draft token accepted in a plain row, rounds counted as drafted there, a neighbour's drafter keys spoilt by
    those that a plain row lacks.  Unwritten slots of the drafter hold NaN, and rows share pages wherever they can."""
    rng = random.Random(f"{target} {head} {spec}")
    asked = random_requests(ragged_prompts(40, 6, seed=4), rng)
    mixed = zoo.decoder(target, head, spec, **SETTINGS, **more)
    alone = zoo.decoder(target, head, spec, **{**SETTINGS, "max_batch_size": 1})
    Driver(mixed).set_depth(depth)
    if more and head:
        Driver(mixed).set_least_shared(1)
    if head:
        Driver(mixed).poison_free_slots(torch.nan, "draft")
    steps = watch(mixed)
    for request, (prompt, sampling, speculate) in zip(run_apart(mixed, asked, rng), asked, strict=True):
        (want,) = alone.generate([prompt], sampling, speculate=speculate)
        assert request.output.token_ids == want.token_ids
        assert comparable(request.stats) == comparable(want.stats), (prompt, speculate)
    assert set(kinds(steps)) == ({"plain", "speculative"} if head else {"plain"})
    assert {step.drafted for step in steps if isinstance(step, RunChunk)} == ({True, False} if head else {False})


@pytest.mark.slow_cases
@pytest.mark.parametrize(("depth", "more"), [(0, {}), (1, {"prefix_caching": True})], ids=["", "kept"])
def test_pauses_while_rows_come_and_go(zoo: Zoo, depth: int, more: dict[str, Any]) -> None:
    """Keeps out: a plain row that counts tokens for a drafter's catching up, more pending tokens than there is room for, a
    cached page whose last keys the drafter never saw because a pause was forgotten."""
    rng = random.Random(depth)
    asked = random_requests(ragged_prompts(40, 6, seed=9), rng) * 2
    mixed, alone = (zoo.decoder("llama", "eagle3", AUTO, **SETTINGS, **settings) for settings in (more, {}))
    driver = Driver(mixed)
    driver.set_depth(depth)
    driver.poison_free_slots(torch.nan, "draft")
    driver.script_levels(*[rng.choice([0, 0, 0, 1, 3]) for _ in range(200)], 2)
    steps = watch(mixed)

    def look() -> None:
        pending_B = driver.drafter.rows.pending_B
        assert int(pending_B.max()) <= driver.pause <= MAX_PAUSE
        assert not pending_B[driver._workers.state.speculates_B == 0].any()

    driver.before_each_round(look)
    for request, (prompt, sampling, speculate) in zip(run_apart(mixed, asked, rng), asked, strict=True):
        assert request.output.token_ids == alone.generate([prompt], sampling, speculate=speculate)[0].token_ids
        assert speculate or request.stats.drafted == 0
    assert set(kinds(steps)) == {"plain", "paused", "speculative"} and any(isinstance(step, CatchUp) for step in steps)
    for node in nodes_of(driver._scheduler.admission.cache) if more else []:
        assert not node.drafted or bool(driver.page_kv("draft", node.page).isfinite().all())


def test_a_pause_ends_with_the_last_row_that_speculates(zoo: Zoo) -> None:
    """Keeps out: a drafter that catches up for nobody, and a new row whose pause begins in the middle."""
    decoder = zoo.decoder("llama", "eagle3", AUTO, **SETTINGS)
    driver, steps = Driver(decoder), watch(decoder)
    driver.script_levels(0)
    plain = driver.add(new_request([5, 9, 2], 60, speculate=False))
    driver.add(new_request([3, 1, 4], 8))
    while driver.pause < 5:
        driver.step()
    while len(driver.running) == 2:
        driver.step()
    assert driver.pause == 0 and not plain.is_done
    driver.script_levels(3)
    steps.clear()
    late = driver.add(new_request([7, 7], 12))
    driver.run_until_idle()
    assert "plain" in kinds(steps) and "speculative" in kinds(steps) and not any(isinstance(step, CatchUp) for step in steps)
    for request in (plain, late):
        assert request.output.token_ids == zoo.greedy("llama", request.prompt_ids, 60)[: request.sampling.max_tokens]
    driver.assert_nothing_leaked()


def test_the_chooser_sees_rows_that_speculate_alone(zoo: Zoo) -> None:
    """Keeps out: levels chosen by the acceptance of rows that may accept nothing, or for rows that gain nothing."""
    decoder = zoo.decoder("llama", "eagle3", AUTO, **SETTINGS)
    driver = Driver(decoder)
    controller = driver._scheduler.speculation.controller
    shares, observed = [], []

    def choose(rows: int, share: float, pause: int, ready: object) -> SpecConfig:
        shares.append(share)
        return SpecConfig(2, 1)

    controller.choose = choose
    controller.observe = lambda size, shape, seconds, accepted, best, tokens, matched: observed.append(
        (len(accepted), len(best), tokens)
    )
    requests = [driver.add(new_request([3, row], 12, speculate=row == 1)) for row in range(3)]
    driver.run_until_idle()
    assert shares[0] == pytest.approx(1 / 3) and observed and {counts[:2] for counts in observed} == {(1, 1)}
    tokens = [counts[2] for counts in observed]
    assert tokens[0] == 3 * (2 + 1) and all(3 <= b - a <= 5 for a, b in itertools.pairwise(tokens[:4])), "tokens of all rows"
    assert [request.stats.drafted > 0 for request in requests] == [False, True, False]


@pytest.mark.slow_cases
@pytest.mark.parametrize("shares", [False, True])
def test_a_row_that_speculates_takes_no_page_that_the_drafter_did_not_write(zoo: Zoo, shares: bool) -> None:
    """Plain rows keep a text's pages in use while a row with the same text speculates.  Keeps out: a page replaced under its
    reader, NaN of pages that plain rows read together in a row that reads none of them, a page that stays undrafted for good.
    """
    decoder = zoo.decoder("llama", "eagle3", TREE, **{**SETTINGS, "max_batch_size": 4}, prefix_caching=True)
    alone = zoo.decoder("llama", "eagle3", TREE, **SETTINGS)
    driver = Driver(decoder)
    driver.set_least_shared(1 if shares else 10**9)
    driver.poison_free_slots(torch.nan, "draft")
    seen = driver.watch_sharing()
    sampling = SamplingParams(max_tokens=20)
    first = driver.submit([*SYSTEM, 1], SamplingParams(max_tokens=60), speculate=False)
    while not first.output.token_ids:
        driver.step()
    others = [driver.submit([*SYSTEM, 2 + row], sampling, speculate=False) for row in range(2)]
    while len(others[1].output.token_ids) < 3:
        driver.step()
    assert not shares or (3, 36) in seen, "plain rows alone do share pages that lack the drafter's keys"
    seen.clear()
    fast = driver.submit([*SYSTEM, 7], sampling)
    while not fast.is_done:
        driver.step()
        driver.assert_books_balance()
    assert not first.is_done and not seen, "no row shares such a page while the drafter runs"
    (want,) = alone.generate([[*SYSTEM, 7]], sampling)
    assert fast.output.token_ids == want.token_ids and comparable(fast.stats) == comparable(want.stats)
    assert fast.stats.cached_tokens == 0 and not driver.kept_pages(SYSTEM)
    driver.run_until_idle()
    for cached in (
        0,
        36,
    ):  # once no plain row reads the pages, the first that speculates replaces them, and the next finds them
        (again,) = decoder.generate([[*SYSTEM, 8]], sampling)
        assert again.stats.cached_tokens == cached
    driver.assert_nothing_leaked()


def test_pages_with_drafter_keys_are_shared_by_both(zoo: Zoo) -> None:
    """Keeps out: rows that stop reading together as soon as one of them does not speculate."""
    decoder = zoo.decoder("llama", "eagle3", TREE, **SETTINGS, prefix_caching=True)
    alone = zoo.decoder("llama", "eagle3", TREE, **SETTINGS)
    driver, sampling = Driver(decoder), SamplingParams(max_tokens=16)
    driver.set_least_shared(1)
    decoder.generate([SYSTEM], SamplingParams(max_tokens=1))
    seen = driver.watch_sharing()
    requests = [driver.submit([*SYSTEM, row], sampling, speculate=row != 1) for row in range(3)]
    driver.run_until_idle()
    assert (3, 36) in seen
    for row, request in enumerate(requests):
        (want,) = alone.generate([[*SYSTEM, row]], sampling, speculate=row != 1)
        assert request.output.token_ids == want.token_ids and comparable(request.stats) == comparable(want.stats)


def test_forced_acceptance_leaves_plain_rows_alone(zoo: Zoo) -> None:
    """Keeps out: a plain row whose text is forced because its neighbour's is."""
    decoder = zoo.decoder("llama", "eagle3", CHAIN, **SETTINGS)
    driver = Driver(decoder)
    driver.force_acceptance([1.0] * 3)
    plain, fast = (driver.submit([4, 5, row], SamplingParams(max_tokens=21), speculate=bool(row)) for row in range(2))
    driver.run_until_idle()
    assert plain.output.token_ids == zoo.greedy("llama", [4, 5, 0], 24)[:21]
    assert fast.stats.accept_length == 4 and plain.stats.accept_length == 1 and plain.stats.drafted == 0
