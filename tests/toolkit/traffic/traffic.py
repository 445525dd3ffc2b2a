"""Random traffic over one decoder: requests arrive, are cancelled and fail at random, in chunks of random sizes.

The oracle is the request alone, in a decoder of its own without a drafter.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

from specdec import SamplingParams, SpecConfig
from specdec.engine.request import Request
from toolkit.driver import Driver
from toolkit.inside.hooks import PHASES
from toolkit.models import Zoo

SYSTEM = [(7 * i * i + 3 * i) % 40 for i in range(45)]  # what many prompts begin with, longer than several pages


class World(NamedTuple):
    """A target and a head of the zoo, settings of a decoder.  kept: how many tokens a kept state must save, at least.

    head: with the names of other sources after "+", see `Zoo.decoder`; requests then choose among them at random.
    """

    target: str
    head: str | None
    settings: dict[str, Any]
    kept: int | None = None

    @property
    def spec(self) -> SpecConfig | None:
        return self.settings.get("spec")


class Traffic:
    """One decoder, what its requests write alone, and a source of chance."""

    def __init__(self, zoo: Zoo, world: World, chance: random.Random) -> None:
        self.world, self.random = world, chance
        rows, page = chance.choice([1, 2, 3, 5]), chance.choice([1, 3, 4, 16])
        more = {key: value for key, value in world.settings.items() if key != "spec"}
        common: dict[str, Any] = {"dtype": "float64", "page_size": page, "max_seq_len": 160}
        self.decoder = zoo.decoder(world.target, world.head, world.spec, max_batch_size=rows, **common, **more)
        self.driver = Driver(self.decoder)
        if world.kept is not None:
            self.driver.keep_states_from(world.kept)
        # Scales of a float8 cache are those of its first pass: there the oracle is the decoder itself, without its drafter.
        self.own_oracle = more.get("kv_cache_dtype") == "fp8"
        cache = {key: more[key] for key in ("kv_cache_dtype",) if key in more}
        self.alone = (
            self.decoder if self.own_oracle else zoo.decoder(world.target, None, None, max_batch_size=1, **common, **cache)
        )
        self.texts: dict[tuple[Any, ...], list[int]] = {}

    def ask(self) -> tuple[list[int], SamplingParams]:
        """A prompt that shares its beginning with others, often, and how to sample from it."""
        chance = self.random
        prompt = SYSTEM[: chance.choice([0, 0, 5, 17, 33, 45])] + [chance.randrange(40) for _ in range(chance.randrange(1, 4))]
        if chance.random() < 0.2:
            prompt = [chance.randrange(40) for _ in range(chance.randrange(1, 110))]
        options: dict[str, Any] = chance.choice([{}, {}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}])
        if options:
            options["seed"] = chance.randrange(3)
        if chance.random() < 0.3:
            options["stop_token_ids"] = [chance.randrange(40)]
        return prompt, SamplingParams(max_tokens=chance.choice([1, 2, 9, 30]), **options)

    def submit(self, speculate: bool, streaming: bool) -> Request:
        """A request of `ask`; with several sources, some of them, and often a prediction that is wrong here and there."""
        (prompt, sampling), chance, salt = self.ask(), self.random, None
        names = () if self.decoder.head is None else self.decoder.head.sources
        if speculate and len(names) > 1:
            salt = chance.choice([None, None, "a", "b"])
            chosen = [name for name in names if chance.random() < 0.5]
            given: dict[str, Any] = {"sources": chosen or None} if self.decoder.head.takes_choices else {}
            if chance.random() < 0.5 and ("prediction" in chosen or not chosen):
                given["prediction"] = [id for id in self.want(prompt, sampling) if chance.random() < 0.9] or [3]
            elif "prediction" in chosen:
                given["sources"] = None
            sampling = replace(sampling, **given)
        how: dict[str, Any] = {"streaming": streaming, "speculate": speculate, "cache_salt": salt}
        return self.driver.add(self.decoder.new_request(self.decoder.encode(prompt), sampling, **how))

    def bring_corpus(self) -> None:
        """Some texts as a corpus, those of the oracle and others."""
        texts = [self.want(*self.ask()) for _ in range(3)]
        self.driver.bring_corpus([*texts, *(text[::-1] for text in texts), [5] * 500])

    def want(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """What it writes alone."""
        sampling = replace(sampling, prediction=None, sources=None)
        key = (tuple(prompt), sampling)
        if key not in self.texts:
            self.texts[key] = self.alone.generate([prompt], sampling, speculate=False)[0].token_ids
        return self.texts[key]

    def check(self, asked: list[tuple[Request, bool]]) -> int:
        """Compares every request's tokens with the text alone.  How many finished."""
        finished = 0
        for request, speculate in asked:
            want, got = self.want(request.prompt_ids, request.sampling), request.output.token_ids
            is_whole = request.error is None and not request.cancelled
            assert got == (want if is_whole else want[: len(got)]), (request.prompt_ids, request.sampling, speculate)
            finished += is_whole
        return finished


def drive(traffic: Traffic, events: int) -> tuple[list[tuple[Request, bool]], int]:
    """So many random events in one thread, then whatever is left runs to its end.  Rows step back in between.

    (what was asked for, how many of it finished), all of it right.
    """
    chance, driver = traffic.random, traffic.driver
    speculating = chance.choice([0.2, 0.7, 0.7, 1.0])
    driver.set_depth(chance.choice([0, 1, 1, 2]))
    if "corpus" in (traffic.world.head or ""):
        traffic.bring_corpus()
    with driver.stepping_back(random.Random(events), 0.1):
        asked = disturb(traffic, events, speculating)
    driver.assert_nothing_leaked()
    return asked, traffic.check(asked)


def disturb(traffic: Traffic, events: int, speculating: float) -> list[tuple[Request, bool]]:
    """What was asked for.  speculating: the share of requests that speculate."""
    chance, driver = traffic.random, traffic.driver
    asked: list[tuple[Request, bool]] = []
    for _ in range(events):
        event = chance.random()
        if event < 0.25:
            speculate = chance.random() < speculating
            asked.append((traffic.submit(speculate, streaming=chance.random() < 0.3), speculate))
        elif event < 0.32 and asked:
            driver.cancel(chance.choice(asked[-6:])[0])
        elif event < 0.36:
            driver.set_chunk(chance.choice([1, 2, 7, 20, 64, 10**6]))
            spec, mixes = traffic.decoder.settings.spec, traffic.decoder.model.config.recurrent is None
            if mixes and (spec is None or not spec.is_auto):
                driver.mix(chance.choice([None, 1, 20, 100]))
        elif event < 0.40:
            phases = [phase for phase in PHASES if driver.drafter is not None or PHASES[phase][0] != "drafter"]
            error: BaseException = chance.choice([ValueError("x"), MemoryError("x"), KeyboardInterrupt()])
            with driver.fail_in(chance.choice(phases), error, call=0):
                try:
                    driver.step()
                except type(error):
                    pass
        elif event < 0.42 and asked:
            break_output(chance.choice(asked[-6:])[0])
        else:
            driver.step()
        driver.assert_books_balance()
    driver.run_until_idle()
    return asked


def break_output(request: Request) -> None:
    """Its tokenizer fails from now on."""

    def fail(*_: Any) -> int:
        raise OSError("the tokenizer broke")

    request.output.take = fail  # type: ignore[method-assign]
