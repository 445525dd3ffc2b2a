"""A round's tree as lines of text: what was drafted, which branch the target took, and its own token at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from specdec.generation import Round
from specdec.trace.trace import Trace, TracedText

MOST = 40  # characters of a token that are shown
Paint = Callable[[str, str], str]  # (text, kind) -> text in the colour of "accepted", "rejected" or "own"


class TreeLines(NamedTuple):
    """What joins the lines: of a child, of the last child, beside and below them; and marks of nodes."""

    child: str
    last: str
    beside: str
    below: str
    accepted: str
    own: str


BOXES = TreeLines("├─ ", "└─ ", "│  ", "   ", "✓", "→")
ASCII = TreeLines("|- ", "`- ", "|  ", "   ", "+", ">")


def as_text(trace: Trace, paint: Paint = lambda text, kind: text, lines: TreeLines = BOXES) -> Iterator[str]:
    """The lines of all texts' rounds."""
    for number, text in enumerate(trace.texts, 1):
        if len(trace.texts) > 1:
            yield f"text {number} of {len(trace.texts)}: {visible(text.prompt, 60)}"
        tokens, rounds = _counted(len(text.tokens), "token"), _counted(len(text.rounds), "round")
        yield f"{tokens} in {rounds}, {text.accept_length:.2f} a round"
        if accepted := Counter(each.sources[node] for each in text.rounds if each.sources for node in each.path[1:]):
            yield "accepted " + ", ".join(f"{count:,} from {source}" for source, count in accepted.most_common())
        for index in range(len(text.rounds)):
            yield ""
            yield from round_lines(trace, text, index, paint, lines)
        if number < len(trace.texts):
            yield ""


def round_lines(trace: Trace, text: TracedText, index: int, paint: Paint, lines: TreeLines) -> Iterator[str]:
    """One round: a heading, then a line for each node, children below their parent."""
    made = text.rounds[index]
    drafts, path = len(made.tree.tokens) - 1, made.path
    said = f"{made.accepted} of {drafts} drafted nodes accepted{_by_source(made)}" if drafts else "a plain step"
    yield f"round {index + 1} of {len(text.rounds)}: {said}"
    children: list[list[int]] = [[] for _ in made.tree.tokens]
    for node, parent in enumerate(made.tree.parents):
        if node:
            children[parent].append(node)
    taken, end = set(path), path[-1]
    yield paint(_token(trace, made.tree.tokens[0]), "accepted")
    sources = made.sources
    open_nodes: list[tuple[int, str, bool]] = []  # node (-1: the target's own), what stands before its line, is it the last

    def add(node: int, before: str) -> None:
        below = [*children[node], *([-1] if node == end else [])]
        open_nodes.extend((child, before, place == 0) for place, child in enumerate(reversed(below)))

    add(0, "")
    while open_nodes:
        node, before, is_last = open_nodes.pop()
        joint = before + (lines.last if is_last else lines.child)
        if node < 0:
            yield joint + paint(f"{_token(trace, made.tree.chosen[end])} {lines.own} the target's own", "own")
            continue
        kind = "accepted" if node in taken else "rejected"
        source = sources[node] if sources else ""
        yield joint + paint(_node(trace, made, node, source, lines.accepted if node in taken else ""), kind)
        add(node, before + (lines.below if is_last else lines.beside))


def visible(text: str, most: int = MOST) -> str:
    """A text in which spaces at its ends and whatever moves a cursor can be seen, as Python writes it."""
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[: most - 3]}...{shown[0]}"


def _node(trace: Trace, made: Round, node: int, source: str, mark: str) -> str:
    score = f"{math.exp(made.tree.scores[node]):.3f}" if made.tree.scores else ""
    return " ".join(filter(None, (_token(trace, made.tree.tokens[node]), score, source, mark)))


def _by_source(made: Round) -> str:
    """How many of the accepted nodes each source proposed, where there are several; a node may be of several."""
    counts = Counter(name for node in made.path[1:] for name in made.sources[node : node + 1])
    return f" ({', '.join(f'{count} by {name}' for name, count in counts.items())})" if counts else ""


def _token(trace: Trace, token: int) -> str:
    return visible(trace.pieces.get(token, f"token {token}")) if token >= 0 else "not finite"


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"
