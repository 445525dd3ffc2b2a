"""Kept states of recurrent layers: every text goes on with the state of its own first tokens, and states are kept where texts
begin again.

Keeps out: a state that was overwritten before its row had read it, or that a chunk was to write which failed; a state a page
early or late; numbers that nobody gives back; cached tokens that were computed after all; a prompt that waits for a state which
nobody keeps.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from toolkit.driver import new_request
from toolkit.inside.memory import CHUNK, SPEC, drive
from toolkit.inside.state_memory import StateMemory, states_balance

from specdec.engine.chunks import ChunkBudget
from specdec.engine.launches.mixing import Mixing
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.pool import PagePool
from specdec.engine.pages.state_places import SHARE, StatePlaces, distance, worth_most
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.limits import RESERVED_STATES

ROWS, VOCAB = 4, 3


def engine_of(
    page_size: int, budget: int, chunk: ChunkBudget, tokens: int = 4000, seed: int = 0, depth: int = 1, mixing: int = 0
) -> Engine[StateMemory]:
    """budget: how many states are kept.  tokens: what the pool holds."""
    numbers = range(RESERVED_STATES + 2 * ROWS, RESERVED_STATES + 2 * ROWS + budget)
    admission = Admission(PagePool(tokens // page_size + 1, page_size), SPEC.lookahead, True, kept_states=numbers)
    states = admission.text_states
    assert states is not None
    admission.min_shared_to_wait, states.least, states.every = 8, 3, 24
    scheduler = Scheduler(
        admission, chunk, Speculation((SPEC,)), ROWS, pads_rows=False, mixing=Mixing(mixing) if mixing else None
    )
    memory = StateMemory(numbers, page_size, random.Random(seed), VOCAB)
    memory.scheduler = scheduler
    return Engine(scheduler, memory, depth)


# ---- random traffic ----


def arrivals(rng: random.Random, most: int, count: int) -> Iterator[Request]:
    """Requests that share beginnings, that go on with what earlier ones have written, and that fill the pool alone."""
    stems = [[rng.randrange(VOCAB) for _ in range(most)] for _ in range(2)]
    earlier: list[Request] = []
    for _ in range(count):
        ended = [request for request in earlier if request.output.finish_reason]
        if ended and rng.random() < 0.4:
            last = rng.choice(ended)
            stem = [*last.prompt_ids, *last.output.token_ids][: most - 9]
        else:
            stem = rng.choice(stems)[: rng.choice([most // 4, most // 3, rng.randrange(most // 2)])]
        prompt = stem + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        left = most - len(prompt)
        earlier.append(new_request(prompt, rng.choice([1, left, rng.randint(1, left)]), speculate=rng.random() < 0.8))
        yield earlier[-1]


@pytest.mark.slow_cases(keep=4)
@pytest.mark.parametrize("budget", [0, 1, 3, 40])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_traffic(page_size: int, budget: int) -> None:
    """Cancels, chunks that fail, rows that step back, pages that are evicted: what is asserted is in the runner."""
    rng = random.Random(f"{page_size} {budget}")
    chunk = rng.choice([ChunkBudget(7, 9, 11), ChunkBudget(40, 60, 80, most=CHUNK)])
    engine = engine_of(page_size, budget, chunk, rng.randint(100, 220), 0, rng.choice([0, 1, 2]), rng.choice([0, 20]))
    scheduler, memory = engine.scheduler, engine.runner
    scheduler.admission.lengths.rest = lambda written, most, number: 1  # type: ignore[method-assign]  # many step back
    coming = arrivals(rng, scheduler.admission.longest_text(140), 50)
    requests = drive(engine, coming, rng, lambda: states_balance(engine, memory))
    for request in requests:
        assert request.stats.cached_tokens == memory.begun.get(request, request.stats.cached_tokens)
    assert scheduler.admission.hit_tokens == sum(request.stats.cached_tokens for request in requests)
    assert engine.totals().stepped_back > 3 and (memory.hits > 5 * (budget > 1) if budget else not memory.hits)


# ---- where texts begin again ----

WHOLE, PARTS = ChunkBudget(4000, 4000, 4000), ChunkBudget(20, 20, 20)


def ask(engine: Engine[StateMemory], prompts: Sequence[Sequence[int]], speculate: bool = True) -> list[Request]:
    """Requests that come at once, when they have ended."""
    requests = [new_request(list(prompt), 9, speculate=speculate) for prompt in prompts]
    engine.submit(requests)
    while not engine.is_idle:
        engine.step()
    states_balance(engine, engine.runner)
    assert all(request.output.token_ids == engine.runner.output(request) for request in requests)
    return requests


def cached(engine: Engine[StateMemory], prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens each of them finds, if one comes after the other."""
    return [ask(engine, [prompt])[0].stats.cached_tokens for prompt in prompts]


