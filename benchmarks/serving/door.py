"""The HTTP door over a decoder, in a thread of this process, for as long as a block runs."""

from __future__ import annotations

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
def http_door(decoder: SpecDecoder, options: ServeOptions) -> Iterator[str]:
    """The base URL of the API at a free port of loopback.  The end of the block closes the decoder too."""
    app = create_app(AsyncSpecDecoder(decoder), options)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, name="http door")
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the HTTP door did not start; its errors are printed above")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.should_exit = True
        thread.join()
