"""A trace as one HTML file: its data, what draws it, and a policy by which a browser runs that and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files

from specdec.trace.trace import Trace

SCRIPTS, STYLE = ("tree.js", "charts.js", "text.js", "trace.js"), "trace.css"


def as_html(trace: Trace) -> str:
    """The whole file.  Texts stand in it as JSON alone, in which nothing can end the element around them."""
    script, style = "\n".join(web_file(name) for name in SCRIPTS), web_file(STYLE)
    runs = f"script-src {_hash(script)}; style-src {_hash(style)}"
    policy = f"default-src 'none'; img-src data:; {runs}; base-uri 'none'; form-action 'none'"
    data = json.dumps(json.loads(trace.as_json()), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = web_file("trace.html")
    for mark, text in (
        ("POLICY", policy),
        ("STYLE", style),
        ("SCRIPT", script),
        ("DATA", data),
    ):  # data last: it may hold marks
        before, found, after = page.partition(f"{{{{{mark}}}}}")
        assert found, mark
        page = before + text + after
    return page


def web_file(name: str) -> str:
    """A file of web/, which the server's page shares."""
    return files("specdec.trace").joinpath("web", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
