"""What of a document a model reads before it writes on: the first tokens of a text, or a chat up to its first answer.

This file knows documents and a target's tokenizer.  It knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec.prompts.tokenizer import Tokenizer
from specdec.train.text.documents import Document, read_documents
from specdec.train.text.heldout import drop_alike

MIN_LEN = 4  # tokens of a text that can open one
MAX_CHAT = 1024  # tokens of a chat that is asked offline
CHARACTERS = 32  # of a text are read for each token that is needed: more than a token has


def opening_ids(tokenizer: Tokenizer, document: Document, room: int, longest: int) -> list[int]:
    """A document's tokens, from its beginning; of a chat those before its first answer.  Empty if it can't be a prompt.

    room: the most tokens of a chat, which is not cut.  longest: how many tokens of a text are needed.
    """
    if document.messages is None:
        ids = tokenizer.encode(document.text[: max(2000, CHARACTERS * longest)])
        return ids if len(ids) >= MIN_LEN else []
    answer = next((i for i, message in enumerate(document.messages) if message["role"] == "assistant"), None)
    asked = document.messages[:answer]
    if not any(message["role"] == "user" for message in asked):
        return []
    ids = tokenizer.encode_chat(asked, "a chat of the text")
    return ids if len(ids) <= room else []


def openings_of(tokenizer: Tokenizer, paths: Sequence[str | Path], longest: int, count: int | None) -> list[list[int]]:
    """Prompts of files as documents.py reads them: one of each document that opens unlike those before it.

    longest: of a text, its first tokens are the prompt.  count: the most prompts; None: all.  ValueError if there are fewer, or
    none.
    """
    if longest < MIN_LEN:
        raise ValueError(
            f"longest_prompt: expected at least {MIN_LEN}, got {longest}; "
            f"nearest setting that works: --longest-prompt {MIN_LEN}"
        )
    documents = drop_alike([document for path in paths for document in read_documents(path)[0]], [])
    found = []
    for document in documents:
        if ids := opening_ids(tokenizer, document, MAX_CHAT, longest):
            found.append(ids if document.messages is not None else ids[:longest])
    if not found or len(found) < (count or 1):
        wanted = "a document" if (count or 1) == 1 else f"{count} documents"
        nearest = f"--num-prompts {len(found)}" if found else "another --eval-text"
        raise ValueError(
            f"eval_text: expected {wanted} of {MIN_LEN} tokens or more, got {len(found)} that open unlike those before them; "
            f"nearest setting that works: {nearest}"
        )
    return found[:count]
