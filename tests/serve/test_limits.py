"""The limits of the server: the key, the size of bodies, the queue, the cap of max_tokens, and the pool."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from toolkit.driver import Driver
from toolkit.serving.server import Served, error_of, wait_until

from specdec import SpecDecoder
from specdec.serve.options import ServeOptions
from specdec.serve.times import ServeTimes

PATH = "/v1/completions"
GOOD: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
LONG: dict[str, Any] = {**GOOD, "max_tokens": 400, "ignore_eos": True, "stream": True}


@contextmanager
def held(served: Served, **body: Any) -> Iterator[socket.socket]:
    """A stream that runs inside the block, and is dropped at its end."""
    content = json.dumps({**LONG, **body}).encode()
    with served.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(content)
            + content
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        yield connection


def answer_to(connection: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    answer = b""
    while piece := connection.recv(1 << 16):
        answer += piece
    return answer


# ---- the key ----


def test_a_key_is_asked_for(pair: SpecDecoder) -> None:
    """Keeps out: an open server with a key in its options, a key that is compared in part, and probes that need one."""
    with Served(pair, api_key="sesame-9") as served:
        for given in ("", "sesame-9", "Bearer", "Bearer sesame", "Bearer sesame-99", "Basic sesame-9", "Bearer é"):
            for path in (PATH, "/v1/chat/completions", "/v1/models", "/nowhere"):
                headers = {"authorization": given.encode()}
                answer = served.post(path, GOOD, headers=headers) if path == PATH else served.get(path, headers=headers)
                error = error_of(answer, 401)
                assert error["code"] == "invalid_api_key" and answer.headers["www-authenticate"] == "Bearer"
                assert "sesame" not in error["message"]
        for path in ("/health", "/ready", "/metrics"):
            assert served.get(path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            served.client(api_key="other").models.list()
        assert served.client(api_key="sesame-9").models.list().data[0].id == "tiny"
        assert served.post(PATH, GOOD, headers={"authorization": "bearer  sesame-9"}).status_code == 200
        twice = [("authorization", "Bearer sesame-9"), ("authorization", "Bearer other")]
        assert served.get("/v1/models", headers=twice).status_code == 401
        assert "sesame" not in json.dumps(served.lines)


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n", 5])
def test_a_key_that_no_header_can_hold(key: Any) -> None:
    """Keeps out: a server that no key opens, and a key that an error message shows."""
    with pytest.raises((ValueError, TypeError), match="api_key must be") as error:
        ServeOptions(api_key=key)
    assert not key or str(key) not in str(error.value)


# ---- the body ----


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused(pair: SpecDecoder, chunked: bool) -> None:
    """Keeps out: a body without a length that fills the memory, and a refusal that the client never reads."""
    with Served(pair, times={"discard": 120.0}, max_body_bytes=2000) as served:  # the client may be slow on a busy machine
        fits = json.dumps(GOOD).ljust(2000).encode()
        assert served.post(PATH, fits).status_code == 200
        parts = iter([fits, b" " * 3_000_000]) if chunked else fits + b" " * 3_000_000
        error = error_of(served.post(PATH, parts), 413)
        assert error["code"] == "body_too_large" and "2000 bytes" in error["message"]
        assert served.post(PATH, GOOD).status_code == 200


def test_a_long_body_is_not_waited_for(pair: SpecDecoder) -> None:
    """Keeps out: a server that reads gigabytes before it says no."""
    with Served(pair, times={"discard": 0.1}) as served, served.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n{"
        )
        answer = answer_to(connection)
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer


def test_a_body_that_ends_early(served: Served) -> None:
    """Keeps out: a request that waits for ever in the queue, and a traceback for a client that went away."""
    with served.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
    wait_until(lambda: served.lines and served.lines[-1].get("status") == 499, "the log says that the client went away")
    assert served.state.queue.is_empty


# ---- the queue ----


def test_a_full_queue_says_so(pair: SpecDecoder) -> None:
    """Keeps out: a queue without an end, a 429 that does not say when to come back, and a queue that stays full."""
    with Served(pair, max_queue=1) as served:  # 4 run, 1 waits
        with Driver(pair).rounds_by_hand() as let_run, held(served, n=3), held(served, n=2):
            wait_until(lambda: let_run.release() or served.state.decoder.totals.waiting == 1, "four choices run and one waits")
            answer = served.post(PATH, GOOD)
            error = error_of(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert answer.headers["retry-after"] == "1"
            with pytest.raises(openai.RateLimitError):
                served.client().completions.create(**GOOD)
            for path in ("/health", "/ready", "/metrics", "/v1/models"):
                assert served.get(path).status_code == 200
        wait_until(lambda: served.state.queue.is_empty, "the queue is empty")
        assert served.client(max_retries=0).completions.create(**GOOD).usage
        error = error_of(served.post(PATH, {**GOOD, "n": 6}), 400)
        assert error["param"] == "n" and "at most 5 at once" in error["message"], "more than ever fit: no retry would help"
        assert error_of(served.post(PATH, {**GOOD, "prompt": ["a"] * 6}), 400)["param"] == "prompt"
    Driver(pair).assert_nothing_leaked()


# ---- tokens ----


def test_the_cap_of_max_tokens(chatty: SpecDecoder) -> None:
    """Keeps out: a cap that only explicit numbers meet, or that cuts an explicit number in silence."""
    chat = [{"role": "user", "content": "hi"}]
    with Served(chatty, max_tokens_cap=9) as served:
        for path, body in ((PATH, {"prompt": "hi"}), ("/v1/chat/completions", {"messages": chat})):
            answer = served.post(path, {"model": "tiny", "ignore_eos": True, **body})
            assert answer.json()["usage"]["completion_tokens"] == 9
            for field in ("max_tokens", "max_completion_tokens"):
                error = error_of(served.post(path, {"model": "tiny", field: 10, **body}), 400)
                assert error["param"] == field and "at most 9, the server's --max-tokens-cap, got 10" in error["message"]
                assert error["message"].endswith(f"nearest setting that works: {field}=9")
            assert served.post(path, {"model": "tiny", "max_tokens": 9, **body}).status_code == 200


def test_a_prompt_that_no_pool_could_hold(pair: SpecDecoder) -> None:
    """Keeps out: a request that waits for ever for pages that do not exist, or fails after its stream has begun."""
    with Served(pair) as served, Driver(pair).small_pool(8):
        error = error_of(served.post(PATH, {**GOOD, "max_tokens": 400, "stream": True}), 400)
        assert error["param"] == "prompt" and error["code"] == "context_length_exceeded"
        assert "nearest setting that works: max_tokens=" in error["message"]
        most = int(error["message"].rpartition("max_tokens=")[2])
        assert served.post(PATH, {**GOOD, "max_tokens": most, "temperature": 0}).status_code == 200


def test_a_chat_that_names_no_length_fits_a_small_pool(chatty: SpecDecoder) -> None:
    """Keeps out: chats that are refused since their answer could be as long as the context, which the pool can't hold."""
    with Served(chatty) as served, Driver(chatty).small_pool(8):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "temperature": 0, "ignore_eos": True}
        answer = served.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        used, spec = answer.json()["usage"]["total_tokens"], chatty.settings.lookahead
        assert used + spec == 8 * chatty.settings.options.page_size


