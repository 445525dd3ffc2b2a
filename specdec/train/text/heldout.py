"""Keeps whole documents out of training, and makes sure that none of them is nearly a document of the training text.

Collections repeat themselves: a document that is held out often has a twin that is not.  What is measured on it then says how
well the twin was remembered.  This file knows documents, and neither models nor tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.train.text.documents import Document, read_documents

OPENING = 64  # words of a document that are compared
RUN = 5  # of these words make one run
ALIKE = 0.5  # share of a document's runs that another text holds, from which on the two count as alike


class Corpus(NamedTuple):
    """train, held: the documents to train on, and those held out.  notes: lines that say where both come from.
    others: held-out documents of other files, by the files' names.
    """

    train: list[Document]
    held: list[Document]
    notes: list[str]
    others: dict[str, list[Document]]


def load_corpus(
    paths: Sequence[str | Path], share: float, split: str = "auto", eval_paths: Sequence[str | Path] = ()
) -> Corpus:
    """The documents of several files.

    share: of each file's documents, the last ones, that is held out; of a single one none, if there are eval_paths.
    eval_paths: files of which all documents are held out.
    Held-out documents that open like a training document are left out.

    ValueError as of read_documents, and if too little is left on either side.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"held_out: expected a share between 0 and 1, got {share}")
    train: list[Document] = []
    held: list[Document] = []
    notes: list[str] = []
    for path in paths:
        documents, note = read_documents(path, split)
        kept = 0 if eval_paths and len(documents) == 1 else max(1, round(len(documents) * share))
        if len(documents) <= kept:
            raise ValueError(
                f"text: expected at least 2 documents to hold one out, got {note}; name another --split, or held-out text with "
                "--eval-text"
            )
        train += documents[: len(documents) - kept]
        held += documents[len(documents) - kept :]
        notes.append(note)
    new = drop_alike(held, train)
    others: dict[str, list[Document]] = {}
    notes.append(f"{len(train)} to train on, {len(new)} held out; {len(held) - len(new)} more open like one of the others")
    for path in eval_paths:
        documents, note = read_documents(path, split)
        others[_name_for(path, others)] = unlike = drop_alike(documents, train)
        notes.append(f"{note}, to measure the head with; {len(documents) - len(unlike)} more open like one of the others")
        held += documents
    if not (all(others.values()) if others else new):
        raise ValueError(
            f"text: expected held-out documents that open unlike those to train on, got {len(held)} that do not; name other "
            "text with --eval-text"
        )
    return Corpus(train, new, notes, others)


def _name_for(path: str | Path, taken: Container[str]) -> str:
    """A file's name without endings, or its whole path where another file has that name."""
    name = Path(path).name.partition(".")[0]
    return str(path) if name in taken else name


def set_aside(documents: Sequence[Document], share: float) -> tuple[list[Document], list[Document]]:
    """(documents to train on, documents by whose texts the best checkpoint is chosen): evenly spread ones, none of which opens
    like one to train on.  The second list is empty where there are too few.
    """
    every = max(2, round(1 / share))
    picked = set(range(min(every, len(documents)) - 1, len(documents), every)) if len(documents) > 1 else set()
    rest = [document for index, document in enumerate(documents) if index not in picked]
    return rest, drop_alike([documents[index] for index in sorted(picked)], rest)


def runs_of(text: str) -> set[tuple[str, ...]]:
    """The runs of RUN words within the first words of a text; case and signs do not count."""
    words = re.findall(r"\w+", text[: 16 * OPENING].lower())[:OPENING]
    return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


def drop_alike(documents: Sequence[Document], others: Sequence[Document]) -> list[Document]:
    """The documents of which most of the opening does not stand in the openings of the others, nor of an earlier document."""
    seen = {run for other in others for run in runs_of(other.text)}
    kept = []
    for document in documents:
        runs = runs_of(document.text)
        if len(runs & seen) < ALIKE * len(runs):
            kept.append(document)
            seen |= runs
    return kept


def openings(documents: Sequence[Document], count: int, seen: Sequence[Document] = (), seed: int = 0) -> list[str]:
    """The first 12 to 25 words (how many is random) of each of the first `count` documents that have a new opening.

    A document counts if its first line goes on after those words, and if the words stand nowhere in `seen`, case aside.
    ValueError if there are fewer such documents.
    """
    known = "\n".join(document.text for document in seen).lower()
    generator = torch.Generator("cpu").manual_seed(seed)
    found: list[str] = []
    for document in documents:
        words = document.text.split("\n")[0].split(" ")
        opening = " ".join(words[: int(torch.randint(12, 26, (), generator=generator, dtype=torch.int64, device="cpu"))])
        if len(words) > 25 and opening.lower() not in known and len(found) < count:
            found.append(opening)
    if len(found) < count:
        raise ValueError(f"prompts: expected {count} held-out documents opening with 26 new words, got {len(found)}")
    return found
