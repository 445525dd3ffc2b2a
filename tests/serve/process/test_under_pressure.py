"""The real command with few files, and with a log that nobody reads: one process for all of it, since each takes seconds."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from toolkit.serving.command import Pipe, running
from toolkit.serving.server import PATIENCE, wait_until

BODY = {"model": "specdec", "prompt": "Once", "max_tokens": 2, "temperature": 0}
FILES = 64


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(pipe: Pipe) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with running(files=FILES, stderr=pipe.writer) as found:
        yield found


def ask(client: httpx.Client, url: str) -> tuple[int, float]:
    """The status of a request, and the seconds that it took."""
    began = time.monotonic()
    status = client.post(f"{url}/v1/completions", json=BODY).status_code
    return status, time.monotonic() - began


def test_more_connections_than_files(server: tuple[subprocess.Popen[str], str], pipe: Pipe) -> None:
    """Keeps out: a server that spends its time on `accept` where no file is left, with a line in the log each time (539,166
    lines in 10 s), while requests on open connections wait; and connections that nobody answers."""
    process, url = server
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with ExitStack() as held, httpx.Client(timeout=PATIENCE, verify=False) as client:
        assert ask(client, url)[0] == 200
        for _ in range(100):
            held.enter_context(socket.create_connection(address))
        status, seconds = ask(client, url)  # on the connection that it has
        assert status == 200 and seconds < 30
        statuses: list[int] = []

        def is_answered() -> bool:
            statuses.append(httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE, verify=False).status_code)
            return statuses[-1] == 200

        wait_until(is_answered, "connections without a request make room for one that has a request")
        assert set(statuses) <= {200, 503}
        log = pipe.read().splitlines()
        assert sum('"event": "server"' in line for line in log) <= 4 and len(log) < 20, log
    assert process.poll() is None


def test_a_log_that_nobody_reads(server: tuple[subprocess.Popen[str], str], pipe: Pipe) -> None:
    """Keeps out: /health and all requests that time out because stderr is a full pipe, and a SIGTERM that such a server can't
    follow."""
    process, url = server
    pipe.fill()
    with httpx.Client(timeout=PATIENCE, verify=False) as client:
        for _ in range(3):
            assert ask(client, url)[0] == 200 and client.get(f"{url}/health").status_code == 200
        assert 'specdec_log_lines_dropped_total{model="specdec"} 0.0' in client.get(f"{url}/metrics").text
    process.terminate()
    assert process.wait(PATIENCE) == 0
