"""The log: one line of JSON a request on stderr.  It holds no text of any request unless that is asked for.

`specdec serve` puts a NonBlockingStream in the place of stderr, so no write waits (process/output.py).
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.generation import Generation
from specdec.prompts.chat import ChatPrompt
from specdec.serve.process.output import json_line
from specdec.serve.wire.answers import FINISH_REASONS, usage
from specdec.serve.wire.errors import MAX_MESSAGE_LENGTH, REQUEST_FAILED, ApiError
from specdec.serve.wire.fields import UNKNOWN_FIELD
from specdec.serve.wire.left_out import logged
from specdec.serve.wire.requests import RequestPlan

DEVICE_MODULES = ("torch", "triton")  # their errors speak of memory and kernels; a tokenizer's may quote what it was given
CLIENT_GONE = 499  # the status in the log where nobody was left to answer to
DONE, REFUSED, FAILED, GONE = ENDS = "done", "refused", "failed", "gone"  # of requests; a stream may fail after its status, 200

MAX_PATH_LENGTH = 200  # callers choose the path


@dataclass
class LogEntry:
    """What is known of one HTTP request.  first_text: when the first text of a stream was sent."""

    id: str
    method: str
    path: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    first_text: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def plan(self, plan: RequestPlan, log_prompts: bool) -> None:
        self.notes |= {"stream": plan.stream, "prompts": len(plan.prompts), "choices": plan.choices}
        if plan.left_out:
            self.notes["left_out"] = logged(plan.left_out, log_prompts)
        if log_prompts:
            self.notes["prompt_texts"] = [each.messages if isinstance(each, ChatPrompt) else each for each in plan.prompts]

    def finished(self, plan: RequestPlan, generations: Sequence[Generation], log_prompts: bool) -> None:
        counted = usage(plan, generations)
        self.notes |= {name: counted[name] for name in ("prompt_tokens", "completion_tokens")}
        self.notes |= counted["prompt_tokens_details"] | counted["completion_tokens_details"]
        self.notes["finish_reasons"] = [FINISH_REASONS[generation.finish_reason] for generation in generations]
        if log_prompts:
            self.notes["output_texts"] = [generation.text for generation in generations]

    def failed(self, error: ApiError) -> None:
        """The message is noted where it is about the server; about a request it may quote the request, as does the name of a
        field that does not exist.  Of a request that failed while it ran, it is noted where the error came from."""
        self.notes["error"] = {"code": error.code, "param": None if error.code == UNKNOWN_FIELD else error.param}
        if error.code == REQUEST_FAILED:
            self.notes["error"] |= origin(error)
        elif error.status >= 500:
            self.notes["error"]["message"] = error.message

    def crashed(self, error: BaseException) -> None:
        """An error that nobody expected: where it was raised, but not its message, which may quote the request."""
        self.notes["crash"] = {"type": type(error).__name__, "traceback": places(error)}

    @property
    def end(self) -> str:
        """One of ENDS: how the request has ended."""
        if self.status == CLIENT_GONE:
            return GONE
        if 400 <= self.status < 500:
            return REFUSED
        return DONE if 0 < self.status < 400 and not self.notes.keys() & {"error", "crash"} else FAILED

    def write(self) -> None:
        seconds = time.perf_counter() - self.began
        line = {"request_id": self.id, "method": self.method, "path": self.path[:MAX_PATH_LENGTH], "status": self.status}
        line |= {"seconds": round(seconds, 6), **self.notes}
        if self.first_text is not None:
            line["first_text_seconds"] = round(self.first_text - self.began, 6)
        write_line("request", line)


def origin(error: BaseException) -> dict[str, Any]:
    """The type and the traceback of the first error in a chain, and its message if that can't quote a request's text."""
    while error.__cause__ is not None:
        error = error.__cause__
    kind = type(error)
    found: dict[str, Any] = {"type": kind.__name__, "traceback": "".join(getattr(error, "__notes__", []))}
    if kind.__module__.partition(".")[0] in DEVICE_MODULES or issubclass(kind, FloatingPointError | MemoryError):
        found["message"] = str(error)[:MAX_MESSAGE_LENGTH]
    return found


def places(error: BaseException) -> list[str]:
    """Where an error was raised: the frames of its traceback, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]


class LineHandler(logging.Handler):
    """Writes what the web server itself logs as lines of the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        write_line("server", {"level": record.levelname.lower(), "message": record.getMessage()})


def write_line(event: str, fields: dict[str, Any]) -> None:
    """One line of JSON.  A log that nobody can read any more must not end requests."""
    try:
        sys.stderr.write(json_line(event, fields))
        sys.stderr.flush()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a signal came while a line was being written
        pass
