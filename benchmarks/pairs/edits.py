"""Requests to edit a document, whose answers repeat most of it: what matches in the text and predictions are for.

Three kinds: rename a variable of a function, write JSON in another layout, correct the spelling of a paragraph.  Documents are
drawn by a seed; the document is the prediction.  This file knows no model.
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from pairs.requests import ABOUT, BOOKS, LONGEST, functions_in, read_packed

EDITS = ("renamed", "reformatted", "corrected")
NAMES = ("amount", "entry", "position", "measure", "outcome")
WRONG = 7  # of so many words one is misspelled
CITIES = ("Lisbon", "Oslo", "Lima", "Kyoto", "Accra", "Quito", "Turin", "Perth")


def edits_of(folder: Path, count: int, seed: int) -> Iterator[dict[str, object]]:
    """`count` edits of each kind, as lines of a file: kind, messages and prediction."""
    draw = random.Random(seed)
    made: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "renamed": lambda: _renamed(read_packed(folder / ABOUT["code"]), draw),
        "reformatted": lambda: (_reformatted(draw) for _ in range(count)),
        "corrected": lambda: _corrected(read_packed(folder / BOOKS), draw),
    }
    for kind, make in made.items():
        found = list(make())
        for want, document in draw.sample(found, min(count, len(found))):
            ask = f"{want} Answer with the {'code' if kind == 'renamed' else 'text'} alone.\n\n{document}"
            yield {"kind": kind, "messages": [{"role": "user", "content": ask}], "prediction": document}


def _renamed(text: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Functions without their docstrings, and the local variable that they name most often."""
    for node in functions_in(text):
        if ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        stored = Counter(each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        code = ast.unparse(node)
        used = {name: len(re.findall(rf"\b{name}\b", code)) for name in stored}
        often = max(used, key=lambda name: used[name], default="")
        if 160 < len(code) <= LONGEST and used.get(often, 0) >= 4:
            yield f"Rename the variable {often} to {draw.choice(NAMES)} in this code.", code


def _reformatted(draw: random.Random) -> tuple[str, str]:
    def place() -> dict[str, object]:
        return {"city": draw.choice(CITIES), "year": draw.randrange(1900, 2020), "rooms": draw.sample(range(1, 90), 3)}

    record = {"id": draw.randrange(10**5), "open": draw.random() < 0.5, "places": [place() for _ in range(3)]}
    return "Write this JSON with an indentation of two spaces.", json.dumps(record)


def _corrected(text: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    for paragraph in re.split(r"\n{2,}", text):
        words = paragraph.split()
        if 40 <= len(words) <= 80 and paragraph.isascii():
            for place in range(draw.randrange(WRONG), len(words), WRONG):
                words[place] = _misspelled(words[place], draw)
            yield "Correct the spelling of this paragraph.", " ".join(words)


def _misspelled(word: str, draw: random.Random) -> str:
    """Two letters in the wrong order, or one twice."""
    at = draw.randrange(max(1, len(word) - 1))
    swapped, doubled = word[at : at + 2][::-1], word[at : at + 1] + word[at : at + 2]
    return word[:at] + (swapped if draw.random() < 0.5 else doubled) + word[at + 2 :]
