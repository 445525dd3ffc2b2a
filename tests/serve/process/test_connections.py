"""How many connections a server takes, and what becomes of those that are one too many, or whose client does nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from toolkit.driver import Driver
from toolkit.serving.server import Served, error_of, wait_until

from specdec import SpecDecoder
from specdec.serve.metrics import CUTS
from specdec.serve.process.acceptor import Acceptor
from specdec.serve.process.descriptors import MAX_CONNECTIONS, REFUSED_AT_ONCE, SPARE, connection_limit, raised_limit
from specdec.serve.times import ServeTimes

PATH = "/v1/completions"
GOOD: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\n"


def serve(pair: SpecDecoder, times: dict[str, float] | None = None, **options: Any) -> Served:
    """A server that looks at all connections ten times a second, so that tests are quick."""
    return Served(pair, times={"look": 0.1, **(times or {})}, **options)


def request(body: dict[str, Any], head: bytes = HEAD) -> bytes:
    content = json.dumps(body).encode()
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def all_of(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while piece := connection.recv(1 << 16):
            answer += piece
    except ConnectionResetError:
        pass
    return answer


@contextmanager
def streaming(served: Served) -> Iterator[None]:
    """A connection with a request under way."""
    with served.connect() as connection:
        connection.sendall(request({**GOOD, "max_tokens": 400, "ignore_eos": True, "stream": True}))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        yield


def server_lines(served: Served) -> list[str]:
    return [line["message"] for line in served.lines if line["event"] == "server"]


def cuts(served: Served) -> dict[str, int]:
    """How many connections were cut, by why, as /metrics tells."""
    page = served.get("/metrics").text
    return {why: int(float(page.partition(f'_cut_total{{model="tiny",why="{why}"}} ')[2].split()[0])) for why in CUTS}


# ---- too many ----


def test_one_too_many_is_told_so(pair: SpecDecoder) -> None:
    """Keeps out: connections without a bound, or that are dropped without an answer; probes that call a busy server dead; and
    a line in the log for each."""
    # quiet: on a busy machine two refusals may be a second apart
    with serve(pair, {"quiet": 2.0}, max_connections=2) as served, Driver(pair).rounds_by_hand() as let_run:
        with streaming(served), streaming(served):
            for _ in range(30):
                answer = served.post(PATH, GOOD)
                assert error_of(answer, 503)["code"] == "too_many_connections"
                assert answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
            assert served.get("/health").status_code == served.get("/ready").status_code == 200
            assert 'specdec_http_connections{model="tiny"} 3.0' in served.get("/metrics").text  # that of the question itself
            assert cuts(served)["full"] >= 30
            with pytest.raises(httpx.HTTPStatusError):
                served.get("/v1/models").raise_for_status()
        wait_until(lambda: let_run.release() or served.state.queue.is_empty, "both have gone")
        wait_until(lambda: served.state.counts.connections == 0, "their connections are closed")
        wait_until(
            lambda: served.get("/health") and len(server_lines(served)) == 2, "a line when it begins, and one at its end"
        )
    first, last = server_lines(served)
    assert first.startswith("a connection was refused: 2 are open") and last.startswith("35 times in ")
    Driver(pair).assert_nothing_leaked()


def test_a_connection_without_a_request_makes_room(pair: SpecDecoder) -> None:
    """Keeps out: clients that are refused because others keep connections that they don't use."""
    with serve(pair, {"idle": 0.1}, max_connections=4) as served, ExitStack() as held:
        used = held.enter_context(httpx.Client(verify=False, timeout=60))
        assert used.post(served.url + PATH, json=GOOD).status_code == 200
        unused = [held.enter_context(served.connect()) for _ in range(3)]
        time.sleep(0.2)
        assert used.post(served.url + PATH, json=GOOD).status_code == 200, "it is no longer the one that was idle for longest"
        assert [served.post(PATH, GOOD).status_code for _ in range(3)] == [200] * 3
        assert unused[0].recv(10) == b"" and served.state.counts.cut_connections["idle"] >= 1
        assert used.post(served.url + PATH, json=GOOD).status_code == 200
        assert served.state.counts.cut_connections["full"] == 0


