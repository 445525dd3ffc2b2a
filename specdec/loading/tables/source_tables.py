"""The tables of other texts that a decoder's sources read: what fills them, who may read what, and how they reach the engine.

This module knows files, a tokenizer and the engine's thread; which rows read a table is the business of its source.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from specdec.checks import about
from specdec.draft.suffix.host_table import TableText
from specdec.draft.suffix.keeper import TableKeeper
from specdec.draft.suffix.texts import Answers, Corpora, memory_for
from specdec.engine.engine_thread import EngineThread
from specdec.engine.request import Request
from specdec.prompts.corpus import MAX_TOKEN_BYTES, cut, encoded, read_corpus
from specdec.prompts.tokenizer import Tokenizer
from specdec.tables.steps import TableName, TableStep

FILE = "file"  # what the corpus is called that the options name
MAX_NAME = 200  # characters


class SourceTables:
    """Empty without a source that reads tables.

    held: how many tokens each table holds.  owner: the engine's thread, which brings tables to the runner.
    """

    def __init__(self, held: Mapping[TableName, int], tokenizer: Tokenizer, vocab_size: int, owner: EngineThread) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._secret = secrets.token_bytes(16)  # so that nobody can choose a salt that gives another one's scope
        self.corpora = Corpora(held["corpus"]) if "corpus" in held else None
        self.has_answers = "answers" in held
        answers = Answers(held["answers"]) if self.has_answers else None
        self.keeper = TableKeeper(self.corpora, answers, owner.bring_tables, owner.is_behind_with_tables)
        owner.at_close.append(self.keeper.close)
        if self.has_answers:
            owner.engine.scheduler.on_answer.append(self._keep)

    def scope_of(self, salt: str | None) -> int:
        """The key of the scope in which the answers of a request with this cache_salt are proposed; 0: they are to nobody."""
        if not self.has_answers:
            return 0
        given = b"" if salt is None else b"+" + salt.encode()
        return int.from_bytes(blake2b(given, key=self._secret, digest_size=8).digest()) >> 1 or 1

    def read_file(self, path: str | Path, run: Callable[[TableStep], object]) -> None:
        """Makes the file a corpus before anything else runs.  ValueError if it can't be read or does not fit."""
        assert self.corpora is not None
        most = self.corpora.left(FILE)
        size = Path(path).stat().st_size if Path(path).is_file() else 0
        nearest = f"nearest settings that work: a shorter file, or corpus_memory={memory_for(size // 2)!r}"
        found = read_corpus(path, self._tokenizer, most, nearest, self._vocab_size)
        for step in self.keeper.first_corpus(FILE, [TableText(tokens) for tokens in found]):
            run(step)

    def set_corpus(self, name: str, texts: Sequence[str]) -> int:
        """Adds a corpus, or puts it in the place of the one of that name; without texts, that one is forgotten.

        Returns how many tokens it has.  ValueError and TypeError name what is wrong with it.
        """
        if self.corpora is None:
            raise ValueError(
                "corpora are read where they are a source of drafts, and here they are none; nearest settings that work: "
                "draft=[DRAFT, 'corpus'] (--draft DRAFT --draft corpus), or corpus=FILE (--corpus FILE)"
            )
        require_corpus(name, texts)
        most = self.corpora.left(name)
        nearest = "nearest thing that works: a shorter corpus, or a larger corpus_memory"
        if sum(map(len, texts)) > most * MAX_TOKEN_BYTES:
            raise ValueError(f"corpus {name!r} is too long for the {most:,} tokens that corpus_memory has left; {nearest}")
        pieces = (cut(text) for text in texts)
        found = encoded(pieces, self._tokenizer, f"corpus {name!r}", most, nearest, self._vocab_size)
        self.keeper.set_corpus(name, [TableText(tokens) for tokens in found])
        return sum(map(len, found))

    def _keep(self, request: Request) -> None:
        """Keeps a finished answer for the requests of its scope."""
        self.keeper.add_answer(request.scope, request.prompt_ids, request.output.token_ids)


def require_corpus(name: str, texts: Sequence[str]) -> None:
    """ValueError or TypeError unless they can be a corpus's name and texts."""
    with about("name"):
        _require_name(name)
    with about("texts"):
        _require_texts(texts)


def _require_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r} of type {type(name).__name__}"[:400])
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"name must have from 1 to {MAX_NAME} characters, got {len(name)}; nearest setting that works: a name")


def _require_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise TypeError(f"texts must be a list of strings, got {type(texts).__name__}; nearest thing that works: a list of one")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts[{index}] must be a string, got {text!r} of type {type(text).__name__}"[:400])
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"texts[{index}] holds half of a surrogate pair, which is no character") from None
    if texts and not any(texts):
        raise ValueError("texts holds no text; nearest thing that works: an empty list, which forgets the corpus")
