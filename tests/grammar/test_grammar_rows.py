"""Rows with a grammar, without a model: whose trees are walked, and what a row's next request inherits.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toolkit.checkpoints.tokenizers import byte_tokenizer

from specdec.batch.emitted import FirstTokens
from specdec.batch.tree import DraftTree
from specdec.grammar.library import Grammars
from specdec.grammar.tree_completion import look_ahead
from specdec.parallel.group import ALONE, Group
from specdec.runner import grammars
from specdec.runner.grammars import GrammarRows
from specdec.runner.readback import HostCopy, Readback
from specdec.steps import Grammar, LeaveRows, PromptPart, RowEntry, RowOptions

V, EOS, NODES = 384, 0, 3
RULE = Grammar("regex", "a+b", (EOS,))


def test_rows_that_do_not_speculate_have_no_tree_walked() -> None:
    """Keeps out: a walk of trees whose nodes nobody reads; a grammar left behind, or inherited."""
    tokenizer = byte_tokenizer(300)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    rows = GrammarRows(Readback(torch.device("cpu")), V)
    rows.library = Grammars(tokenizer.backend_tokenizer.to_str, V, [EOS])
    for row, (speculates, rule) in enumerate([(True, RULE), (False, RULE), (True, None), (True, RULE)]):
        rows.enter(RowEntry(row, [[1]], RowOptions.of(), speculates, grammar=rule))
    rows.follow_chunk(FirstTokens(torch.full((4,), a)), [PromptPart(row, [1], 0, -1) for row in range(4)])

    def walked(count: int) -> list[bool | None]:
        """Of each row, whether nodes after the root have masks of their own; None: the row has no mask."""
        trees = rows.complete(DraftTree.chain(torch.full((count, NODES), a)))
        masks = rows.of_round(count, NODES, trees)
        places = masks.place_B.tolist()
        for place in places:
            assert place < 0 or not bool((masks.words_GNX[place, 0] == -1).all()), "the root's mask is read in every row"
        return [None if place < 0 else not bool((masks.words_GNX[place, 1:] == -1).all()) for place in places]

    assert walked(4) == [True, False, None, True]
    rows.stop_drafting([0, 2])
    assert walked(4) == [False, False, None, True]
    rows.leave(LeaveRows(((3, 0),), (3,)))  # the last row moves into the gap
    assert walked(3) == [True, False, None]
    rows.enter(RowEntry(3, [[1]], RowOptions.of(), True))
    assert walked(4) == [True, False, None, None]


def test_each_end_of_drafts_is_reported_once() -> None:
    """Keeps out: a scheduler that never hears of it, or hears of the row that the text has left, or of no row's next text."""
    tokenizer = byte_tokenizer(300)
    rows = GrammarRows(Readback(torch.device("cpu")), V)
    rows.library = Grammars(tokenizer.backend_tokenizer.to_str, V, [EOS])
    for row in range(3):
        rows.enter(RowEntry(row, [[1]], RowOptions.of(), True, grammar=RULE))
    rows.follow_chunk(FirstTokens(torch.zeros(3, dtype=torch.int64)), [PromptPart(row, [1], 0, -1) for row in range(3)])
    for row in (0, 2):
        rows._rows[row].matcher.is_alone = True
    ended_B = rows.end_drafts(3)
    assert ended_B is not None and ended_B.tolist() == [True, False, True] and rows.end_drafts(3) is None
    rows.leave(LeaveRows(((2, 0),), (2,)))
    assert rows.report_ended() == [0] and rows.report_ended() == []


def test_nobody_looks_ahead_while_the_device_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a host that goes on looking at what may follow after the drafts have come, and trees that are not completed
    because nobody has looked ahead."""
    tokenizer, drafts = byte_tokenizer(300), torch.full((4, NODES), V - 1)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    made, looked = [], list[int]()
    for most in (4, 1, 0):
        rows = GrammarRows(Readback(torch.device("cpu")), V)
        rows.library = Grammars(tokenizer.backend_tokenizer.to_str, V, [EOS])
        for row in range(4):
            rows.enter(RowEntry(row, [[1]], RowOptions.of(), True, grammar=RULE))
        rows.follow_chunk(FirstTokens(torch.full((4,), a)), [PromptPart(row, [1], 0, -1) for row in range(4)])
        calls = [0]

        def look(*given: Any, calls: list[int] = calls) -> None:
            calls[0] += 1
            look_ahead(*given)

        monkeypatch.setattr(grammars, "look_ahead", look)
        monkeypatch.setattr(HostCopy, "device_waits", property(lambda copy, most=most, calls=calls: calls[0] >= most))
        tree = DraftTree.chain(drafts.clone())
        made.append((rows.complete(tree), tree.tokens_BN.tolist()))
        looked += calls
    assert looked == [4, 1, 0] and made[0] == made[1] == made[2] and made[0][1] != drafts.tolist()


class Broken(Group):
    """The first of two ranks, whose exchanges have failed."""

    rank, size = 0, 2

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((2, *x.shape), 2**30, dtype=x.dtype)


def test_the_first_rank_keeps_what_it_has_made() -> None:
    """Keeps out: garbage of an exchange that another rank's end has cut off, which becomes ids of tokens and of nodes."""
    tokenizer = byte_tokenizer(300)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    made: list[tuple[list[list[int]], list[Any], bool]] = []
    for group in (ALONE, Broken()):
        rows = GrammarRows(Readback(torch.device("cpu")), V, group)
        rows.library = Grammars(tokenizer.backend_tokenizer.to_str, V, [EOS])
        rows.enter(RowEntry(0, [[1]], RowOptions.of(), True, grammar=RULE))
        rows.follow_chunk(FirstTokens(torch.full((1,), a)), [PromptPart(0, [1], 0, -1)])
        tree = DraftTree.chain(torch.full((1, NODES), a))
        masks = rows.of_round(1, NODES, rows.complete(tree))
        ended_B = rows.end_drafts(1)
        made.append((tree.tokens_BN.tolist(), masks.words_GNX.tolist(), ended_B is not None and bool(ended_B.any())))
    assert made[0] == made[1]
