"""One replica: a decoder behind the HTTP server, in a process that Ray starts, watches and stops.

Ray makes the object, then the application that answers its requests, and calls `check_health` every few seconds.  When it stops
a replica, it sends no more requests there, waits for those that run, and calls `__del__`.  This module imports no Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.async_decoder import AsyncSpecDecoder
from specdec.config import SpecConfig
from specdec.draft.kind import Draft
from specdec.options import EngineOptions
from specdec.serve.app import app_of
from specdec.serve.endpoints import switch_drafts
from specdec.serve.metrics import TotalsCollector
from specdec.serve.middleware import GIVEN_ID, MAX_ID_LENGTH
from specdec.serve.options import ServeOptions
from specdec.serve.replicas.metrics import Families, exposition
from specdec.serve.state import ServerState

ANSWER_SECONDS = 60.0  # for all replicas to do what is asked of all, such as to encode a corpus
SCRAPE_SECONDS = 5.0  # for all replicas to tell their numbers


class RaysId:
    """ASGI middleware: a request has one id in our log, in Ray's logs, and in the answer's header, which Ray writes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for key, value in scope.get("headers", ()) if key == b"x-request-id"]
        if given:
            scope[GIVEN_ID] = given[0].decode("latin-1")[:MAX_ID_LENGTH]
        await self._app(scope, receive, send)


class Replica:
    """A decoder and its server's state.  All of it runs on the event loop that Ray gives a replica."""

    def __init__(
        self,
        target: str | Path,
        draft: Draft,
        spec: SpecConfig | None,
        options: ServeOptions,
        engine: EngineOptions,
    ) -> None:
        self.decoder = AsyncSpecDecoder.from_pretrained(target, draft, spec, options=engine)
        self._state = ServerState(self.decoder, options)
        from ray import serve

        context = serve.get_replica_context()
        self._name = context.replica_tag
        self._all_replicas = lambda: serve.get_deployment_handle(context.deployment, context.app_name)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = app_of(self._state, self.all_metrics, self.set_all_corpora, self.switch_all_drafts)
        app.add_middleware(RaysId)  # around RequestMiddleware, which was added before
        return app

    async def check_health(self) -> None:
        """RuntimeError once the engine has failed for good, after which Ray starts another replica."""
        if (failure := self.decoder.failure) is not None:
            raise RuntimeError(f"the engine has failed for good: {failure}") from failure

    async def numbers(self) -> tuple[str, Families]:
        """The replica's name, and its metrics."""
        state = self._state
        return self._name, list(TotalsCollector(lambda: state.decoder.totals, state.counts, state.options).collect())

    async def all_metrics(self) -> bytes:
        """The metrics of all replicas: a proxy of Ray sends whoever asks for them to any one replica."""
        asked = self._all_replicas().broadcast("numbers")
        try:
            answers = await asked.results_async(timeout_s=SCRAPE_SECONDS, return_exceptions=True)
        except TimeoutError:  # a replica hangs, which its health check will find: the others' numbers must not wait for that
            answers = [await self.numbers()]
        return exposition(dict(answer for answer in answers if not isinstance(answer, BaseException)))

    async def set_corpus(self, name: str, texts: Sequence[str]) -> int:
        """Sets a corpus of this replica.  Returns how many tokens it has."""
        return await self.decoder.prepared(lambda decoder: decoder.set_corpus(name, texts))

    async def set_all_corpora(self, name: str, texts: Sequence[str]) -> int:
        """Sets it in every replica that runs now: a proxy of Ray sends whoever posts it to any one of them.

        One that starts later reads the file of the settings alone.  Texts are the same with a corpus and without.
        ValueError and TypeError name what is wrong with it; RuntimeError: some replica did not answer, and may lack it.
        """
        tokens = await self.set_corpus(name, texts)  # first here, so that errors are our own and nobody has what is wrong
        await self._ask_all(f"set corpus {name!r}", "set_corpus", name, texts)
        return tokens

    async def switch_drafts(self, enabled: bool | None) -> bool:
        """Switches this replica's drafts; None leaves them as they are.  Returns whether it drafts."""
        return await switch_drafts(self.decoder.decoder, enabled)

    async def switch_all_drafts(self, enabled: bool | None) -> bool:
        """Switches drafts in every replica that runs now; None leaves them as they are.  Returns whether all of them draft.

        One that starts later drafts.  RuntimeError: some replica did not answer, and may not have switched.
        """
        return all(await self._ask_all("told whether they draft", "switch_drafts", enabled))

    async def _ask_all(self, what: str, method: str, *args: Any) -> list[Any]:
        """What a method of every replica that runs now returns.  RuntimeError unless all have answered.

        what: what they do, as the end of "replicas have ...".
        """
        asked = self._all_replicas().broadcast(method, *args)
        try:
            answers: list[Any] = await asked.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        except TimeoutError as error:
            raise RuntimeError(f"not all replicas have {what} within {ANSWER_SECONDS:g} s") from error
        if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise RuntimeError(f"{len(failed)} of {len(answers)} replicas have not {what}") from failed[0]
        return answers

    def __del__(self) -> None:
        if hasattr(self, "decoder"):  # otherwise it could not be loaded
            self.decoder.decoder.close()
