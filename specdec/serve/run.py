"""Runs the server: listens, says where, and ends in good order on SIGTERM and Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import socket
import sys
import time
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from specdec.async_decoder import AsyncSpecDecoder
from specdec.serve.access.checks import HostCheck
from specdec.serve.app import app_of
from specdec.serve.log import LineHandler, places, write_line
from specdec.serve.options import ServeOptions
from specdec.serve.process.connection import Connection
from specdec.serve.process.connections import Connections
from specdec.serve.process.output import NonBlockingStream
from specdec.serve.state import ServerState

TICK = 0.05  # seconds between two looks at whether the last request has ended
KEEP_ALIVE_SECONDS = 75  # an idle connection; longer than clients and proxies keep theirs, so that they close it first
TICKS_A_SECOND = 10  # of uvicorn


def listen(options: ServeOptions) -> socket.socket:
    """A socket on the options' address, which refuses connections until the server runs.  ValueError if it can't be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(
            f"--host {options.host} is no address of this machine: {error.strerror or error}; nearest thing that works: "
            "--host 127.0.0.1"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        where = f"can't listen on {options.host} port {options.port}: {error.strerror}"
        is_foreign = error.errno == errno.EADDRNOTAVAIL
        nearest = "--host 127.0.0.1, or an address of this machine" if is_foreign else "--port 0, which takes a free port"
        raise ValueError(f"{where}; nearest thing that works: {nearest}") from error
    return listener


def serve(decoder: AsyncSpecDecoder, options: ServeOptions, listener: socket.socket | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then finishes what runs.  Returns the exit code.

    listener: a socket of `listen`; None: one is made.  RuntimeError if the engine has failed for good, soon after that.
    """
    with listener or listen(options) as bound:
        Server(ServerState(decoder, options)).run(sockets=[bound])
    if decoder.failure is not None:
        raise RuntimeError(f"the engine has failed for good: {decoder.failure}") from decoder.failure
    return 0


class Server(uvicorn.Server):
    """uvicorn's server, but one that goes on answering while it drains, and then exits with 0."""

    def __init__(self, state: ServerState) -> None:
        # Its own log lines are few: warnings about connections.
        logger = logging.getLogger("uvicorn")
        logger.handlers, logger.propagate = [LineHandler()], False
        super().__init__(
            uvicorn.Config(
                app_of(state),
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                loop="asyncio",  # what uvicorn always brings along: other installed packages must not change the server
                http=Connection,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(state.times.last),
            )
        )
        self.state = state
        if state.options.is_loopback and state.options.api_key is None:
            state.host_check = HostCheck((*state.options.hosts, state.options.host))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: tuple[Connections, ...] = ()
        self._draining: asyncio.Task[None] | None = None
        self._failed: float | None = None  # when the engine's failure was first seen

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_note_crash)
        make = partial(Connection, config=self.config, server_state=self.server_state, app_state={})
        self._connections = tuple(Connections(self.state, listener, make) for listener in sockets or ())
        await super().startup([])  # of sockets that it is given it would accept by itself
        self._loop = asyncio.get_running_loop()
        if self.state.is_draining:  # the signal came before there was anything to end
            self._begin_draining()
        elif sockets:
            print(f"specdec: listening on {_url(sockets[0])} (model {self.state.options.name})", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to end.  After the engine has failed, only a new process can serve."""
        if self.state.decoder.failure is not None and self._failed is None:
            write_line("server", {"level": "error", "message": f"the engine has failed for good: {self.state.decoder.failure}"})
            self._failed = time.monotonic()
        if counter % round(TICKS_A_SECOND * self.state.times.look) == 0:
            for connections in self._connections:
                connections.look()
        if self._failed is not None and time.monotonic() > self._failed + self.state.times.failed:
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connections in self._connections:
            connections.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal the server drains; on the second the process ends at once."""
        if self.state.is_draining:
            write_line("server", {"level": "warning", "message": "second signal: ending at once"})
            if isinstance(sys.stderr, NonBlockingStream):
                sys.stderr.drain(TICK)
            os._exit(128 + sig)
        self.state.is_draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_draining)

    def _begin_draining(self) -> None:
        self._draining = asyncio.create_task(self.drain())

    async def drain(self) -> None:
        """Takes no new requests, waits for those that run, cuts them off after the grace period, and stops the server."""
        state = self.state
        state.is_draining = True
        seconds = state.options.grace_seconds
        message = f"shutting down: {state.queue.open_choices} choices wait or run, and have {seconds} s to finish"
        write_line("server", {"level": "info", "message": message})
        await self._wait_until_empty(seconds)
        state.cut_off()
        await self._wait_until_empty(state.times.last)
        self.should_exit = True

    async def _wait_until_empty(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.state.queue.is_empty and time.monotonic() < deadline:
            await asyncio.sleep(TICK)


def _note_crash(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio would log by itself in another form: an error that no task waits for.  Its message may quote a request."""
    error = context.get("exception")
    message = f"asyncio: {context['message'].partition('(')[0]}"
    if error is not None:
        message += f": {type(error).__name__} at {', '.join(places(error)[-3:])}"
    write_line("server", {"level": "error", "message": message})


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
