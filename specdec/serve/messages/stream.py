"""The events of a streamed message: each block starts, grows by deltas and stops, and then the message does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.chat.reply import ReplyReader
from specdec.chat.said import Said
from specdec.engine.request import Request
from specdec.generation import Chunk, FinishReason, Generation
from specdec.serve.messages.errors import error_body
from specdec.serve.messages.output import MessageHeading, call_block, ended_by, text_block, thinking_block, used_by
from specdec.serve.wire.errors import ApiError, json_bytes
from specdec.serve.wire.requests import RequestPlan

DELTAS = {"content": ("text_delta", "text"), "thought": ("thinking_delta", "thinking"),
          "arguments": ("input_json_delta", "partial_json")}  # fmt: skip


class MessageWriter:
    """Writes the events of one stream.  request: the engine's.

    reader: reads the answer's parts; None: all of it is content.
    """

    def __init__(self, heading: MessageHeading, plan: RequestPlan, request: Request, reader: ReplyReader | None) -> None:
        self._heading, self._plan, self._request, self._reader = heading, plan, request, reader
        self._has_begun = self._calls = False
        self._index = -1  # of the last block
        self._kind: str | None = None  # of the last block, while it is open: content, thought or arguments
        self._thought = ""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        text = chunk.text
        said = self._reader.feed(text) if self._reader else [Said("content", text)] if text else []
        return self._begin() + b"".join(map(self._write, said))

    def finish(self, index: int, reason: FinishReason) -> bytes:
        events = self._begin() + b"".join(map(self._write, self._reader.finish() if self._reader else ()))
        if self._index < 0:
            events += self._open("content", text_block())
        return events + self._close()

    def end(self, generations: Sequence[Generation]) -> bytes:
        (generation,) = generations
        used = self._heading.used(self._plan, generation, self._thought)
        return _event("message_delta", delta=ended_by(generation, self._calls), usage=used) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return _event(**error_body(error, None))

    def _begin(self) -> bytes:
        """The message as it is at first, and one of the pings that clients of Anthropic's API expect anywhere."""
        if self._has_begun:
            return b""
        self._has_begun = True
        used = used_by(len(self._request.given_ids), self._request.stats.cached_tokens, 0)
        message = self._heading.message([], {"stop_reason": None, "stop_sequence": None}, used)
        return _event("message_start", message=message) + _event("ping")

    def _write(self, said: Said) -> bytes:
        events = b""
        if said.kind == "call":
            self._calls = True
            return self._close() + self._open("arguments", call_block(said.text, said.id))
        if self._kind != said.kind:
            events = self._close() + self._open(said.kind, text_block() if said.kind == "content" else thinking_block())
        if said.kind == "thought":
            self._thought += said.text
        kind, field = DELTAS[said.kind]
        return events + self._delta({"type": kind, field: said.text})

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        """Begins a block, which is empty."""
        self._kind, self._index = kind, self._index + 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        if self._kind is None:
            return b""
        events = self._delta({"type": "signature_delta", "signature": ""}) if self._kind == "thought" else b""
        self._kind = None
        return events + _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(type: str, **content: Any) -> bytes:
    return f"event: {type}\ndata: ".encode() + json_bytes({"type": type, **content}) + b"\n\n"
