"""The HTTP server over a decoder, in a thread of this process, for as long as a block runs."""

from __future__ import annotations

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
def http_server(decoder: SpecDecoder, options: ServeOptions) -> Iterator[str]:
    """The base URL of the API, served as `specdec serve` does.  The end of the block closes the decoder too."""
    with decoder, listen(options) as listener:
        server = Server(ServerState(AsyncSpecDecoder(decoder), options))
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name="http server")
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the HTTP server did not start; its errors are printed above")
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()