# ---- the engine ----


def test_an_engine_that_has_failed_for_good(chatty: SpecDecoder) -> None:
    """Keeps out: a server that looks healthy while every request fails, so that nobody restarts it."""
    late = {"failed": 600.0}  # until everything has been asked, however busy the machine is
    parts = chatty.model, chatty.head, chatty.settings, chatty.tokenizer
    with SpecDecoder(*parts) as decoder, Served(decoder, times=late) as served:
        assert served.get("/health").json() == {"status": "ok"} and served.get("/ready").json() == {"status": "ready"}
        with Driver(decoder).fail_every_step(RuntimeError("the GPU is gone")):
            for _ in range(10):
                if (answer := served.post(PATH, GOOD)).status_code == 503:
                    break
                assert error_of(answer, 500)["code"] == "request_failed"
        error = error_of(answer, 503)
        assert error["code"] == "engine_failed" and "the GPU is gone" in error["message"]
        assert served.get("/health").status_code == 503 and "the GPU is gone" in served.get("/health").text
        assert error_of(served.get("/ready"), 503)["code"] == error_of(served.post(PATH, GOOD), 503)["code"] == "engine_failed"
        served.state.times = ServeTimes(failed=0.0)
        wait_until(lambda: not served.is_running, "the server ends, so that whoever supervises it starts a new one")
