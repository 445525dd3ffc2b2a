"""Answers with the files of the page: static, for anybody, and under a policy by which a browser runs these scripts alone."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from specdec.serve.wire.errors import ApiError
from specdec.trace.html import web_file

FOLDER = "/page/"
KINDS = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
OWN = ("page.html", "page.js", "page.css")
SHARED = ("tree.js", "charts.js", "text.js", "trace.css")  # those of traces
PATHS = ("/", *(FOLDER + name for name in (*OWN[1:], *SHARED)))
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def front_page(request: Request) -> Response:
    return _file("page.html")


async def page_file(request: Request) -> Response:
    """ApiError 404 for a name that is none of the page's."""
    name = request.path_params["name"]
    if FOLDER + name not in PATHS:
        raise ApiError(404, f"there is no {FOLDER}{name[:200]} here; nearest: /", code="not_found")
    return _file(name)


def _file(name: str) -> Response:
    own = files("specdec.serve.page").joinpath("web", name)
    text = own.read_text(encoding="utf-8") if name in OWN else web_file(name)
    return Response(text, media_type=KINDS[name.rpartition(".")[2]], headers=HEADERS)
