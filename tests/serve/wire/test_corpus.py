"""Corpora over HTTP: texts of which drafts are made, behind the key, in bounds and by name; and salts of earlier answers."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.serving.server import Served, error_of

from specdec import SpecConfig, SpecDecoder, shipped
from specdec.serve.wire.fields import COMPLETIONS, CORPUS

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def corpus_served() -> Iterator[Served]:
    """A server over the shipped pair with both sources, behind a key."""
    draft = [str(shipped.draft_folder()), "corpus", "answers"]
    given: dict[str, Any] = {"device": "cpu", "max_batch_size": 2, "smoke": False, "corpus_memory": "1MiB", "max_seq_len": 256}
    with SpecDecoder.from_pretrained(shipped.target_folder(), draft, SpecConfig(3, 3, 12), **given) as decoder:
        with Served(decoder, api_key="secret", max_body_bytes=100_000) as server:
            yield server
        Driver(decoder).assert_nothing_leaked()


def rounds_of(served: Served, prompt: str, **more: Any) -> tuple[str, int]:
    """A completion's text, and the draft tokens that were accepted for it."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, **more}
    answer = served.post(COMPLETIONS, body, headers=KEY).json()
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


def test_a_corpus_is_read_and_forgotten(corpus_served: Served) -> None:
    """Keeps out: a corpus that no round reads, one that stays after it was forgotten, another text than the target's."""
    decoder, prompt = corpus_served.decoder, "Once there was an elderly person who loved to take walks in the"
    text, before = rounds_of(corpus_served, prompt, cache_salt="1")
    answer = corpus_served.post(CORPUS, {"name": "notes", "texts": [prompt + text, ""]}, headers=KEY)
    assert answer.status_code == 200 and answer.json() == {
        "object": "corpus", "name": "notes", "texts": 2, "tokens": answer.json()["tokens"],
    }  # fmt: skip
    assert answer.json()["tokens"] > 40 and decoder.corpora == ["notes"]
    Driver(decoder).settle_tables()
    again = [rounds_of(corpus_served, prompt, cache_salt=str(salt)) for salt in (2, 3, 4)]
    assert {found for found, _ in again} == {text} and again[-1][1] > before
    assert corpus_served.post(CORPUS, {"text": "more"}, headers=KEY).json()["name"] == "default"
    for name in ("notes", "default"):
        assert corpus_served.post(CORPUS, {"name": name, "texts": []}, headers=KEY).json()["tokens"] == 0
    assert decoder.corpora == []
    assert corpus_served.post(CORPUS, {"text": "some"}).status_code == 401


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "text", "a corpus is a text or a list of texts, got neither"),
        ({"text": "a", "texts": []}, "text", "got both"),
        ({"texts": "a"}, "texts", "texts must be a list of strings, got str"),
        ({"texts": ["a", 5]}, "texts", r"texts\[1\] must be a string, got 5"),
        ({"text": 5}, "texts", r"texts\[0\] must be a string"),
        ({"text": "a", "name": ""}, "name", "name must have from 1 to 200 characters, got 0"),
        ({"text": "a", "name": 5}, "name", "name must be a string, got 5"),
        ({"text": "a", "title": "b"}, "title", "there is no such field"),
        ({"text": "a,b;" * 24_000}, "text", "more than the .* tokens that corpus_memory holds or has left; nearest"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_corpora_are_named(corpus_served: Served, body: dict[str, Any], param: str, said: str) -> None:
    """Keeps out: status 500, and a corpus that is cut in silence."""
    answer = corpus_served.post(CORPUS, body, headers=KEY)
    error = error_of(answer, 400)
    assert error["param"] == param and re.search(said, error["message"]), error
    assert corpus_served.decoder.corpora == []


def test_other_bounds(corpus_served: Served, served: Served) -> None:
    """Keeps out: a body that is read to its end, and a corpus that a server without the source takes and never reads."""
    assert corpus_served.post(CORPUS, {"text": "a" * 200_000}, headers=KEY).status_code == 413
    answer = served.post(CORPUS, {"text": "a"})
    assert "corpus=FILE" in error_of(answer, 400)["message"]
    assert corpus_served.get(CORPUS, headers=KEY).status_code == 405
