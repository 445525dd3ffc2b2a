"""Requests that a target answers, so that heads learn from its answers: of code, arithmetic, stories and books.

Everything is drawn by a seed, and nothing of it is an evaluation prompt: a request that shares a run of RUN words with one of
them, with its reference answer or with a later turn is left out.  This file knows no model.
"""

from __future__ import annotations

import ast
import json
import lzma
import random
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RUN = 8  # words in a row, case and signs aside
HELD = 96  # requests that no head is trained on, of all kinds of text
LONGEST = 480  # characters of a request: with its answer it must fit a row
ABOUT = {
    "code": "thealgorithms_python.txt.xz",
    "arithmetic": "gsm8k_train.jsonl.xz",
    "stories": "tinystories_cased_0.8MB.txt.xz",
}
BOOKS = "classic_books_en.txt.xz"


def runs_of(text: str) -> set[tuple[str, ...]]:
    """All runs of RUN words of a text; one that is shorter is a run as it is."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


def known_runs(files: Iterable[Path]) -> set[tuple[str, ...]]:
    """The runs of all texts in files of evaluation prompts: turns, prompts and reference answers."""
    found = set[tuple[str, ...]]()
    for file in files:
        for line in file.read_text().splitlines():
            for text in _texts_in(json.loads(line)):
                found |= runs_of(text)
    return found


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_in(each)


def without_known(asks: Iterable[str], known: set[tuple[str, ...]]) -> list[str]:
    """The requests that share no run with the evaluation prompts, each once."""
    return [ask for ask in dict.fromkeys(asks) if not runs_of(ask) & known]


def requests_of(folder: Path, count: int, seed: int, known: set[tuple[str, ...]]) -> list[str]:
    """Requests made of a folder's texts, in random order: at most `count` of code and of arithmetic, a third of that of books
    and of stories.
    """
    draw = random.Random(seed)
    made = {
        "code": list(_code(read_packed(folder / ABOUT["code"]))),
        "arithmetic": [json.loads(line)["question"] for line in read_packed(folder / ABOUT["arithmetic"]).splitlines()],
        "stories": list(_stories(read_packed(folder / ABOUT["stories"]), draw)),
        "books": list(_books(read_packed(folder / BOOKS), draw)),
    }
    asks: list[str] = []
    for kind, found in made.items():
        most = count if kind in ("code", "arithmetic") else count // 3
        usable = without_known((ask for ask in found if 20 < len(ask) <= LONGEST), known)
        asks += draw.sample(usable, min(most, len(usable)))
    return draw.sample(asks, len(asks))


def read_packed(file: Path) -> str:
    """The text of a file packed as .xz."""
    with lzma.open(file, "rt", encoding="utf-8") as opened:
        return opened.read()


def functions_in(text: str) -> Iterator[ast.FunctionDef]:
    """All functions of files that were joined under lines `# file: NAME`."""
    for piece in re.split(r"^# file: .*$", text, flags=re.M):
        try:
            with warnings.catch_warnings(action="ignore"):  # escapes in other people's strings
                tree = ast.parse(piece)
        except SyntaxError:
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _code(text: str) -> Iterator[str]:
    """Of each function with a docstring: to finish it, to write it, and to explain it."""
    for node in functions_in(text):
        does = (ast.get_docstring(node) or "").split("\n\n")[0]
        if len(does) > 20:
            yield f'Finish this code:\ndef {node.name}({ast.unparse(node.args)}):\n    """{does}"""'
            yield f"Write a Python function. {does}"
            node.body = node.body[1:] or [ast.Pass()]
            yield f"What does this function do?\n```python\n{ast.unparse(node)}\n```"


def _stories(text: str, draw: random.Random) -> Iterator[str]:
    for paragraph in re.split(r"\n{2,}", text):
        opening = " ".join(paragraph.split()[: draw.randrange(6, 16)])
        yield f"{draw.choice(['Write a short story that begins like this:', 'Go on with this story:'])} {opening}"


def _books(text: str, draw: random.Random) -> Iterator[str]:
    wants = ("Summarise this paragraph in one sentence", "Rewrite this in simple words", "Who is speaking here, and of what?")
    for paragraph in re.split(r"\n{2,}", text):
        if 120 < len(paragraph) <= LONGEST - 60:
            yield f"{draw.choice(wants)}:\n\n{' '.join(paragraph.split())}"


def write_requests(file: Path, asks: Iterable[str], chat: bool) -> None:
    """One a line, as `specdec train` reads them: chats, or plain text for a target without a chat template."""
    lines = [{"messages": [{"role": "user", "content": ask}]} if chat else {"prompt": ask} for ask in asks]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_evaluation(file: Path, source: Path, count: int, characters: int) -> None:
    """The first turns of the first prompts of an evaluation file.  characters: where they are cut; 0: never."""
    lines = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    prompts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    file.write_text("".join(json.dumps({"prompt": prompt[: characters or None]}) + "\n" for prompt in prompts))
