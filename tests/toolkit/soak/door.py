"""The HTTP door over a decoder, in a thread of the test's process, for as long as a block runs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from specdec.async_decoder import AsyncSpecDecoder
from specdec.decoder import SpecDecoder
from specdec.serve.app import create_app
from specdec.serve.options import ServeOptions


@contextmanager
def open_door(decoder: SpecDecoder, options: ServeOptions, send_buffer: int | None = None) -> Iterator[int]:
    """The port of loopback at which the door listens.  The end of the block closes the decoder too.

    send_buffer: bytes that the system keeps of an answer that its client does not read; None: what the system likes.
    """
    listener = socket.socket()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    listener.bind(("127.0.0.1", 0))
    app = create_app(AsyncSpecDecoder(decoder), options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="http door")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the door did not start"
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
