"""docs/SERVING.md against the code of the HTTP server: what either has and the other has not is named.

Each check compares the rows of some tables of the page with what the code gives.  The checks themselves are held too: a page
that lacks any one of these rows, or has one more, fails.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from toolkit.driver import Driver
from toolkit.serving.server import Served, error_of

from specdec import SamplingParams, SpecDecoder, Stats, shipped
from specdec.cli.flags import flag_of
from specdec.engine.totals import Totals
from specdec.generation import Generation
from specdec.serve import app, run
from specdec.serve.log import CLIENT_GONE, LineHandler, LogEntry
from specdec.serve.metrics import STATUSES, TotalsCollector
from specdec.serve.options import KEY_VARIABLE, ServeOptions
from specdec.serve.process.descriptors import MAX_CONNECTIONS, WANTED
from specdec.serve.process.output import CLOSING_SECONDS, MAX_HELD
from specdec.serve.state import Counts
from specdec.serve.times import TIMES
from specdec.serve.wire import errors, fields
from specdec.serve.wire.answers import usage
from specdec.serve.wire.body import MIN_RATE
from specdec.serve.wire.requests import DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURE, RequestPlan

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "SERVING.md").read_text()
OF = {"both": (fields.COMPLETIONS, fields.CHAT), "completions": (fields.COMPLETIONS,), "chat": (fields.CHAT,)}
# Fields that the page leaves to API.md, whose own test compares them with the code.
OPTIONS = {*fields.SAMPLING_FIELDS} & {*fields.EXTENSIONS}
ROUTER_STATUS = 404  # of the one error whose status the code takes from the router; a test below asks for it
Row = tuple[str, ...]


def table(page: str, heading: str) -> list[str]:
    """The rows of the table under a heading, without the column names and the ruler."""
    match = re.search(rf"^#+ {re.escape(heading)}$\n(.*?)(?=^#|\Z)", page, re.S | re.M)
    return [line for line in (match[1] if match else "").splitlines() if line.startswith("|")][2:]


def rows(page: str, heading: str) -> list[Row]:
    """The cells of the rows of a table."""
    return [
        tuple(cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")) for line in table(page, heading)
    ]


def bare(cell: str) -> str:
    """A cell without its backticks."""
    return cell.strip("`")


def quoted(cell: str) -> list[str]:
    """Everything in backticks."""
    return re.findall(r"`([^`]+)`", cell)


# ---- what the page says, and what the code says: each pair must be equal ----


def page_flags(page: str) -> list[Row]:
    return [(bare(row[0]).split()[0], bare(row[1])) for row in rows(page, "Flags of the server")]


def code_flags() -> list[Row]:
    options = dataclasses.fields(ServeOptions)
    return [(flag_of(item.name), "" if item.default in (None, False) else str(item.default)) for item in options]


def page_paths(page: str) -> list[str]:
    return [bare(row[0]) for row in rows(page, "Endpoints")]


def code_paths() -> list[str]:
    return list(app.PATHS)


def page_used(page: str) -> list[Row]:
    """(field, path, default) of all fields that are used; the default as JSON."""
    both = rows(page, "Fields of OpenAI's API") + rows(page, "Extensions")
    return [(bare(row[0]), path, bare(row[2])) for row in both for path in OF[row[1]]]


def code_used() -> list[Row]:
    given = {item.name: item.default for cls in (RequestPlan, SamplingParams) for item in dataclasses.fields(cls)}
    given["temperature"] = DEFAULT_TEMPERATURE
    texts = {name: "" if default in (None, dataclasses.MISSING) else json.dumps(default) for name, default in given.items()}
    texts["max_tokens"] = f"{DEFAULT_MAX_TOKENS} of a completion; of a chat, what the context has left"
    used = [(name, path) for path, names in fields.USED_FIELDS.items() for name in names if name not in OPTIONS]
    return [(name, path, texts.get(name, "")) for name, path in used]


def page_extensions(page: str) -> list[str]:
    return [bare(row[0]) for row in rows(page, "Extensions")]


def code_extensions() -> list[str]:
    return [name for name in fields.EXTENSIONS if name not in OPTIONS]


def page_neutral(page: str) -> list[Row]:
    """(field, where, values as JSON) of all fields that must change nothing."""
    found = []
    for name, of, values in rows(page, "Fields that must change nothing"):
        kept = [json.dumps(json.loads(value)) for value in quoted(values.replace("or the value of `n`", ""))]
        found += [(bare(name), where, *kept) for where in OF.get(of, (of,))]
    return found


def code_neutral() -> list[Row]:
    tables = {
        **fields.NEUTRAL_VALUES,
        "a message": fields.NEUTRAL_MESSAGE_VALUES,
        "stream_options": fields.NEUTRAL_STREAM_VALUES,
    }
    return [(name, of, *map(json.dumps, values)) for of, table in tables.items() for name, values in table.items()]


def page_usage(page: str) -> list[str]:
    return [bare(row[0]) for row in rows(page, "Usage")]


def code_usage() -> list[str]:
    counted = usage(plan(), [generation()])
    inner = {name: list(value) for name, value in counted.items() if isinstance(value, dict)}
    return [f"{name}.{part}" for name in counted for part in inner.get(name, [])] + [n for n in counted if n not in inner]


def page_errors(page: str) -> list[Row]:
    return [tuple(bare(cell) for cell in row[:3]) for row in rows(page, "Errors")]


@functools.cache  # all files of the server are parsed
def code_errors() -> frozenset[Row]:
    return frozenset(found for path in sorted((ROOT / "specdec" / "serve").rglob("*.py")) for found in errors_made(path))


def page_metrics(page: str) -> list[Row]:
    return [(bare(row[0]), row[1], bare(row[2])) for row in rows(page, "Metrics")]


def code_metrics() -> list[Row]:
    totals = Totals()
    totals.paths[(2, 1)] = 1
    found = []
    counts = Counts(Counter({200: 1}))
    counts.know(app.PATHS)
    for metric in TotalsCollector(lambda: totals, counts, ServeOptions()).collect():
        assert metric.samples, metric.name
        labels = {label for sample in metric.samples for label in sample.labels} - {"le", "model"}
        name = metric.name + ("_total" if metric.type == "counter" else "")
        found.append((name, metric.type, ", ".join(sorted(labels))))
    return found


def page_log(page: str) -> list[str]:
    return [name for row in rows(page, "Log") for name in quoted(row[0])]


def code_log() -> set[str]:
    entry, written = LogEntry("req-1", "POST", fields.CHAT), io.StringIO()
    entry.plan(plan(), log_prompts=True)
    entry.finished(plan(), [generation()], log_prompts=True)
    entry.failed(errors.internal())
    entry.crashed(ValueError())
    entry.first_text = entry.began
    with patch("specdec.serve.log.sys", SimpleNamespace(stderr=written)):
        entry.write()
    return set(json.loads(written.getvalue()))


CHECKS: dict[str, tuple[Callable[[str], Any], Callable[[], Any], list[str]]] = {  # what the page has, what the code has, where
    "flags": (page_flags, code_flags, ["Flags of the server"]),
    "paths": (page_paths, code_paths, ["Endpoints"]),
    "fields": (page_used, code_used, ["Fields of OpenAI's API", "Extensions"]),
    "extensions": (page_extensions, code_extensions, ["Extensions"]),
    "neutral fields": (page_neutral, code_neutral, ["Fields that must change nothing"]),
    "usage": (page_usage, code_usage, ["Usage"]),
    "errors": (page_errors, code_errors, ["Errors"]),
    "metrics": (page_metrics, code_metrics, ["Metrics"]),
    "log": (page_log, code_log, ["Log"]),
}


def faults(check: str, page: str) -> list[str]:
    """What is on the page or in the code alone."""
    on_page, in_code = (Counter(found) for found in (CHECKS[check][0](page), CHECKS[check][1]()))
    return [f"only on the page: {item}" for item in on_page - in_code] + [f"missing: {item}" for item in in_code - on_page]


def plan() -> RequestPlan:
    return RequestPlan(fields.CHAT, [[]], "messages", SamplingParams(), None, left_out=["odd"])


def generation() -> Generation:
    return Generation(prompt_token_ids=[1], token_ids=[2], text="b", finish_reason="eos", stats=Stats(), origins=[0])


def errors_made(path: Path) -> Iterator[Row]:
    """(status, type, code) of every error that a module makes."""
    tree = ast.parse(path.read_text())
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("ApiError", "wrong"):
            given: dict[str, ast.expr | None] = {word.arg: word.value for word in node.keywords if word.arg}
            if node.func.id == "wrong":
                code = node.args[2] if len(node.args) > 2 else given.get("code")
                yield "400", errors.INVALID, spelled(code, module)
            elif path.name == "errors.py" and spelled(given.get("code"), module) == "code":
                continue  # the body of `wrong` itself
            else:
                status = node.args[0].value if isinstance(node.args[0], ast.Constant) else ROUTER_STATUS
                yield str(status), spelled(given.get("kind"), module, errors.INVALID), spelled(given.get("code"), module)


def spelled(node: ast.expr | None, module: Any, default: str = "null") -> str:
    """The value of a constant, or of a module's constant; the name itself of anything else."""
    if node is None:
        return default
    if isinstance(node, ast.Constant):
        return default if node.value is None else str(node.value)
    assert isinstance(node, ast.Name), f"{module.__name__}:{node.lineno}: this test can't read the code of that error"
    return str(getattr(module, node.id, node.id))


