"""Who may use the server: pages in browsers, names under which it is asked for; and where hints lead callers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit.serving.server import Served, error_of

from specdec import SpecDecoder
from specdec.serve.app import PATHS, nearest_path
from specdec.serve.options import ServeOptions

PATH, PAGE = "/v1/completions", "https://chat.example"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 2, "temperature": 0}
ASKED = {
    "origin": PAGE, "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}  # fmt: skip


@pytest.fixture(scope="module")
def for_pages(pair: SpecDecoder) -> Iterator[Served]:
    """A server that a page may use, with a key."""
    with Served(pair, allowed_origins=f"{PAGE},http://localhost:3000/", api_key="sesame") as served:
        yield served


def preflight(served: Served, **changes: str) -> Any:
    return served.request("OPTIONS", PATH, headers={**ASKED, **changes})


def test_a_page_of_an_allowed_origin_may_ask_and_read(for_pages: Served) -> None:
    """Keeps out: a preflight that needs the key, which browsers don't send; answers, errors too, that a page can't read; and
    leave for headers that clients send and nobody thought of."""
    answer = preflight(for_pages)
    assert answer.status_code == 204 and not answer.content
    assert answer.headers["access-control-allow-origin"] == PAGE and answer.headers["vary"] == "Origin"
    assert answer.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
    assert "POST" in answer.headers["access-control-allow-methods"]
    key = {"authorization": "Bearer sesame", "origin": PAGE}
    for body, headers, status in ((BODY, key, 200), ({**BODY, "n": 0}, key, 400), (BODY, {"origin": PAGE}, 401)):
        answer = for_pages.post(PATH, body, headers=headers)
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    events = for_pages.post(PATH, {**BODY, "stream": True}, headers=key)
    assert events.headers["access-control-allow-origin"] == PAGE and "[DONE]" in events.text


@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.evil.example", "http://chat.example", "null"])
def test_other_pages_may_not(for_pages: Served, origin: str) -> None:
    """Keeps out: origins that are compared by their beginnings or ends, or without the scheme."""
    answer = preflight(for_pages, origin=origin)
    assert answer.status_code == 401 and "access-control-allow-origin" not in answer.headers
    answer = for_pages.post(PATH, BODY, headers={"authorization": "Bearer sesame", "origin": origin})
    assert "access-control-allow-origin" not in answer.headers


def test_no_page_may_by_default(served: Served) -> None:
    """Keeps out: a server that any web page may use."""
    answer = preflight(served)
    assert answer.status_code == 405 and not [name for name in answer.headers if name.startswith("access-control")]


def test_all_pages_may_where_that_is_said(pair: SpecDecoder) -> None:
    """Keeps out: an answer for one page that a cache gives to another."""
    with Served(pair, allowed_origins="*") as served:
        answer = served.get("/v1/models", headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "*" and "vary" not in answer.headers
        assert (
            preflight(served, **{"access-control-request-headers": "a\tb"}).headers.get("access-control-allow-headers") is None
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"allowed_origins": "chat.example"}, "origins such as .* got 'chat.example'; .*: allowed_origins=http://chat.example"),
        ({"allowed_origins": "https://a.example/x"}, "got 'https://a.example/x'; nearest .*"),
        (
            {"allowed_hosts": "http://a.example:80"},
            "without scheme and port.* nearest setting that works: allowed_hosts=a.example",
        ),
        ({"allowed_hosts": "a.example", "api_key": "k"}, "allowed_hosts is for a server on loopback without a key"),
    ],
)
def test_lists_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    """Keeps out: an origin or a name that no request could ever have."""
    with pytest.raises(ValueError, match=said):
        ServeOptions(**options)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("app.localhost", 200), ("models.example:80", 200),
        ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("10.0.0.1", 421), ("localhost.evil.example:8000", 421),
    ],
)  # fmt: skip
def test_a_page_whose_name_points_here_gets_no_further(known: Served, host: str, status: int) -> None:
    """Keeps out: DNS rebinding, in which a page's own name is made to point to this machine."""
    for path in ("/v1/models", "/metrics", "/"):
        answer = known.get(path, headers={"host": host})
        assert answer.status_code == status, path
    if status == 421:
        assert error_of(known.post(PATH, BODY, headers={"host": host}), 421)["code"] == "unknown_host"


@pytest.fixture(scope="module")
def known(pair: SpecDecoder) -> Iterator[Served]:
    with Served(pair, allowed_hosts="models.example") as served:
        yield served


def test_a_key_keeps_pages_out_by_itself(for_pages: Served) -> None:
    """Keeps out: a proxy in front that is refused for the name by which it is known, where a key does the same."""
    answer = for_pages.get("/v1/models", headers={"host": "models.example", "authorization": "Bearer sesame"})
    assert answer.status_code == 200


def test_the_callers_id_is_kept(pair: SpecDecoder) -> None:
    """Keeps out: two ids for one request in two logs; and ids that would break a line of the log or a header."""
    with Served(pair) as served:
        assert served.get("/v1/models", headers={"x-request-id": "trace-17/a"}).headers["x-request-id"] == "trace-17/a"
        assert served.requests_logged(1)[0]["request_id"] == "trace-17/a"
        for wrong in ("", "two words", "x" * 129):
            assert served.get("/v1/models", headers={"x-request-id": wrong}).headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/drafting", "/"])
def test_head_is_get_without_a_body(served: Served, path: str) -> None:
    """Keeps out: probes with HEAD that are told that there is nothing."""
    answer = served.request("HEAD", path)
    assert answer.status_code == 200 and not answer.content


@pytest.mark.parametrize("encoding", ["gzip", "br", "x-unknown"])
def test_a_compressed_body_is_refused_as_such(served: Served, encoding: str) -> None:
    """Keeps out: "not UTF-8" as the answer to a body that is compressed."""
    answer = served.post(PATH, gzip.compress(json.dumps(BODY).encode()), headers={"content-encoding": encoding})
    error = error_of(answer, 415)
    assert encoding in error["message"] and "Content-Encoding" in error["message"]
    assert served.post(PATH, BODY, headers={"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/v1/messages", "/v1/messages"), ("/generate", "/v1/completions"),
        ("/chat/completions", "/v1/chat/completions"), ("/v1/completions/", "/v1/completions"), ("/healthz", "/health"),
        ("/v1/compeltions", "/v1/completions"), ("/models", "/v1/models"), ("/v1/embeddings", ""), ("/v1/audio/speech", ""),
    ],
)  # fmt: skip
def test_hints_lead_somewhere(path: str, nearest: str) -> None:
    """Keeps out: /v1/models for whoever looks for another server's path, and a chat's path for whoever looks for embeddings."""
    assert nearest_path(path) == nearest and (not nearest or nearest in PATHS)


def test_a_templates_refusal_names_no_folder(chat_served: Served, chatty: SpecDecoder) -> None:
    """Keeps out: the server's file names in answers."""
    inner: Any = chatty.tokenizer._inner
    before, inner.chat_template = inner.chat_template, "{{ raise_exception('roles must alternate') }}"
    try:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        message = error_of(chat_served.post("/v1/chat/completions", body), 400)["message"]
    finally:
        inner.chat_template = before
    assert "roles must alternate" in message and "/" not in message, message