def test_states_of_another_salt_are_not_found() -> None:
    """Keeps out: another caller's text whose state is found, and a part that keeps none since another salt's is promised."""
    engine, prompt = engine_of(4, 12, WHOLE), some(1, 83)
    found = list[int]()
    for salts in (["a"], ["b"], ["a"], ["c", "d"], ["d"]):
        requests = [new_request(prompt, 9) for _ in salts]
        for request, salt in zip(requests, salts, strict=True):
            request.cache_salt = salt
        engine.submit(requests)
        while not engine.is_idle:
            engine.step()
        found += [request.stats.cached_tokens for request in requests]
    assert found == [0, 0, 80, 0, 0, 80]


def some(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("chunk", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
class TestTextsThatBeginAgain:
    def last(self, prompt: Sequence[int], page_size: int) -> int:
        return (len(prompt) - 1) // page_size * page_size

    def test_a_prompt_comes_again_after_another_one(self, page_size: int, chunk: ChunkBudget) -> None:
        engine, a, b = engine_of(page_size, 12, chunk), some(1, 83), some(2, 70)
        assert cached(engine, [a, b, a]) == [0, 0, self.last(a, page_size)]

    def test_each_turn_of_a_conversation_begins_after_the_last_ones_prompt(self, page_size: int, chunk: ChunkBudget) -> None:
        engine, prompt, before = engine_of(page_size, 12, chunk), some(3, 50), [0]
        for turn in range(5):
            request = ask(engine, [prompt])[0]
            assert request.stats.cached_tokens == self.last(before, page_size)
            before, prompt = prompt, [*prompt, *request.output.token_ids, *some(turn, 21)]

    def test_the_third_text_after_a_system_prompt_finds_it(self, page_size: int, chunk: ChunkBudget) -> None:
        """The second one finds pages and no state after them, so it keeps one there."""
        engine, system = engine_of(page_size, 12, chunk), some(4, 97)
        endings = [[0, 1, 2, *some(5, 40)], [1, 2, 0, *some(6, 40)], [2, 0, 1, *some(7, 40)]]
        found = cached(engine, [[*system, *ending] for ending in endings])
        assert found[0] == 0 and found[1] in (0, 48, 72, 96) and found[2] == 97 // page_size * page_size - (page_size == 1)
        assert found[1] == 0 or chunk is PARTS, "every 24 tokens of a long prompt in parts"

    def test_texts_that_come_at_once_wait_for_what_they_share(self, page_size: int, chunk: ChunkBudget) -> None:
        """Each wave has as many as there are rows; the first of them computes the system prompt for all others."""
        engine, system = engine_of(page_size, 12, chunk), some(8, 97)
        requests = ask(engine, [[*system, *some(10 + i, 30)] for i in range(6)])
        found = [request.stats.cached_tokens for request in requests]
        assert found[0] == 0 and all(each >= 97 // page_size * page_size - page_size for each in found[1:]), found

    def test_nothing_is_kept_or_waited_for_without_numbers(self, page_size: int, chunk: ChunkBudget) -> None:
        engine, prompt = engine_of(page_size, 0, chunk), some(1, 83)
        assert cached(engine, [prompt, prompt]) == [0, 0] and engine.runner.writes == 0
        engine.submit([new_request(prompt, 9) for _ in range(3)])
        engine.step()
        assert len(engine.scheduler.states) == 3


def test_a_long_prompts_tail_is_lost_and_little_with_it() -> None:
    """Keeps out: a text that shares most of a long one, and begins from nothing; a long prompt that drops all other states."""
    engine, stem = engine_of(4, 16, PARTS), some(1, 400)
    (other,) = cached(engine, [some(2, 60)])
    found = cached(engine, [stem, [*stem[:230], *some(3, 30)], some(2, 60)])
    assert other == 0 and found[0] == 0 and 100 < found[1] <= 230 and found[2] == 56


def test_what_texts_share_of_a_text_that_has_passed_is_not_waited_for() -> None:
    """Keeps out: a prompt that waits for all chunks of another one whose state at their fork nobody can keep any more."""
    engine = engine_of(4, 12, PARTS, tokens=8000)
    long = some(1, 1000)
    engine.submit([new_request(long, 2)])
    while not engine.scheduler.states or engine.scheduler.states[0].done < 200:
        engine.step()
    engine.submit([new_request([*long[:150], *some(2, 30)], 2), new_request([*long[:700], *some(3, 30)], 2)])
    engine.step()
    assert [len(state.request.prompt_ids) for state in engine.scheduler.states] == [1000, 180]
    waits = engine.scheduler.waiting[0].request
    while not waits.has_entered:
        engine.step()
    assert engine.scheduler.states[0].done < 800 and waits.stats.cached_tokens > 680


def test_a_chunk_that_fails_keeps_nothing() -> None:
    """Keeps out: a state that was promised and never written, found at pages that another text has kept."""
    engine, system = engine_of(4, 12, WHOLE), some(4, 97)
    prompts = [[*system, first, *some(first, 40)] for first in (0, 1, 2)]
    assert cached(engine, prompts[:1]) == [0]
    engine.runner.fails = True
    failed = new_request(prompts[1], 9)
    engine.submit([failed])
    engine.step()
    engine.runner.fails = False
    assert isinstance(failed.error, MemoryError) and engine.runner.writes == 1
    states_balance(engine, engine.runner)
    assert cached(engine, [prompts[1], prompts[2]]) == [0, 96]


def test_the_state_that_was_used_least_recently_goes_first() -> None:
    engine, (a, b, c) = engine_of(4, 2, WHOLE), (some(seed, 83) for seed in (1, 2, 3))
    assert cached(engine, [a, b, a, c, a, b]) == [0, 0, 80, 0, 80, 0]


def test_a_system_prompts_state_does_not_go_first() -> None:
    """Keeps out: a state that others need, dropped because one text that went on after it has kept a later one."""
    engine, system = engine_of(4, 3, WHOLE), some(4, 97)
    endings = [[*system, i, *some(i, 40)] for i in (0, 1, 2)]
    assert cached(engine, [*endings, some(9, 83), [*system, 1, 1, *some(8, 40)]]) == [0, 0, 96, 0, 96]


def test_many_of_one_prompt_at_once_keep_one_state() -> None:
    """Keeps out: states that make room for several times the same one."""
    engine, a, b = engine_of(4, 2, WHOLE), some(1, 83), some(2, 83)
    cached(engine, [a])
    engine.scheduler.admission.min_shared_to_wait = 1000  # nobody waits
    assert [request.stats.cached_tokens for request in ask(engine, [b] * 4)] == [0] * 4 and engine.runner.writes == 2
    assert cached(engine, [a, b]) == [80, 80]


def test_a_state_outlives_pages_that_lack_the_drafters_part() -> None:
    """Keeps out: a system prompt's state that is dropped once a text that speculates has computed its pages anew."""
    engine, system = engine_of(4, 12, WHOLE), some(4, 97)
    endings = [[*system, i, *some(i, 40)] for i in (0, 1, 2)]
    for prompt in endings[:2]:
        ask(engine, [prompt], speculate=False)
    assert cached(engine, [endings[2], [*system, 2, 2, *some(8, 40)]]) == [0, 96]


def test_a_state_that_nobody_finds_yet_is_kept_once_its_row_leaves() -> None:
    """Keeps out: a state that made room for one which was written for nothing, because a row beside held the text's pages."""
    engine, system = engine_of(4, 12, WHOLE), some(4, 97)
    engine.scheduler.admission.min_shared_to_wait = 1000  # nobody waits
    endings = [[*system, i, *some(i, 40)] for i in (0, 1, 2)]
    ask(engine, endings)
    assert engine.runner.writes == 3 and cached(engine, endings) == [136] * 3


def test_conversations_need_one_state_each() -> None:
    """Keeps out: states of earlier turns that stay, where those of other conversations have to go."""
    engine, system = engine_of(4, 8, WHOLE), some(7, 41)
    chats, found = [[*system, i % 3, *some(i, 30)] for i in range(6)], list[int]()
    for _ in range(5):
        for i, prompt in enumerate(chats):
            request = ask(engine, [prompt])[0]
            found.append(len(prompt) - request.stats.cached_tokens)
            chats[i] = [*prompt, *request.output.token_ids, *some(i, 21)]
    assert all(computed <= 9 + 21 + 4 for computed in found[12:]), found


def test_a_text_begins_where_state_and_window_are() -> None:
    """Keeps out: a state found after pages whose keys in windows are gone, and the other way around."""
    rng, prompt = random.Random(0), list(range(161))
    for _ in range(200):
        admission = Admission(PagePool(60, 4), 8, True, PagePool(120, 4, 20), 9, kept_states=range(2, 30))
        states, copies, cache = admission.text_states, admission.copies, admission.cache
        assert states is not None and copies is not None and cache is not None
        request = new_request(prompt, 1)
        found = admission.find(request, True)
        assert found is not None and admission.admit(request, found)
        admission.keep(request, prompt, True, 80)
        admission.leave(request)
        path = cache.find(prompt, True)
        for node in rng.sample(path[:20], rng.randrange(1, 12)):
            copies.drop(node)
        kept = rng.sample(range(40), rng.randrange(9))
        for at in kept:
            number = states.kept.take()
            assert number is not None
            states.kept.enter(path[at], number)
        found = admission.find(request, True)
        allowed = [length for length in range(1, 41) if length - 1 in kept and copies.usable(path[:length]) == length]
        assert found is not None and len(found.path) == max(allowed, default=0)


# ---- places ----


def test_places_are_where_they_save_something() -> None:
    """Against a search of all places.  Keeps out: a place in another part, one that saves next to nothing, and a prompt's end
    kept where many could have begun."""
    rng = random.Random(0)
    for _ in range(3000):
        begun, last, every, least = rng.randrange(40), rng.randrange(200), rng.randint(1, 60), rng.randint(1, 9)
        shared = {i: rng.randrange(200) for i in range(rng.randrange(4))}
        start = begun + rng.randrange(60)
        end = start + rng.randint(1, 90)
        place = StatePlaces(begun, last, every, dict(shared)).choose(start, end, least)
        allowed = [at for at in range(start + 1, end + 1) if at - begun >= least]
        asked = [at for at in allowed if at in shared.values()]
        if asked:
            assert place in asked
            saved = {at: (at - begun) * sum(other >= at for other in asked) for at in asked}
            assert saved[place] == max(saved.values())
        elif last in allowed:
            assert place == last
        else:
            between = [at for at in allowed if at % every == 0 and at + every <= last]
            assert place == (between[-1] if between else None)


def test_one_prompt_takes_a_share_of_the_numbers() -> None:
    for numbers, tokens, page_size in ((1, 5000, 16), (8, 100_000, 16), (400, 100_000, 16), (40, 20_000, 1000), (9, 9, 6000)):
        every = distance(4096, page_size, tokens, numbers)
        assert every % page_size == 0 and every >= 4096 - page_size and tokens / every <= max(1, numbers / SHARE)
    assert distance(4096, 16, 100_000, 400) == 4096


def test_many_ask_and_most_are_served() -> None:
    assert worth_most([300, *[8000] * 7], 0) == 8000 and worth_most([1000, 1000, 1050], 0) == 1000
    assert all(a <= b for a, b in pairwise(worth_most([5, 9], begun) for begun in range(5)))
