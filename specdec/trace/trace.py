"""A trace as data: texts with the trees of all their rounds, and the JSON in which they are kept.

docs/TRACE.md describes the JSON, which has one event a round.  This module knows no decoder and no picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdec.files.whole import write_text_whole
from specdec.generation import NodeTable, Round

FORMAT, VERSION = "specdec-trace", 1
DIGITS = 3  # of scores, which are logarithms
FINISH = ("eos", "stop", "length")


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of one round of the second run: of each phase, and of all of it, in which the host's share is the rest."""

    phases: dict[str, float]
    wall: float


@dataclass(frozen=True)
class TracedText:
    """One request.

    prompt: as the caller gave it, or its decoded ids.  pieces, origins: of each output token, its text and where it came from
    (see Generation.origins).  rounds: see Generation.  times: of a second run of this text alone; empty if there was none.
    sources: of each output token, see Generation; empty where a trace does not say.
    """

    prompt: str
    prompt_tokens: int
    tokens: list[int]
    pieces: list[str]
    origins: list[int]
    finish: str
    rounds: list[Round]
    times: list[RoundTime] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def accept_length(self) -> float:
        """Tokens that a round emitted, on average; 0 if there was none."""
        return sum(each.accepted + 1 for each in self.rounds) / len(self.rounds) if self.rounds else 0.0


@dataclass(frozen=True)
class Trace:
    """about: models, settings, versions and the date, by name.  pieces: the text of every token that occurs in a tree."""

    about: dict[str, str]
    pieces: dict[int, str]
    texts: list[TracedText]

    def as_json(self) -> str:
        """The trace as docs/TRACE.md describes it, a line for each text."""
        texts = ",\n".join(_line(_of_text(text)) for text in self.texts)
        pieces = {str(token): piece for token, piece in sorted(self.pieces.items())}
        head = {"format": FORMAT, "version": VERSION, "about": self.about, "pieces": pieces}
        return f'{_line(head)[:-1]},"texts":[\n{texts}\n]}}\n'

    def save_html(self, path: str | Path) -> None:
        """Writes the trace as one HTML file that needs no other file and no network."""
        from specdec.trace.html import as_html

        write_text_whole(Path(path), as_html(self))

    @classmethod
    def from_json(cls, text: str, name: str = "trace") -> Trace:
        """ValueError says where the JSON is none of `as_json`'s.  name: what errors call it."""
        try:
            held = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
        except RecursionError:
            raise ValueError(f"{name} is no trace: its JSON is nested too deeply") from None
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            raise ValueError(
                f'{name} is no trace: expected an object with "format": "{FORMAT}", as specdec trace --json writes'
            )
        if held.get("version") != VERSION:
            raise ValueError(f"{name} has version {held.get('version')!r}, expected {VERSION}; nearest: trace once more")
        try:
            return cls(
                {str(key): str(value) for key, value in _object(held["about"]).items()},
                {int(token): _text(piece) for token, piece in _object(held["pieces"]).items()},
                [_read_text(_object(each)) for each in _list(held["texts"])],
            )
        except KeyError as error:
            raise ValueError(f"{name} is damaged: {error} is missing") from error
        except (AssertionError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{name} is damaged: {error or 'numbers contradict each other'}") from error


def _line(value: Any) -> str:
    """JSON in one line.  Characters outside ASCII stay: escapes of six would make texts twice as long."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _of_text(text: TracedText) -> dict[str, Any]:
    made = {
        name: getattr(text, name) for name in ("prompt", "prompt_tokens", "tokens", "pieces", "origins", "sources", "finish")
    }
    made["rounds"] = [round_as_json(each) for each in text.rounds]
    if text.times:
        made["times"] = [
            {**{k: round(v, 4) for k, v in each.phases.items()}, "wall": round(each.wall, 4)} for each in text.times
        ]
    return made


def round_as_json(each: Round) -> dict[str, Any]:
    """A round's event."""
    tree = each.tree
    made = {"first": each.first, "accepted": each.accepted, **tree._asdict(), "sources": each.sources}
    made["scores"] = [round(max(score, -999.0), DIGITS) for score in tree.scores]  # JSON has no infinity
    return made


def _read_text(held: dict[str, Any]) -> TracedText:
    tokens, pieces, origins = _ints(held["tokens"]), [_text(each) for each in _list(held["pieces"])], _ints(held["origins"])
    assert len(tokens) == len(pieces) == len(origins), "tokens, pieces and origins differ in length"
    assert held["finish"] in FINISH, f"finish must be one of {', '.join(FINISH)}, got {held['finish']!r}"
    rounds = [_read_round(_object(each), len(tokens)) for each in _list(held["rounds"])]
    times = [
        RoundTime({k: _number(v) for k, v in _object(each).items() if k != "wall"}, _number(each["wall"]))
        for each in _list(held.get("times", []))
    ]
    (count,) = _ints([held["prompt_tokens"]])
    sources = [_text(each) for each in _list(held.get("sources", []))]
    assert len(sources) in (0, len(tokens)), "tokens and sources differ in length"
    return TracedText(_text(held["prompt"]), count, tokens, pieces, origins, held["finish"], rounds, times, sources)


def _read_round(held: dict[str, Any], length: int) -> Round:
    tokens, parents, chosen = (_ints(held[name]) for name in ("tokens", "parents", "chosen"))
    names, bits = bits_of([_text(each) for each in _list(held["sources"])])
    tree = NodeTable(tokens, parents, chosen, [_number(each) for each in _list(held["scores"])], bits or [0] * len(tokens))
    nodes, (first, accepted) = len(tree.tokens), _ints([held["first"], held["accepted"]])
    assert (
        nodes
        and len(tree.parents) == len(tree.chosen) == nodes
        and len(tree.sources) == nodes
        and len(tree.scores) in (0, nodes)
    ), "a tree's columns differ"
    assert all(score <= 0 for score in tree.scores), f"scores are logarithms, at most 0, got {max(tree.scores):g}"
    assert not tree.parents[0] and all(0 <= parent < n for n, parent in enumerate(tree.parents) if n), "a parent comes too late"
    assert 0 <= first < length and 0 <= accepted < nodes, "a round stands outside of its text"
    made = Round(first, accepted, tree, names)
    try:
        assert len(made.path) == accepted + 1
    except StopIteration:
        raise ValueError("a round accepts a node that its target did not choose") from None
    return made


def bits_of(sources: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Names of sources, and for each node the bits of those that proposed it.  sources: of each node, see Round.sources.

    Names that stand together at a node keep their order, whichever of them stands alone at an earlier one.
    """
    parts = [[name for name in each.split("+") if name not in ("", "grammar")] for each in sources]
    order = TopologicalSorter[str]({name: () for each in parts for name in each})
    for each in parts:
        for before, after in pairwise(each):
            order.add(after, before)
    names = tuple(order.static_order()) or ("drafter",)  # ValueError if two nodes contradict each other
    return names, [sum(1 << names.index(name) for name in each) for each in parts]


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {str(value)[:40]}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {str(value)[:40]}")
    return value


def _ints(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise TypeError(f"expected a list of whole numbers, got {str(values)[:40]}")
    return values


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"expected a number, got {str(value)[:40]}")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {str(value)[:40]}")
    return value
