"""The page of a trace, in a real browser."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toolkit.serving.traces import HOSTILE, drawn_trace

from specdec.generation import NodeTable, Round
from specdec.trace.html import as_html
from specdec.trace.trace import Trace, TracedText

NODES = """[...document.querySelectorAll('#tree .node')].map((node) => [Number(node.dataset.node), Number(node.dataset.token),
  node.classList[1]])"""


def saved(trace: Trace, folder: Path) -> str:
    (folder / "trace.html").write_text(as_html(trace), encoding="utf-8")
    return (folder / "trace.html").as_uri()


def wanted(round_: Any) -> list[list[Any]]:
    """What the drawing of a round holds: the nodes, and the target's own token after the path."""
    tree, path = round_.tree, round_.path
    kinds = ["root" if not n else "accepted" if n in path else "rejected" for n in range(len(tree.tokens))]
    return [*map(list, zip(range(len(kinds)), tree.tokens, kinds, strict=True)), [len(kinds), tree.chosen[path[-1]], "own"]]


def test_arrow_keys_step_through_the_trees_of_the_json(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    """Keeps out: nodes, kinds or rounds that the data does not hold, keys that do nothing, an error on the console."""
    trace = drawn_trace(random.Random(4), 2)
    page = open_page(saved(trace, tmp_path))
    rounds = trace.texts[0].rounds
    for each in rounds:
        assert page.evaluate(NODES) == wanted(each)
        page.keyboard.press("ArrowRight")
    assert page.input_value("#round") == str(len(rounds))  # the last one stays
    page.keyboard.press("Home")
    assert page.evaluate(NODES) == wanted(rounds[0])
    page.keyboard.press("End")
    assert page.evaluate(NODES) == wanted(rounds[-1])
    page.select_option("#texts", "1")
    assert page.evaluate(NODES) == wanted(trace.texts[1].rounds[0])
    page.locator(f"#along [data-bar='{len(trace.texts[1].rounds) - 1}']").click()
    assert page.evaluate(NODES) == wanted(trace.texts[1].rounds[-1])


def test_the_page_holds_what_the_json_holds(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    """Keeps out: a text whose pieces are lost, hidden or in another order."""
    trace = drawn_trace(random.Random(6), 1)
    page = open_page(saved(trace, tmp_path))
    text = trace.texts[0]
    assert page.evaluate("[...document.querySelectorAll('#text span')].map((span) => span.textContent)") == [
        text.prompt,
        *text.pieces,
    ]
    assert json.loads(page.evaluate("document.getElementById('data').textContent")) == json.loads(trace.as_json())


@pytest.mark.parametrize("hostile", range(len(HOSTILE)))
def test_hostile_texts_stay_texts(tmp_path: Path, open_page: Callable[..., Any], hostile: int) -> None:
    """Keeps out: a script in a prompt that runs, an element that it makes, a page wider than its window."""
    made = drawn_trace(random.Random(hostile), 2)
    texts = [replace(text, prompt=HOSTILE[hostile], pieces=[HOSTILE[hostile]] * len(text.pieces)) for text in made.texts]
    trace = replace(
        made, texts=texts, about={HOSTILE[hostile]: HOSTILE[hostile]}, pieces=dict.fromkeys(made.pieces, HOSTILE[hostile])
    )
    for width, scheme in ((390, "dark"), (1600, "light")):
        page = open_page(saved(trace, tmp_path), width, 700, scheme)
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.querySelectorAll('script, b, img, iframe').length") == 2
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.text_content("#text .prompt") == HOSTILE[hostile]


def test_depths_that_no_round_reached_have_no_bar(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    """Keeps out: "0 %" of no round at all, for the deepest nodes of branches that nobody took."""
    off = [Round(1, 0, NodeTable([0, *range(101, 116)], [0, *range(15)], [1] * 16, [], [0] * 16), ("drafter",))]
    trace = replace(drawn_trace(random.Random(4), 1), texts=[TracedText("a", 1, [0, 1], ["a", "b"], [0, 0], "eos", off)])
    page = open_page(saved(trace, tmp_path))
    assert page.evaluate("[...document.querySelectorAll('#depth .mark')].map((mark) => mark.textContent)") == ["0 %"]


def is_in_sight(name: str) -> str:
    """Whether this element stands between the drawing's upper and lower edge."""
    return f"""(() => {{ const [b, tree] = [{name!r}, '#tree'].map((e) => document.querySelector(e).getBoundingClientRect());
      return b.top >= tree.top && b.bottom <= tree.bottom }})()"""


# Whether the texts of each node stand one after the other, or above each other, within its box.
INSIDE = """[...document.querySelectorAll('#tree .node')].every((node) => {
  const [box, ...texts] = [node.querySelector('rect'), ...node.querySelectorAll('text')].map((e) => e.getBBox());
  const [one, other] = texts;
  return texts.every((text) => text.x + text.width <= box.width - 1 && text.y + text.height <= box.height + 1)
    && (!other || one.x + one.width <= other.x || one.y + one.height <= other.y + 4) })"""
FITS = "(() => { const tree = document.querySelector('#tree'); return tree.scrollWidth <= tree.clientWidth })()"


def test_a_wide_tree_fits(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    """Keeps out: a tree that a reader must push sideways to see its end, on a phone and in half of a screen, whatever its
    shape; an outline that shows the path taken below other branches; and one that stays as narrow as it was drawn."""
    chance = random.Random(5)
    rounds = []
    for count in (6, 16, 40, 60):
        parents = [0, *(max(0, n - 1 - chance.randrange(min(n, 8))) for n in range(1, count))]
        tokens, chosen = [0, *range(101, 100 + count)], [101 + n for n in range(count)]
        rounds.append(
            Round(
                1, 0, NodeTable(tokens, parents, chosen, [0.0] + [-0.1 * n for n in range(1, count)], [0] * count), ("drafter",)
            )
        )
    text = TracedText("a", 1, [0, *[1] * len(rounds)], ["a"] * (1 + len(rounds)), [0] * (1 + len(rounds)), "length", rounds)
    trace = Trace({"shape of a tree": "any"}, dict.fromkeys(range(300), "wwwwwwwwwwwwwww"), [text])
    page = open_page(saved(trace, tmp_path), 390)
    for width in (390, 760, 1600, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.keyboard.press("Home")
        for number in range(len(rounds)):
            page.wait_for_function(FITS)
            assert page.evaluate(INSIDE), (width, number)
            page.keyboard.press("ArrowRight")


@pytest.mark.parametrize("width", [390, 1600])
def test_a_deep_path_is_in_sight(tmp_path: Path, open_page: Callable[..., Any], width: int) -> None:
    """Keeps out: marks over bars that cover each other, words wider than their node, a tall tree without its root in sight."""
    chain, leaves = list(range(1, 16)), list(range(200, 220))
    tokens, parents = [0, *leaves, *chain], [0] * 21 + [0, *range(21, 35)]
    chosen = [1] + [9] * 20 + [*range(2, 16), 99]
    round_ = Round(1, 15, NodeTable(tokens, parents, chosen, [0.0] + [-0.001] * 35, [0] * 36), ("drafter",))
    text = TracedText("a", 1, [0, *chain, 99], ["a"] * 17, [0, *range(1, 16), 0], "length", [round_])
    trace = Trace({"shape of a tree": "15,21,36"}, dict.fromkeys([*tokens, *chosen], "wwwwwwwwwwwwwwwwww"), [text])
    page = open_page(saved(trace, tmp_path), width)
    boxes = page.evaluate("[...document.querySelectorAll('#depth .mark')].map((e) => (b => [b.x, b.x + b.width])(e.getBBox()))")
    assert boxes and all(one[1] <= other[0] for one, other in zip(boxes, boxes[1:], strict=False))
    assert page.evaluate(INSIDE), "a text crosses its node's edge, or another text"
    both = [page.evaluate(is_in_sight(name)) for name in ("#tree .root", "#tree .own")]
    assert all(both), "the root or the end of the path is out of sight"
    page.set_viewport_size({"width": width, "height": 300})
    page.keyboard.press("Home")
    assert page.evaluate(is_in_sight("#tree .root")), "the root of a path that does not fit is out of sight"
    assert page.evaluate("[...document.querySelectorAll('th')].every((e) => e.clientHeight < 40)"), "a name in two lines"
