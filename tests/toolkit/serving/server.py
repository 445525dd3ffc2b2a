"""A server of the HTTP server for tests: on loopback, on a thread of the test process, with the real web server."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import openai

from specdec import SpecDecoder
from specdec.async_decoder import AsyncSpecDecoder
from specdec.serve.options import ServeOptions
from specdec.serve.run import Server, listen
from specdec.serve.state import ServerState
from specdec.serve.times import ServeTimes

SERVER_THREAD = "test server"
PATIENCE = 120.0  # seconds after which a test gives up on what must happen at once
# Clients are made with `verify=False`: reading the system's certificates takes longer than a request, which is plain HTTP.


def wait_until(happened: Callable[[], Any], what: str) -> None:
    """Asserts that something happens soon."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.01)


class Log(io.StringIO):
    """What one server writes.  Servers of one process share a stderr, so a line that another writes late is left out."""

    def __init__(self, server: threading.Thread) -> None:
        super().__init__()
        self._server = server

    def write(self, text: str) -> int:
        writer = threading.current_thread()
        return super().write(text) if writer is self._server or writer.name != SERVER_THREAD else len(text)


class Served:
    """A server over a decoder while the block runs.

    send_buffer: bytes that the system takes from the server for a reader that does not read; None: as many as it likes.
    times: what differs from the usual.
    """

    def __init__(
        self, decoder: SpecDecoder, *, send_buffer: int | None = None, times: dict[str, float] | None = None, **options: Any
    ) -> None:
        self.decoder = decoder
        self.options = ServeOptions(**{"port": 0, "grace_seconds": 5, "model_name": "tiny", **options})
        self._async_decoder = AsyncSpecDecoder(decoder)
        self.state = ServerState(self._async_decoder, self.options, ServeTimes(**(times or {})))
        self.server = Server(self.state)
        self._listener = listen(self.options)
        if send_buffer is not None:  # connections inherit it
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, name=SERVER_THREAD)
        self._log = Log(self._thread)

    def _run(self) -> None:
        self.server.run(sockets=[self._listener])

    def __enter__(self) -> Served:
        self._redirected = patch("specdec.serve.log.sys", SimpleNamespace(stderr=self._log))
        self._redirected.start()
        self._thread.start()
        wait_until(lambda: self.server.started, "the server starts")
        return self

    def __exit__(self, *_error: object) -> None:
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        self._redirected.stop()
        assert not self._thread.is_alive(), "the server does not end"

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log, line by line."""
        return [json.loads(line) for line in self._log.getvalue().splitlines()]

    def requests_logged(self, count: int) -> list[dict[str, Any]]:
        """The lines about requests, once there are so many."""
        wait_until(lambda: len(self._requests()) >= count, f"{count} lines in the log")
        return self._requests()

    def _requests(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "request"]

    def client(self, **settings: Any) -> openai.OpenAI:
        http = httpx.Client(verify=False, timeout=PATIENCE)
        return openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "http_client": http, **settings}
        )

    def async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **settings})

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """Sends a body as JSON, or as it is where it is bytes or a generator of them."""
        content = json.dumps(body).encode() if isinstance(body, dict | list | str | None) else body
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=PATIENCE, verify=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, verify=False, **more)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=PATIENCE, verify=False, **more)

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A bare connection, for requests that no client would send.  receive_buffer: bytes that may wait to be read."""
        connection = socket.socket()
        connection.settimeout(PATIENCE)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        return connection


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, which must be in OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    assert isinstance(body["error"]["message"], str) and isinstance(body["error"]["type"], str)
    return dict(body["error"])
