"""The soak itself: calls in other processes, faults in this one, and everything that must be true afterwards."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specdec import SpecConfig, SpecDecoder, shipped
from specdec.serve.options import ServeOptions
from toolkit.driver import Driver
from toolkit.soak.calls import Call, Mix
from toolkit.soak.clients import Outcome, run_calls
from toolkit.soak.faults import Faults
from toolkit.soak.leaks import Held, held, more_of, rss
from toolkit.soak.server import open_server
from toolkit.traffic.audit import audited, totals_of

KEY, MODEL = "soak", "soaked"
KEEP_ALIVE, SETTLED = 7, 90.0  # seconds: of idle connections, which clients close after 5; until everything must be free
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@dataclass(frozen=True)
class Plan:
    """calls: after the warm-up.  warm_up: calls before the first count of what the process holds.  workers: calls at once.

    processes: of clients.  pause: steps of the engine between two faults, on average.  max_tokens: the most that a call
    asks for.
    crowded: whether rows must step back, because the pool holds fewer texts than the batch has rows.
    exact: whether equal calls must get equal texts; in 16 bit two tokens may tie, and then what runs beside decides.
    """

    calls: int
    warm_up: int
    workers: int
    processes: int
    pause: int
    max_tokens: int
    exact: bool
    seed: int = 0
    crowded: bool = False


@dataclass
class Report:
    """problems: what must not be; empty after a good run.  differing: of `repeated` calls that came more than once, how many
    got more than one text.  memory: bytes after each second.  stepped_back: rows that gave their pages to others.  structured:
    whether some texts had to obey a grammar.  audited: tokens that the decoder's audit compared with the target."""

    seconds: float
    ends: dict[str, int]
    faults: dict[str, int]
    repeated: int
    differing: int
    problems: list[str]
    memory: list[int]
    stepped_back: int = 0
    structured: bool = False
    audited: int = 0


def pair_with_chat(folder: Path, **settings: object) -> SpecDecoder:
    """The shipped pair, with a chat template, which it has none of."""
    target = Path(shutil.copytree(shipped.target_folder(), folder / "target"))
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
    return SpecDecoder.from_pretrained(target, shipped.draft_folder(), SpecConfig(4, 2, 8), **settings)  # type: ignore[arg-type]


def soak(decoder: SpecDecoder, plan: Plan) -> Report:
    """Runs the plan against a decoder, and closes it."""
    texts = [json.loads(line)["prompt"] for line in shipped.prompts_file().read_text().splitlines()]
    structured = find_spec("llguidance") is not None  # which is an extra
    mix = Mix(MODEL, texts, decoder.model.config.vocab_size, plan.max_tokens, structured=structured)
    batch = decoder.settings.options.max_batch_size
    driver, options = Driver(decoder), ServeOptions(port=0, model_name=MODEL, api_key=KEY, max_queue=2 * batch)
    faults = Faults(driver, plan.seed)
    if plan.crowded:
        driver.expect_short_outputs()
    spawn = multiprocessing.get_context("spawn")
    with open_server(decoder, options, keep_alive=KEEP_ALIVE) as port, ProcessPoolExecutor(plan.processes, spawn) as pool:
        calls = mix.calls(plan.warm_up, plan.calls, plan.seed)  # before memory is looked at
        first = Run(driver, faults, pool, f"http://127.0.0.1:{port}/v1", plan)
        first.run(mix.calls(0, plan.warm_up, plan.seed))
        before = settled(driver, None, 0)
        faults.happened.clear()
        second = Run(driver, faults, pool, first.url, plan)
        start = time.monotonic()
        outcomes = second.run(calls)
        seconds = time.monotonic() - start
        growth = more_of(before, settled(driver, before, plan.calls), plan.calls)
        driver.assert_nothing_leaked()
        totals = totals_of(driver)
    repeated, differing = compared(calls, outcomes)
    problems = [*growth, *wrong_ends(calls, outcomes)]
    failed = sum(outcome.end == "failed" for outcome in outcomes)
    if not 0 < failed <= faults.happened.total() * batch:
        problems.append(f"{failed} calls failed after {faults.happened.total()} faults in batches of {batch}")
    if not repeated or (differing and plan.exact):
        problems.append(f"{differing} of {repeated} repeated calls got different texts")
    if plan.crowded and not totals.stepped_back:
        problems.append("no row stepped back")
    if totals.audit_mismatch or (decoder.settings.options.audit and not totals.audit_tokens):
        problems.append(f"the audit found {totals.audit_mismatch} wrong tokens among {totals.audit_tokens}")
    ends, more = Counter(str(outcome.end) for outcome in outcomes), (totals.stepped_back, structured, totals.audit_tokens)
    return Report(seconds, dict(ends), dict(faults.happened), repeated, differing, problems, second.memory, *more)


class Run:
    """Calls in other processes, with faults in the meantime."""

    def __init__(self, driver: Driver, faults: Faults, pool: ProcessPoolExecutor, url: str, plan: Plan) -> None:
        self.url, self.memory = url, [rss()]
        self._driver, self._faults, self._pool, self._plan = driver, faults, pool, plan

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        count, chance = self._plan.processes, random.Random(self._plan.seed)
        futures = [
            self._pool.submit(run_calls, self.url, KEY, calls[i::count], self._plan.workers // count) for i in range(count)
        ]

        def is_over() -> bool:
            return all(future.done() for future in futures)

        start = time.monotonic()
        while not is_over():
            self._faults.one(is_over)
            next_fault = self._faults.steps + chance.expovariate(1 / self._plan.pause)
            while self._faults.steps < next_fault and not is_over():
                time.sleep(0.01)
                if time.monotonic() - start > len(self.memory):
                    self.memory.append(rss())
        return [outcome for future in futures for outcome in future.result()]


def settled(driver: Driver, before: Held | None, requests: int) -> Held:
    """What the process holds once its clients have gone: as soon as it is no more than before, or else after a while.

    The server closes connections a moment after its clients do, and remembers broken ones for as long as idle ones.
    """
    deadline = time.monotonic() + SETTLED
    if before is None:
        time.sleep(KEEP_ALIVE + 1)
        _first = held()  # stays in memory while the next one is counted, as the one before does later
    while True:
        if driver.decoder.auditor is not None:
            audited(driver)
        driver.settle()
        now = held()
        if driver.is_idle and (before is None or not more_of(before, now, requests)):
            return now
        if time.monotonic() > deadline:
            return now
        del now
        time.sleep(0.5)


def wrong_ends(calls: Sequence[Call], outcomes: Sequence[Outcome]) -> list[str]:
    """Calls that ended as they must not, or not at all."""
    by_number = {outcome.number: outcome for outcome in outcomes}
    found = [] if len(by_number) == len(outcomes) == len(calls) else [f"{len(outcomes)} ends of {len(calls)} calls"]
    for call in calls:
        outcome = by_number[call.number]
        expected = {"refused", "left"} if call.invalid else {"answered", "busy", "failed", "left"}
        if outcome.end not in expected or (outcome.end == "left" and call.fate not in ("before", "midway")):
            found.append(f"call {call.number} was {outcome.end} ({outcome.said}): {call}"[:600])
    return found


def compared(calls: Sequence[Call], outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """(different calls that were answered more than once, how many of them got more than one text)."""
    keys = {call.number: call.same_text for call in calls}
    digests: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.end == "answered" and (key := keys[outcome.number]):
            digests[key].append(outcome.digest)
    several = [found for found in digests.values() if len(found) > 1]
    return len(several), sum(len(set(found)) > 1 for found in several)
