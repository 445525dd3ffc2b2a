"""The table with which a device follows a text that waits for its grammar: it says what the plan says, token by token."""

from __future__ import annotations

import random

from specdec.grammar.wait import ARMED, Thought, TokenTexts, Wait, WaitPlan, WaitState
from specdec.grammar.wait_table import MAX_STATES, wait_table

LETTERS = "ab<>/ \n"
THOUGHTS = [None, Thought("<a>", "</a>"), Thought("<a>", "</a>", is_open=True), Thought("a", "<a", is_open=True)]


def random_texts(draw: random.Random) -> list[bytes]:
    """Tokens of one letter, and longer ones, some of which are equal or empty."""
    more = ["".join(draw.choices(LETTERS, k=draw.randrange(6))) for _ in range(60)]
    return [text.encode() for text in (*LETTERS, *more, "<a>", "</a>", "zz", "é")]


def random_wait(draw: random.Random) -> Wait:
    markers = tuple("".join(draw.choices(LETTERS[:5], k=draw.randrange(1, 6))) for _ in range(draw.randrange(4)))
    thought = draw.choice(THOUGHTS if markers else THOUGHTS[1:])
    return Wait(thought, markers, at_start=bool(markers) and draw.random() < 0.3)


def moved(plan: WaitPlan, state: WaitState, token: int) -> WaitState:
    """The state after a token, as a matcher takes it."""
    return WaitState(ARMED) if plan.is_first_of_answer(state, token) else plan.step(state, token)


def test_it_stands_where_the_plan_does() -> None:
    """Random marks over random vocabularies, which cut marks at every place.  Keeps out: a token that completes, crosses,
    begins or ends a mark and is taken for one that does nothing; states that are mixed up; blanks before a mark."""
    halts = 0
    for seed in range(40):
        draw = random.Random(seed)
        texts = random_texts(draw)
        plan = WaitPlan(random_wait(draw), TokenTexts(texts))
        parts = [token for token, text in enumerate(texts) if text in plan.parts]
        table = wait_table(plan)
        assert table is not None and table.bans_ends == (not plan.waits)
        for _ in range(60):
            state, at = plan.first, table
            for _ in range(draw.randrange(1, 12)):
                assert at.halts == plan.needs_mask(state), (plan.marks, state)
                token = draw.choice(parts) if draw.random() < 0.5 else draw.randrange(len(texts))
                state, at = moved(plan, state, token), at.led([token])
                halts += at.halts
            assert at.halts == plan.needs_mask(state)
            assert at.led([0, 1]) == at.led([0]).led([1]) and at.led([]) == at
    assert halts > 1000


def test_a_text_halts_at_its_mark_alone() -> None:
    """Keeps out: a pause at every token that ends as the mark does."""
    texts = [text.encode() for text in ("<call>", "call", ">", "<", "x", ">\n", "<call", "y<call>")]
    table = wait_table(WaitPlan(Wait(None, ("<call>",)), TokenTexts(texts)))
    assert table is not None
    for text, halts in (
        ([0], True),
        ([1, 2], False),
        ([3, 1, 2], True),
        ([6], True),
        ([3, 1], True),
        ([6, 4], False),
        ([7], True),
    ):
        assert table.led(text).halts == halts, text  # after "<call" the token ">\n" would go on, and only a mask bans it
    assert wait_table(WaitPlan(Wait(None, ("<call>",)), TokenTexts([*texts[:5], *texts[7:]]))).led([3, 1]).halts is False  # type: ignore[union-attr]


def test_what_is_too_large_has_no_table() -> None:
    """Keeps out: seconds at the door for a hundred markers; a table for a text whose grammar holds from the first token on."""
    vocabulary = TokenTexts([bytes([byte]) for byte in range(128)])
    few, many = (tuple(f"[{number}_tool(" for number in range(10, count)) for count in (40, 60))
    assert wait_table(WaitPlan(Wait(None, few), vocabulary)) is not None and 6 * len(many) > MAX_STATES
    assert wait_table(WaitPlan(Wait(None, many), vocabulary)) is None
    plan = WaitPlan(Wait(Thought("<think>", "</think>")), vocabulary)
    assert plan.first.phase == ARMED and wait_table(plan) is None