def test_a_fresh_connection_has_a_moment_for_its_request(pair: SpecDecoder) -> None:
    """Keeps out: a connection closed before its request could come, because another one wants its place."""
    with serve(pair, {"idle": 60.0}, max_connections=2) as served, served.connect() as one, served.connect() as other:
        wait_until(lambda: served.state.counts.connections == 2, "both are open")
        assert error_of(served.post(PATH, GOOD), 503)["code"] == "too_many_connections"
        for fresh in (one, other):
            fresh.sendall(request(GOOD))
            assert fresh.recv(100).startswith(b"HTTP/1.1 200")
        assert served.state.counts.cut_connections["idle"] == 0


def test_many_that_come_and_go_leave_nothing(pair: SpecDecoder) -> None:
    """Keeps out: a count of connections that drifts until nobody is let in, and one that ends before it has begun, which
    ended the server."""
    with serve(pair, max_connections=8) as served:
        before = len(os.listdir("/dev/fd"))
        for number in range(1500):
            with served.connect() as connection:
                connection.sendall((b"", b"GET", request(GOOD))[number % 3])
        wait_until(lambda: served.post(PATH, GOOD).status_code == 200, "there is room again")
        wait_until(lambda: served.state.counts.connections == 0, "all have gone")
        wait_until(lambda: len(os.listdir("/dev/fd")) <= before, "no file stays open")
        wait_until(lambda: served.state.queue.is_empty, "no request stays")
    Driver(pair).assert_nothing_leaked()


