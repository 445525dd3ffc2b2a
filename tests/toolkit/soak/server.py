"""The HTTP server over a decoder, in a thread of the test's process, for as long as a block runs."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.async_decoder import AsyncSpecDecoder
from specdec.decoder import SpecDecoder
from specdec.serve.options import ServeOptions
from specdec.serve.run import Server, listen
from specdec.serve.state import ServerState


@contextmanager
def open_server(
    decoder: SpecDecoder, options: ServeOptions, send_buffer: int | None = None, keep_alive: int = 75
) -> Iterator[int]:
    """The port at which the server listens, if the options' port is 0.  The end of the block closes the decoder too.

    send_buffer: bytes that the system keeps of an answer that its client does not read; None: what the system likes.
    keep_alive: seconds after which the server closes a connection without requests, and forgets one that broke.
    """
    with decoder, listen(options) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
        server = Server(ServerState(AsyncSpecDecoder(decoder), options))
        server.config.timeout_keep_alive = keep_alive
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="http server")
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
