"""The texts of tables on the host, and the thread that makes tables of them."""

import sys
import threading

import numpy as np
import pytest

from specdec.draft.suffix.host_table import HostTable, TableText, host_table
from specdec.draft.suffix.keeper import TableKeeper, steps_of
from specdec.draft.suffix.texts import ALL_ROWS, Answers, Corpora, capacities, memory_for
from specdec.tables.steps import FillTable, TableStep, UseTable


def text(*tokens: int, context: int = 0) -> TableText:
    return TableText(np.asarray(tokens, dtype=np.int32), context)


def taken(steps: list[TableStep], name: str) -> HostTable:
    """The table that these steps bring last."""
    own = [step for step in steps if step.table == name]
    end = own.pop()
    assert isinstance(end, UseTable)
    parts: list[FillTable] = []
    while own and isinstance(own[-1], FillTable):
        parts.insert(0, own.pop())  # type: ignore[arg-type]
    arrays = (np.concatenate([getattr(part, field) for part in parts]) for field in ("text_T", "order_T"))
    return HostTable(*arrays, end.keys_S, end.bounds_S2)


def test_a_table_in_parts() -> None:
    """Keeps out: parts that overlap, and an end that comes before the last part."""
    table = host_table({5: [text(*range(9)), text(3, 4, 5)], 8: [text(1, 2)]})
    steps = list(steps_of("corpus", table, most=4))
    assert [getattr(step, "first", None) for step in steps] == [0, 4, 8, 12, 16, None]
    for ours, theirs in zip(taken(steps, "corpus"), table, strict=True):
        assert np.array_equal(ours, theirs)
    assert table.bounds_S2.tolist() == [[0, 12], [12, 14]] and table.keys_S.tolist() == [5, 8]
    assert len(list(steps_of("answers", host_table({})))) == 2  # a table without texts, in place of one with some


def test_the_oldest_answers_make_room() -> None:
    """Keeps out: memory that grows for ever, a scope that stays without any text, an answer longer than all of the memory."""
    answers = Answers(20)
    for scope in (7, 8, 7, 9):
        answers.add(scope, [1], [scope] * 4)
    assert list(answers.by_scope()) == [8, 7, 9]
    answers.add(9, [1, 2, 3], [5] * 30)
    (kept,) = answers.by_scope()[9]
    assert list(answers.by_scope()) == [9] and kept.room == 19 and kept.context == 0
    assert sum(each.room for own in answers.by_scope().values() for each in own) + 1 <= 20
    answers.add(9, [1, 2, 3], [5] * 16)
    assert answers.by_scope()[9][0].context == 2


def test_corpora_that_do_not_fit() -> None:
    """Keeps out: a replaced corpus that counts twice, a named setting that does not work either."""
    corpora = Corpora(20)
    corpora.set("a", [text(1, 2, 3), text(4)])
    corpora.set("b", [text(*range(9))])
    with pytest.raises(ValueError, match="corpus 'c' has 5 tokens, and 3 of the 20 .* nearest .* corpus_memory='2MiB'"):
        corpora.set("c", [text(1, 2, 3, 4)])
    corpora.set("a", [text(1, 2)])
    assert corpora.names == ["b", "a"] and len(corpora.by_scope()[ALL_ROWS]) == 2
    corpora.set("b", [])
    assert corpora.names == ["a"]
    for tokens in (1, 10_000, 9_999_999):
        mebibytes = int(memory_for(tokens).removesuffix("MiB"))
        assert capacities(mebibytes << 20)[0] >= tokens
    assert sum(capacities(256 << 20)) * 16 <= 256 << 20


def test_room_is_asked_for_while_corpora_come() -> None:
    """Keeps out: "dictionary changed size during iteration", as an error of status 500, where two callers send corpora."""
    corpora, one, failed, usual = Corpora(100_000), [text(1)], list[BaseException](), sys.getswitchinterval()
    for number in range(50):
        corpora.set(f"kept {number}", one * 3)
    ended = threading.Event()

    def ask() -> None:
        try:
            while not ended.is_set():
                corpora.left("another")
        except RuntimeError as error:
            failed.append(error)

    sys.setswitchinterval(1e-6)
    try:
        (thread := threading.Thread(target=ask)).start()
        for number in range(20_000):
            corpora.set(f"new {number % 50}", one if number % 100 < 50 else [])
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(usual)
    assert not failed


def test_answers_become_a_table_by_themselves() -> None:
    """Keeps out: a caller that waits for a table, answers of nobody's scope, a thread that outlives its keeper."""
    steps, came = list[TableStep](), threading.Event()

    def emit(some: list[TableStep]) -> None:
        steps.extend(some)
        came.set()

    keeper = TableKeeper(None, Answers(1000), emit)
    keeper.add_answer(0, [1, 2], [3])
    assert keeper._thread is None
    keeper.add_answer(4, list(range(20)), [30, 31])
    assert came.wait(10) and keeper.wait()
    table = taken(steps, "answers")
    assert table.text_N.tolist() == [-1, *range(12, 20), 30, 31, -1] and sorted(table.order_X.tolist()) == [9, 10]
    keeper.close()
    assert keeper._thread is not None
    keeper._thread.join(10)
    assert not keeper._thread.is_alive()


def test_tables_wait_for_slow_rounds() -> None:
    """Keeps out: tables that pile up, and memory with them, where rounds take their parts slower than new ones are made."""
    tables, is_behind = list[int](), threading.Event()

    def emit(some: list[TableStep]) -> None:
        tables.append(len(some))
        is_behind.set()

    keeper = TableKeeper(None, Answers(1000), emit, is_behind.is_set)
    keeper.add_answer(4, [1], [2])
    assert is_behind.wait(10)
    keeper.add_answer(4, [1], [3])
    assert not keeper.wait(0.3) and len(tables) == 1
    is_behind.clear()
    assert keeper.wait(10) and len(tables) == 2
    keeper.close()
    assert keeper._thread is not None
    keeper._thread.join(10)
    assert not keeper._thread.is_alive(), "nobody runs the last steps, and the thread waits for them"