def test_no_file_for_a_connection(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: `accept` that is tried thousands of times a second where the system has no file left, and a server that takes
    nothing any more after such a time."""

    class Listener(socket.socket):
        tries, fails = 0, True

        def accept(self) -> Any:
            Listener.tries += 1
            if Listener.fails:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def use() -> None:
        with Listener() as listener:
            listener.bind(("127.0.0.1", 0))
            made: list[asyncio.Protocol] = []
            times = ServeTimes(retry=0.05, quiet=0.2)
            taken = Acceptor(listener, lambda *_: made.append(asyncio.Protocol()) or made[-1], lambda: False, 5, times)
            _, writer = await asyncio.open_connection(*listener.getsockname())
            await asyncio.sleep(0.5)
            assert 2 <= Listener.tries <= 12 and not made
            Listener.fails = False
            async with asyncio.timeout(60):
                while not made:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.25)
            taken.look()
            taken.stop()
            writer.close()

    asyncio.run(use())
    first, last = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert first == "a connection could not be accepted: Too many open files; 0 are open" and "times in" in last


def test_the_bound_follows_the_limit_of_files() -> None:
    """Keeps out: a bound that the process has no files for, one that is lowered in silence, and a limit that stays raised in
    a process that is not the server's own."""
    kept = {"limit": (200, 1000)}
    files = SimpleNamespace(
        RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
        RLIM_INFINITY=resource.RLIM_INFINITY,
        getrlimit=lambda _: kept["limit"],
        setrlimit=lambda _, limit: kept.update(limit=limit),
    )
    is_open = len(os.listdir("/dev/fd"))
    beside = is_open + SPARE + REFUSED_AT_ONCE
    assert abs(connection_limit(None, files) - (200 - beside)) <= 3 and connection_limit(10, files) == 10
    with raised_limit(files):
        assert kept["limit"] == (1000, 1000) and connection_limit(None, files) > 1000 - beside - 3
    assert kept["limit"] == (200, 1000)
    with pytest.raises(ValueError, match="max_connections=199 is more than there is room for.*nearest setting that works: 1"):
        connection_limit(199, files)
    kept["limit"] = (beside - 10, beside - 10)
    with raised_limit(files), pytest.raises(ValueError, match="no room for connections.*LimitNOFILE"):
        connection_limit(None, files)
    kept["limit"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with raised_limit(files):
        assert kept["limit"][0] == resource.RLIM_INFINITY
        assert connection_limit(None, files) == MAX_CONNECTIONS


# ---- too slow ----


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comple", HEAD, HEAD + b"Content-Length: 5\r"])
def test_a_request_that_does_not_come(pair: SpecDecoder, begun: bytes) -> None:
    """Keeps out: a connection that is held for ever by a request's head that does not end, byte by byte or at all."""
    with serve(pair, read_seconds=1) as served, served.connect() as connection:
        connection.sendall(begun)
        began = time.monotonic()
        answer = all_of(connection)
        assert answer.startswith(b"HTTP/1.1 408") if begun else answer == b""
        assert 0.9 < time.monotonic() - began
        assert cuts(served)["slow"] == 1
        assert server_lines(served) == ["a connection was closed: its request did not come within 1 s"]


@pytest.mark.parametrize("length", [b"Content-Length: 1000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_body_that_never_ends(pair: SpecDecoder, length: bytes) -> None:
    """Keeps out: a request that waits for its body for ever, which a byte now and then keeps alive."""
    with serve(pair, {"discard": 0.1}, read_seconds=1) as served, served.connect() as connection:
        connection.sendall(HEAD + length)
        connection.settimeout(0.1)
        answer, began = b"", time.monotonic()
        while b"request_timeout" not in answer:
            assert time.monotonic() < began + 60
            try:
                connection.sendall(b"1\r\n \r\n" if b"chunked" in length else b" ")
                answer += connection.recv(1 << 16)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408") and served.state.queue.is_empty
        (line,) = served.requests_logged(1)
        assert line["status"] == 408 and line["error"]["code"] == "request_timeout"


def test_a_body_that_was_answered_and_never_ends(pair: SpecDecoder) -> None:
    """Keeps out: a connection that is held for ever by a body that nobody waits for: each byte put off uvicorn's own end."""
    with serve(pair, read_seconds=1) as served, served.connect() as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 100000\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        connection.settimeout(0.1)
        began = time.monotonic()
        while True:
            assert time.monotonic() < began + 60, "it is still open"
            try:
                connection.sendall(b" ")
                if not connection.recv(100):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert cuts(served)["slow"] == 1


def test_a_slow_body_that_goes_on_is_waited_for(pair: SpecDecoder) -> None:
    """Keeps out: a large body over a slow line that is refused although it comes steadily."""
    with serve(pair, read_seconds=1) as served, served.connect() as connection:
        body = json.dumps(GOOD).encode().ljust(100_000)
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 5000):
            connection.sendall(body[start : start + 5000])
            time.sleep(0.08)  # 1.6 s altogether
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


# ---- answers that nobody reads ----

LARGE: dict[str, Any] = {**GOOD, "max_tokens": 400, "n": 4, "ignore_eos": True, "logprobs": 10}


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads(pair: SpecDecoder, stream: bool) -> None:
    """Keeps out: a text, a connection and a place that are held for ever for a reader that has stopped, streamed or not."""
    with serve(pair, send_buffer=4096, write_seconds=1) as served, served.connect(receive_buffer=4096) as connection:
        connection.sendall(request({**LARGE, "stream": stream, "max_tokens": 400 if stream else 50}))
        wait_until(lambda: served.state.counts.cut_connections["unread"] == 1, "the connection is cut")
        wait_until(lambda: served.state.counts.connections == 0 and served.state.queue.is_empty, "nothing is left of it")
        (line,) = served.requests_logged(1)
        assert line["status"] == (499 if stream else 200)
        assert server_lines(served) == ["a connection was closed: its client read nothing for 1 s"]
    Driver(pair).assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_is_only_slow(pair: SpecDecoder, stream: bool) -> None:
    """Keeps out: a reader that is cut off although it reads all the time."""
    with serve(pair, send_buffer=4096, write_seconds=1) as served, served.connect(receive_buffer=4096) as connection:
        connection.sendall(request({**LARGE, "max_tokens": 100, "stream": stream}))
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        while time.monotonic() < began + 2.5:
            assert len(connection.recv(1500)) > 0
            time.sleep(0.05)
        assert not served.state.counts.cut_connections