# ---- tests ----


@pytest.mark.parametrize("check", CHECKS)
def test_the_page_is_the_codes(check: str) -> None:
    """Keeps out: a flag, field, error or metric that nobody can look up, and one that was renamed, removed or has another
    default, type or label."""
    assert faults(check, PAGE) == []


@pytest.mark.parametrize("check", CHECKS)
def test_every_missing_row_and_every_invented_one_is_seen(check: str) -> None:
    """Keeps out: a comparison that overlooks rows, or that finds no table and compares nothing with nothing."""
    for heading in CHECKS[check][2]:
        before, mark, after = PAGE.partition(f"# {heading}\n")
        lines = table(PAGE, heading)
        assert len(lines) >= 3
        for line in lines:
            assert faults(check, before + mark + after.replace(f"{line}\n", "", 1)), f"without {line}"
            made_up = re.sub(r"\w+", "made_up", line, count=1)
            assert faults(check, before + mark + after.replace(line, f"{line}\n{made_up}", 1)), f"with {made_up}"


def test_an_error_in_the_code_is_found() -> None:
    """Keeps out: a search of the code that misses how some module makes its errors."""
    found = code_errors()
    assert {("429", "rate_limit_error", "queue_full"), ("413", "invalid_request_error", "body_too_large")} <= found
    for make in (errors.queue_full(1), errors.shutting_down(), errors.cut_off(), errors.internal(), errors.engine_failed("x")):
        assert (str(make.status), make.kind, make.code) in found
    assert (str(errors.wrong("n", "x").status), errors.wrong("n", "x").kind, "null") in found


