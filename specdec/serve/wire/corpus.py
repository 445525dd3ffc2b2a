"""The body and the answer of /v1/corpus: texts of which drafts are made, under a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.checks import field_of
from specdec.loading.tables.source_tables import require_corpus
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import only_used

FIELDS = ("name", "text", "texts")
DEFAULT_NAME = "default"


class CorpusPlan(NamedTuple):
    """What a body asks for.  texts: none of them: the corpus is to be forgotten."""

    name: str
    texts: Sequence[str]


def read_corpus_plan(body: dict[str, Any]) -> CorpusPlan:
    """The plan of a body.  ApiError 400 with the name of the field that is wrong."""
    values = only_used(body, FIELDS, {}, "")
    name = values.get("name", DEFAULT_NAME)
    if ("text" in values) == ("texts" in values):
        got = "both" if "text" in values else "neither"
        raise wrong(
            "text", f"a corpus is a text or a list of texts, got {got}; nearest thing that works: one of text and texts"
        )
    texts = values["texts"] if "texts" in values else [values["text"]]
    try:
        require_corpus(name, texts)
    except (TypeError, ValueError) as error:
        raise wrong(field_of(error), str(error)) from None
    return CorpusPlan(name, texts)


def corpus_answer(name: str, texts: int, tokens: int) -> dict[str, object]:
    return {"object": "corpus", "name": name, "texts": texts, "tokens": tokens}
