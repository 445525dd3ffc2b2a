"""The soak itself: calls in other processes, faults in this one, and everything that must be true afterwards."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specdec import SpecConfig, SpecDecoder, shipped
from specdec.serve.options import ServeOptions
from toolkit.driver import Driver
from toolkit.soak.calls import Call, Mix
from toolkit.soak.clients import Outcome, run_calls
from toolkit.soak.ends import compared, digests, plain_calls, sorted_ends
from toolkit.soak.faults import Faults
from toolkit.soak.leaks import Held, held, more_of, rss
from toolkit.soak.server import open_server
from toolkit.traffic.audit import audited, totals_of

KEY, MODEL, TREE = "soak", "soaked", SpecConfig(4, 2, 8)
KEEP_ALIVE, SETTLED = 7, 90.0  # seconds: of idle connections, which clients close after 5; until everything must be free
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "assistant:{% if enable_thinking %}<think>{% endif %}{# <tool_call> #}"
)
# Tokens of control characters, which no text has, become those that begin and end thoughts and calls of tools.
MARKS = {"Ā": "<think>", "ā": "</think>", "Ă": "<tool_call>", "ă": "</tool_call>"}
LIKED = ("</think>", "<tool_call>")  # some calls ask for more of them


@dataclass(frozen=True)
class Plan:
    """calls: after the warm-up.  warm_up: calls before the first count of what the process holds.  workers: calls at once.

    processes: of clients.  pause: steps of the engine between two faults, on average.  max_tokens: the most that a call
    asks for, without those of a call of a tool.  questions: how many different calls have one right answer.
    compare_seconds: for the comparison of their answers with plain decoding's; what is left then is not compared.
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
    questions: int = 60
    compare_seconds: float = 600.0


@dataclass
class Report:
    """problems: what must not be; empty after a good run.

    reasons: how many calls ended for which: done, a planted fault's name, and so on.  faults: how many happened, by kind.
    differing: of `repeated` calls that came more than once, how many got more than one answer.
    unequal: of `plain` different calls that were also decoded plainly, of `different` ones, how many got another answer then.
    memory: bytes after each second.  stepped_back: rows that gave their pages to others.  structured: whether some texts had
    to obey a grammar, and tools were there.  audited: tokens that the decoder's audit compared with the target.
    """

    seconds: float
    ends: dict[str, int]
    reasons: dict[str, int]
    faults: dict[str, int]
    repeated: int
    differing: int
    different: int
    plain: int
    unequal: int
    problems: list[str]
    memory: list[int]
    stepped_back: int
    structured: bool
    audited: int


def pair_with_chat(folder: Path, spec: SpecConfig = TREE, **settings: object) -> SpecDecoder:
    """The shipped pair, with a chat template and the marks of thoughts and tools, which it has none of."""
    target = Path(shutil.copytree(shipped.target_folder(), folder / "target"))
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}))
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    for character, mark in MARKS.items():
        vocab[mark] = vocab.pop(character)
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": vocab[mark], "content": mark})
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return SpecDecoder.from_pretrained(target, shipped.draft_folder(), spec, **settings)  # type: ignore[arg-type]


def soak(decoder: SpecDecoder, plan: Plan) -> Report:
    """Runs the plan against a decoder, and closes it."""
    texts = [json.loads(line)["prompt"] for line in shipped.prompts_file().read_text().splitlines()]
    structured = find_spec("llguidance") is not None  # which is an extra
    marks = {mark: decoder.encode(mark)[-1] for mark in LIKED}
    mix = Mix(MODEL, texts, decoder.model.config.vocab_size, plan.max_tokens, plan.questions, structured, marks)
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
        happened = dict(faults.happened)
        plain = list(second.plainly(plain_calls(calls, outcomes)))
        growth = more_of(before, settled(driver, before, plan.calls), plan.calls)
        driver.assert_nothing_leaked()
        totals = totals_of(driver)
    repeated, differing = compared(calls, outcomes)
    reasons, problems = sorted_ends(calls, outcomes, happened)
    answered, plainly = digests(calls, outcomes), digests(calls, plain)
    unequal = [key for key, (digest,) in plainly.items() if set(answered[key]) != {digest}]
    if plan.exact and (differing or unequal):
        problems.append(f"{differing} of {repeated} repeated calls got different answers; unlike plain decoding: {unequal}")
    if not repeated or not plainly:
        problems.append(f"{repeated} calls were repeated, {len(plainly)} were compared with plain decoding")
    if "failed" not in {outcome.end for outcome in outcomes}:
        problems.append(f"no call failed, with {len(happened)} faults")
    if plan.crowded and not totals.stepped_back:
        problems.append("no row stepped back")
    if totals.audit_mismatch or (decoder.settings.options.audit and not totals.audit_tokens):
        problems.append(f"the audit found {totals.audit_mismatch} wrong tokens among {totals.audit_tokens}")
    return Report(
        seconds, dict(Counter(str(outcome.end) for outcome in outcomes)), dict(reasons), dict(Counter(happened.values())),
        repeated, differing, len(answered), len(plainly), len(unequal), [*growth, *problems], second.memory,
        totals.stepped_back, structured, totals.audit_tokens,
    )  # fmt: skip


class Run:
    """Calls in other processes, with faults in the meantime."""

    def __init__(self, driver: Driver, faults: Faults, pool: ProcessPoolExecutor, url: str, plan: Plan) -> None:
        self.url, self.memory = url, [rss()]
        self._driver, self._faults, self._pool, self._plan = driver, faults, pool, plan

    def plainly(self, calls: Sequence[Call]) -> Iterator[Outcome]:
        """Runs calls without faults, some at a time, until all are done or the plan's time for it is over."""
        end, some = time.monotonic() + self._plan.compare_seconds, 4 * self._plan.workers
        for start in range(0, len(calls), some):
            if time.monotonic() < end:
                yield from (outcome for future in self._begin(calls[start : start + some]) for outcome in future.result())

    def _begin(self, calls: Sequence[Call]) -> list[Future[list[Outcome]]]:
        count = self._plan.processes
        return [self._pool.submit(run_calls, self.url, KEY, calls[i::count], self._plan.workers // count) for i in range(count)]

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Runs calls, with faults in the meantime."""
        chance, futures = random.Random(self._plan.seed), self._begin(calls)

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
