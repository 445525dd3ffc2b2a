"""Puts the application together: the endpoints, the gate around them, and errors in OpenAI's form."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from specdec.checks import nearest_name
from specdec.serve.endpoints import Endpoints, ReadMetrics, SetCorpus, SwitchDrafts
from specdec.serve.log import CLIENT_GONE
from specdec.serve.messages.errors import COUNT_TOKENS, MESSAGES
from specdec.serve.middleware import ENTRY, OPEN_PATHS, RequestMiddleware, error_answer
from specdec.serve.page.files import FOLDER, front_page, page_file
from specdec.serve.responses.request import RESPONSES
from specdec.serve.state import ServerState
from specdec.serve.wire.errors import ApiError, ClientGone
from specdec.serve.wire.fields import CHAT, COMPLETIONS, CORPUS, DRAFTING

PATHS = (
    "/v1/models", COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, CORPUS, DRAFTING, "/tokenize", "/detokenize",
    "/version", *OPEN_PATHS,
)  # fmt: skip
# Where callers look for what stands under another path here, or nowhere; names that look alike would lead astray.
ELSEWHERE = {
    "/v1/v1/messages": MESSAGES, "/v1/complete": MESSAGES, "/v1/chat": CHAT, "/api/chat": CHAT, "/api/generate": COMPLETIONS,
    "/generate": COMPLETIONS, "/v1/generate": COMPLETIONS, "/v1/engines": "/v1/models", "/v1": "/v1/models",
    "/healthz": "/health", "/livez": "/health", "/readyz": "/ready", "/docs": "docs/SERVING.md of specdec",
}  # fmt: skip
ABSENT = ("embeddings", "rerank", "moderations", "images", "audio", "files", "batches", "assistants", "threads")


def app_of(
    state: ServerState,
    read_metrics: ReadMetrics | None = None,
    set_corpus: SetCorpus | None = None,
    switch: SwitchDrafts | None = None,
) -> FastAPI:
    """The application over a server's state.  FastAPI's pages of documentation are off: they load scripts from another site.

    read_metrics: what /metrics answers.  set_corpus: what /v1/corpus does.  switch: what /v1/drafting does.  None: what this
    server alone has and does.
    """
    app = FastAPI(title="specdec", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    state.counts.know((*PATHS, "/"))
    endpoints = Endpoints(state, read_metrics, set_corpus, switch)
    for path, endpoint, methods in (
        (COMPLETIONS, endpoints.completions, ["POST"]),
        (CHAT, endpoints.chat, ["POST"]),
        (RESPONSES, endpoints.responses, ["POST"]),
        (MESSAGES, endpoints.messages, ["POST"]),
        (COUNT_TOKENS, endpoints.count_tokens, ["POST"]),
        (CORPUS, endpoints.corpus, ["POST"]),
        (DRAFTING, endpoints.drafting, ["GET", "HEAD", "POST"]),
        ("/tokenize", endpoints.tokenize, ["POST"]),
        ("/detokenize", endpoints.detokenize, ["POST"]),
        ("/version", endpoints.version, ["GET", "HEAD"]),
        ("/v1/models", endpoints.models, ["GET", "HEAD"]),
        ("/v1/models/{name:path}", endpoints.model, ["GET", "HEAD"]),
        ("/health", endpoints.health, ["GET", "HEAD"]),
        ("/ready", endpoints.ready, ["GET", "HEAD"]),
        ("/metrics", endpoints.metrics, ["GET", "HEAD"]),
    ):
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    if state.options.page:
        app.add_api_route("/", front_page, methods=["GET", "HEAD"], response_model=None)
        app.add_api_route(FOLDER + "{name:path}", page_file, methods=["GET", "HEAD"], response_model=None)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(ClientGone, _answer_nobody)
    app.add_exception_handler(HTTPException, _answer_wrong_path)
    app.add_middleware(RequestMiddleware, state=state)
    app.state.server = state
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope[ENTRY].failed(error)
    return error_answer(error, request.scope[ENTRY], request.app.state.server.times)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _answer_wrong_path(request: Request, error: Exception) -> Response:
    """What the router refuses: a path that does not exist, or another method than the path has."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        message = f"{request.method} is not what {path} takes; nearest: {(error.headers or {}).get('Allow', '')}"
        wrong = ApiError(405, message, code="method_not_allowed")
    else:
        alike = nearest_path(path)
        why = " (this server keeps no responses)" if path.startswith(f"{RESPONSES}/") else ""
        message = f"there is no {path} here{why}; " + (f"nearest: {alike}" if alike else f"there are: {', '.join(PATHS)}")
        wrong = ApiError(error.status_code, message, code="not_found")
    request.scope[ENTRY].failed(wrong)
    answer = error_answer(wrong, request.scope[ENTRY])
    answer.headers.update(error.headers or {})
    return answer


def nearest_path(path: str) -> str:
    """The path that does what a caller of another one most likely wants; empty if none does."""
    bare = "/" + path.strip("/").lower()
    if bare in ELSEWHERE:
        return ELSEWHERE[bare]
    if bare in PATHS or f"/v1{bare}" in PATHS:  # a slash too many, or a base URL without /v1
        return bare if bare in PATHS else f"/v1{bare}"
    if any(part in ABSENT for part in bare.split("/")):
        return ""
    return nearest_name(bare, PATHS)
