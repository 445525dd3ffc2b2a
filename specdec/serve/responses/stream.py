"""The events of a streamed response: each item is added, grows by deltas and is done, and then the response is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specdec.chat.reply import ReplyReader
from specdec.chat.said import Said
from specdec.generation import Chunk, FinishReason, Generation
from specdec.serve.responses.output import ResponseHeading, call_item, message_item, thought_item
from specdec.serve.responses.thoughts import pack
from specdec.serve.responses.tools import called, namespaces_of
from specdec.serve.wire.errors import ApiError
from specdec.serve.wire.logprobs import Piece, chat_logprobs
from specdec.serve.wire.requests import RequestPlan

TEXTS = {"content": "response.output_text", "thought": "response.reasoning_text"}  # events of an item's text, by kind
ARGUMENTS = "response.function_call_arguments"


class ResponseWriter:
    """Writes the events of one stream.  reader: reads the answer's parts; None: all of it is content."""

    def __init__(self, heading: ResponseHeading, plan: RequestPlan, piece: Piece, reader: ReplyReader | None) -> None:
        self._heading, self._plan, self._piece, self._reader = heading, plan, piece, reader
        self._namespaces = namespaces_of(heading.body.get("tools"))
        self._number = 0  # of the next event
        self._items: list[dict[str, Any]] = []
        self._kind: str | None = None  # of the last item, while it is open: content, thought or call
        self._logprobs: list[Any] = []

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        events = b"" if self._number else self._begin()
        new = chat_logprobs(chunk.logprobs, self._piece)["content"] if chunk.logprobs else []
        self._logprobs += new
        text = chunk.text
        said = self._reader.feed(text) if self._reader else [Said("content", text)] if text else []
        return events + b"".join(self._write(each, new) for each in said)

    def finish(self, index: int, reason: FinishReason) -> bytes:
        events = b"" if self._number else self._begin()
        events += b"".join(self._write(each, []) for each in (self._reader.finish() if self._reader else ()))
        if not self._items:
            events += self._open("content", message_item(status="in_progress"))
        return events + self._close("incomplete" if reason == "length" else "completed")

    def end(self, generations: Sequence[Generation]) -> bytes:
        response = self._heading.finished(self._plan, generations[0], self._items)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return self._event("error", code=error.code or error.kind, message=error.message, param=error.param)

    def _begin(self) -> bytes:
        response = self._heading.response("in_progress", [])
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def _write(self, said: Said, logprobs: Sequence[Any]) -> bytes:
        events = b""
        if said.kind == "call":
            item = call_item(called(said.text, self._namespaces), said.id, status="in_progress")
            return self._close() + self._open("call", item)
        if said.kind == "arguments":
            self._items[-1]["arguments"] += said.text
            return self._event(f"{ARGUMENTS}.delta", **self._at(), delta=said.text)
        if self._kind != said.kind:
            item = (message_item if said.kind == "content" else thought_item)(status="in_progress")
            events = self._close() + self._open(said.kind, item)
        self._items[-1]["content"][0]["text"] += said.text
        more = {"logprobs": list(logprobs)} if said.kind == "content" else {}
        return events + self._event(f"{TEXTS[said.kind]}.delta", **self._at(0), delta=said.text, **more)

    def _open(self, kind: str, item: dict[str, Any]) -> bytes:
        """Adds an item, which is empty."""
        self._kind = kind
        self._items.append(item)
        shell = item if kind == "call" else {**item, "content": []}
        events = self._event("response.output_item.added", output_index=len(self._items) - 1, item=shell)
        if kind != "call":
            events += self._event("response.content_part.added", **self._at(0), part=item["content"][0])
        return events

    def _close(self, status: str = "completed") -> bytes:
        """Says that the open item is done, if there is one."""
        if self._kind is None:
            return b""
        item, kind, self._kind = self._items[-1], self._kind, None
        item["status"] = status
        if kind == "call":
            events = self._event(f"{ARGUMENTS}.done", **self._at(), name=item["name"], arguments=item["arguments"])
        else:
            part, more = item["content"][0], {}
            if kind == "thought" and self._heading.carries_thoughts:
                item["encrypted_content"] = pack(part["text"])
            if kind == "content":
                part["logprobs"] = self._logprobs
                more = {"logprobs": self._logprobs}
            events = self._event(f"{TEXTS[kind]}.done", **self._at(0), text=part["text"], **more)
            events += self._event("response.content_part.done", **self._at(0), part=part)
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _at(self, part: int | None = None) -> dict[str, Any]:
        """Where an event belongs.  part: of the item's content."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if part is None else {**place, "content_index": part}

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        data = json.dumps({"type": kind, "sequence_number": number, **content}, separators=(",", ":"), allow_nan=False)
        return f"event: {kind}\ndata: {data}\n\n".encode()