def test_the_routers_error_has_the_status_that_the_page_says() -> None:
    """Keeps out: a status that is on the page because this test assumed it."""
    with (
        SpecDecoder.from_pretrained(shipped.target_folder(), device="cpu", max_batch_size=1) as decoder,
        Served(decoder) as server,
    ):
        assert error_of(server.get("/v2"), ROUTER_STATUS)["code"] == "not_found"
        Driver(decoder).assert_nothing_leaked()


def test_numbers_in_the_text_are_the_codes() -> None:
    """Keeps out: a time or a variable that changed in the code alone."""
    assert KEY_VARIABLE in PAGE and f"`Retry-After: {errors.RETRY_SECONDS}`" in PAGE
    last = round(TIMES.last * 2 + CLOSING_SECONDS)  # for answers to what was cut off, connections to close, and the log
    assert f"closed after {run.KEEP_ALIVE_SECONDS} s" in PAGE and f"for each {MIN_RATE >> 10} KiB" in PAGE
    assert f"at most {MAX_CONNECTIONS}" in PAGE and f"up to {WANTED}" in PAGE and f"up to {MAX_HELD >> 20} MiB" in PAGE
    assert f"up to {last} seconds more than the grace period" in PAGE
    with contextlib.redirect_stderr(io.StringIO()) as written, patch("specdec.serve.log.sys", SimpleNamespace(stderr=written)):
        LineHandler().emit(SimpleNamespace(levelname="INFO", getMessage=lambda: "x"))  # type: ignore[arg-type]
    server_line = set(json.loads(written.getvalue())) - {"time", "event"}
    assert server_line == {"level", "message"} and "have `level`\nand `message`" in PAGE


def test_every_status_has_a_series_from_the_start() -> None:
    """Keeps out: an error whose first answer no rate counts, and a series of a status that no answer has."""
    assert {*STATUSES} == {200, 204, CLIENT_GONE} | {int(status) for status, *_ in code_errors()}
