"""How large a chunk is that shares a pass with a round, and when the scheduler plans one."""

import random

import pytest
from toolkit.driver import new_request
from toolkit.inside.rows_only import RowsOnly

from specdec import SpecConfig
from specdec.engine.chunks import GRANULES, ChunkBudget, PromptRest
from specdec.engine.launches.mixing import WAITING, Mixing
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.pool import PagePool
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.steps import Grammar, RunChunk, RunMixed, RunRound

CHAIN = SpecConfig(3, 1, 4)
BUDGET = ChunkBudget(2048, 3072, 8192, doubling=14_600.0)


def test_a_pass_is_small_until_many_tokens_wait() -> None:
    """Keeps out: a pass of 2,048 tokens for one prompt of 1,100, which all rows wait for; and a full server whose rows stand
    empty because each pass takes few tokens of the prompts."""
    rng = random.Random(0)
    for _ in range(300):
        nodes = 6 << rng.randrange(6)
        prompts = [PromptRest(rng.randrange(3000), rng.randrange(1, 5000)) for _ in range(rng.randrange(1, 12))]
        budget = Mixing(1024).budget(BUDGET, nodes, prompts)
        shares, waiting = budget.share(prompts, running=8), sum(left.tokens for left in prompts)
        both = nodes + sum(shares)
        assert 0 < sum(shares) and both <= min(2048, max(1024, waiting // WAITING))
        assert sum(shares) == waiting or both % GRANULES[-1] == 0 or min(shares) < max(shares)
        if waiting >= 8192 + 256 and all(left.start == 0 for left in prompts):
            assert both > 1024


@pytest.mark.parametrize("least", [64, 1024])
def test_no_pass_costs_more_than_the_caller_s_chunks(least: int) -> None:
    """Keeps out: prefill_chunk=64 that the default of a device overrules; a chunk of nothing beside many nodes."""
    given = ChunkBudget(64, 64, 64)
    assert Mixing(least).budget(given, 6, [PromptRest(0, 5000)]).beside_rounds == 58
    assert Mixing(least).budget(given, 192, [PromptRest(0, 5000)]).beside_rounds == 16


@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_chunk_and_a_round_share_a_pass(has_grammar: bool) -> None:
    """Keeps out: rows with a grammar in a pass whose round can't run phase by phase; a row that is in the round of the pass in
    which its prompt ends; rounds that stop while prompts run."""
    admission = Admission(PagePool(400, 4), CHAIN.lookahead, prefix_caching=False)
    scheduler = Scheduler(admission, ChunkBudget(40, 40, 40), Speculation((CHAIN,)), 4, True, mixing=Mixing(20))
    engine = Engine(scheduler, RowsOnly(4, random.Random(0)), 1)
    first = new_request([5] * 9, 60)
    if has_grammar:
        first.choice = first.choice._replace(grammar=Grammar("regex", "a*"))
    engine.submit([first])
    engine.step()
    engine.submit([new_request([6] * 90, 9), new_request([7] * 30, 9)])
    while not engine.is_idle:
        engine.step()
    steps = engine.runner.steps
    both = [step for step in steps if isinstance(step, RunMixed)]
    assert bool(both) != has_grammar
    assert sum(isinstance(step, RunChunk) for step in steps) == (4 if has_grammar else 1)
    for step in both:
        assert step.round.kind == "speculative" and not step.round.timed
        assert step.round.nodes + sum(len(part.token_ids) for part in step.chunk.parts) <= 40
    kinds = [type(step) for step in steps if isinstance(step, RunChunk | RunRound | RunMixed)]
    assert all({one, other} != {RunChunk} for one, other in zip(kinds[1:], kinds[2:], strict=False))
