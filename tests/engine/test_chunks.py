"""How a chunk's budget is shared among prompts, on random prompts: sums, order and fairness."""

import math
import random

import pytest

from specdec.engine.chunks import FAIR_SHARE, GRANULES, ChunkBudget, PromptRest


def random_prompts(rng: random.Random) -> list[PromptRest]:
    return [PromptRest(rng.choice([0, 0, 5, 3000]), rng.choice([1, 20, 300, 5000])) for _ in range(rng.randrange(1, 9))]


@pytest.mark.parametrize("doubling", [math.inf, 1000.0])
@pytest.mark.parametrize("running", [0, 100])
def test_a_chunk_keeps_to_its_budget(running: int, doubling: float) -> None:
    """Keeps out: a chunk beyond its budget, an empty one, tokens that a prompt does not have."""
    rng = random.Random(1)
    budget = ChunkBudget(600, 1500, 4000, doubling)
    for _ in range(400):
        prompts = random_prompts(rng)
        shares = budget.share(prompts, running)
        assert all(0 <= share <= left.tokens for share, left in zip(shares, prompts, strict=True)) and sum(shares) > 0
        cost = sum(budget.cost(left.start, share) for share, left in zip(shares, prompts, strict=True))
        parts = [share for share, left in zip(shares, prompts, strict=True) if 0 < share < left.tokens]
        assert cost <= (600 if running else 4000) or sum(shares) == 1
        if not running and len(parts) == sum(share > 0 for share in shares):
            assert cost <= 1500 or sum(shares) == 1, "parts alone take no more than `alone`"


def test_short_prompts_come_first_and_the_oldest_gets_its_share() -> None:
    """Keeps out: a short prompt that waits while tokens of a longer one run, and a long one that never runs."""
    rng = random.Random(2)
    budget = ChunkBudget(600, 600, 600)
    for _ in range(400):
        prompts = random_prompts(rng)
        shares = budget.share(prompts, running=100)
        waiting = [left.tokens for left, share in zip(prompts, shares, strict=True) if not share]
        running = [left.tokens for left, share in zip(prompts[1:], shares[1:], strict=True) if share]
        assert not waiting or not running or max(running) <= min(waiting), (prompts, shares)
        assert shares[0] >= min(prompts[0].tokens, 600 // FAIR_SHARE) - max(GRANULES) % 600 or shares[0] >= 1


def test_a_token_costs_twice_as_much_where_attention_doubles_it() -> None:
    """Keeps out: the end of a long prompt whose chunks take three times as long as those of its beginning."""
    budget = ChunkBudget(2048, 2048, 2048, doubling=16000.0)
    assert budget.cost(16000, 1) == pytest.approx(2.0, rel=1e-4)
    near, far = (budget.share([PromptRest(start, 9000)], running=100)[0] for start in (0, 32000))
    assert near % max(GRANULES) == far % max(GRANULES) == 0 and 1.9 < near / far < 4.1
    assert budget.cost(32000, far) <= 2048 and budget.cost(0, near) <= 2048


def test_a_chunk_of_one_token_goes_on() -> None:
    """Keeps out: a budget that does not pay for a single token of a long context, and an engine that waits for ever."""
    assert ChunkBudget(1, 1, 1, doubling=10.0).share([PromptRest(5000, 3)], running=100) == [1]


def test_a_ring_bounds_each_prompt_by_itself() -> None:
    """Keeps out: a pass that brings more of one prompt than the ring of pages has room for."""
    budget = ChunkBudget(9000, 9000, 9000, most=2048)
    assert budget.share([PromptRest(0, 5000), PromptRest(0, 100), PromptRest(0, 2048)], running=0)[1:] == [100, 2048]
    assert budget.share([PromptRest(0, 5000)], running=0) == [2048]
    fair = 2048 - 100 % GRANULES[0]  # its fair share and more
    assert budget.share([PromptRest(0, 5000), PromptRest(0, 100)], running=0) == [fair, 100]


def test_a_burst_of_short_prompts_enters_together() -> None:
    """Keeps out: 32 prompts at once, between whose chunks rounds of a few rows take the time of a full batch; and rows that
    wait for a long prompt, or for one short one, longer than for a chunk."""
    budget = ChunkBudget(600, 900, 2400)
    eight = [PromptRest(0, 300)] * 8
    assert sum(budget.share(eight, running=7)) == sum(budget.share(eight, running=16)) == 2400
    assert sum(budget.share(eight, running=17)) == 600 and sum(budget.share([PromptRest(0, 300)], running=17)) == 300
    for running in (1, 4):
        assert sum(budget.share([PromptRest(0, 2000)], running)) <= 600
        shares = budget.share([PromptRest(0, 2000), *eight[:4]], running)
        assert shares[1:] == [300] * 4 and shares[0] <= 600 // FAIR_SHARE
