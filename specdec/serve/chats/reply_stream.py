"""Streams of chats whose answers have parts: thoughts and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdec.chat.reply import ReplyReader
from specdec.chat.said import Said
from specdec.generation import Chunk, FinishReason
from specdec.serve.chats.parts import delta_of, joined
from specdec.serve.wire.answers import AnswerHeading, ChunkWriter, reason_of
from specdec.serve.wire.logprobs import Piece
from specdec.serve.wire.prompts_said import ChoicePrompt
from specdec.serve.wire.requests import RequestPlan


def writer_of(
    heading: AnswerHeading, plan: RequestPlan, prompts: Sequence[ChoicePrompt], piece: Piece,
    reader: Callable[[], ReplyReader] | None,
) -> ChunkWriter:  # fmt: skip
    """What writes the events of a plan's stream.  reader: see MadeRequests."""
    if reader is None:
        return ChunkWriter(heading, plan, prompts, piece)
    return ReplyWriter(heading, plan, prompts, piece, [reader() for _ in range(plan.choices)])


class ReplyWriter(ChunkWriter):
    """Writes the events of a stream whose answers have parts.  readers: of each choice."""

    def __init__(
        self, heading: AnswerHeading, plan: RequestPlan, prompts: Sequence[ChoicePrompt], piece: Piece,
        readers: Sequence[ReplyReader],
    ) -> None:  # fmt: skip
        super().__init__(heading, plan, prompts, piece)
        self._readers = readers
        self._calls = [False] * plan.choices

    def _chunk(self, index: int, chunk: Chunk) -> bytes:
        deltas = self._deltas(index, self._readers[index].feed(chunk.text))
        said = self.said(index, chunk)
        if said is not None and not deltas:
            deltas = [{}]
        events = b""
        for delta in deltas:
            events += self.event(index, {"delta": self._begun(index, delta)}, None, said)
            said = None
        return events

    def finish(self, index: int, reason: FinishReason) -> bytes:
        deltas = self._deltas(index, self._readers[index].finish())
        events = b"".join(self.event(index, {"delta": self._begun(index, delta)}, None) for delta in deltas)
        last = self._begun(index, {}) if not self.has_begun[index] else {}
        return events + self.event(index, {"delta": last}, reason_of(reason, self._calls[index]))

    def _deltas(self, index: int, said: Sequence[Said]) -> list[dict[str, Any]]:
        self._calls[index] = self._calls[index] or any(each.kind == "call" for each in said)
        return [delta_of(each) for each in joined(said)]

    def _begun(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        """The same with the role, in a choice's first chunk."""
        if self.has_begun[index]:
            return delta
        self.has_begun[index] = True
        return {"role": "assistant", "content": "" if not {"tool_calls", "reasoning_content"} & delta.keys() else None, **delta}
