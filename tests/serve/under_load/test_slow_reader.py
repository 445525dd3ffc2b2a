"""A client that stops reading its stream while others read theirs.

Keeps out: a server that waits for a slow reader and meanwhile serves nobody, a row that stays taken until its text has been
read, and texts that pile up in the server piece by piece.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.soak.run import pair_with_chat
from toolkit.soak.server import open_server

from specdec.serve.options import ServeOptions

BUFFER = 4096  # bytes that the system keeps for either side: little, so that a reader who stops is felt soon
LARGE = {"prompt": [5, 6, 7], "max_tokens": 200, "n": 6, "seed": 1, "temperature": 1.0}  # over 200 KB of events
SMALL = {"prompt": [8, 9], "max_tokens": 60, "seed": 2, "temperature": 1.0}
PATIENCE = 120.0  # seconds


@dataclass
class Reader:
    """A bare client of one stream, on a thread of its own.

    may_read: without it the reader stops after the first piece of text, until it is set.  pieces: how many have come.
    """

    port: int
    body: dict[str, Any]
    may_read: threading.Event
    has_begun: threading.Event = field(default_factory=threading.Event)
    pieces: int = 0
    texts: dict[int, str] = field(default_factory=dict)

    def start(self) -> Reader:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def join(self) -> None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the stream does not end"

    def _run(self) -> None:
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        connection.sock.connect(("127.0.0.1", self.port))
        body = {"model": "m", "stream": True, "ignore_eos": True, "speculate": False, **self.body}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while line := response.readline():
            if line.startswith(b"data: {"):
                self._take(json.loads(line.removeprefix(b"data: ")))
                self.has_begun.set()
                self.may_read.wait(PATIENCE)
        connection.close()

    def _take(self, event: dict[str, Any]) -> None:
        self.pieces += 1
        for choice in event["choices"]:
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]


def run(port: int, driver: Driver, stops: bool) -> tuple[Reader, list[Reader]]:
    """(the reader of a large stream, readers of small ones beside it).  stops: the first one reads only after everything."""
    may_read, always = threading.Event(), threading.Event()
    always.set()
    large = Reader(port, LARGE, may_read if stops else always).start()
    assert large.has_begun.wait(PATIENCE)
    others = [Reader(port, SMALL, always).start() for _ in range(2)]
    for other in others:
        other.join()  # while the first one has stopped
    if stops:
        deadline = time.monotonic() + PATIENCE
        while not driver.is_idle:  # its rows are free although nobody has read their texts
            assert time.monotonic() < deadline, "a reader that has stopped holds its rows"
            time.sleep(0.02)
        assert large.pieces == 1
        may_read.set()
    large.join()
    return large, others


@pytest.mark.slow_cases(keep=0)
def test_a_slow_reader_holds_up_nobody(tmp_path: Path) -> None:
    """Others get their whole texts while it has stopped; the text that waits is kept once, not piece by piece."""
    decoder = pair_with_chat(tmp_path, device="cpu", dtype="float32", max_batch_size=8)
    driver = Driver(decoder)
    with open_server(decoder, ServeOptions(port=0, model_name="m"), BUFFER) as port:
        fast, beside_fast = run(port, driver, stops=False)
        slow, beside_slow = run(port, driver, stops=True)
        assert slow.texts == fast.texts and len(slow.texts) == LARGE["n"] and all(slow.texts.values())
        assert [other.texts for other in beside_slow] == [other.texts for other in beside_fast]
        assert slow.pieces < LARGE["n"] * LARGE["max_tokens"] / 2, slow.pieces  # rounds came together
        driver.assert_nothing_leaked()
