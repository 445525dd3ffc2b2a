"""The events of a streamed message against the message that is not streamed, for one text cut at every place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from toolkit.serving.messages import events_of, message_of, without_ids

from specdec.chat.formats.table import FORMATS, THOUGHTS
from specdec.chat.reply import MarkedReader, read_reply
from specdec.chat.tools import read_rules
from specdec.generation import Chunk, Generation, Stats
from specdec.serve.messages.output import MessageHeading, blocks_of, ended_by, input_of
from specdec.serve.messages.stream import MessageWriter
from specdec.serve.wire.fields import CHAT
from specdec.serve.wire.requests import read_plan

TOOLS = read_rules([{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "ab"]).tools
TEXT = (
    '<think>Hm, "so".</think>Let me look.<tool_call>\n{"name": "a", "arguments": {"text": "x\\n\\u00e9}", "n": [1, 2.5]}}\n'
    '</tool_call>\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
)
HEADING = MessageHeading("msg_1", "tiny", len)
PLAN = read_plan({"messages": [{"role": "user", "content": "x"}]}, CHAT, "tiny", None)
REQUEST: Any = SimpleNamespace(given_ids=[1, 2, 3], stats=Stats(cached_tokens=2))


def reader() -> MarkedReader:
    return MarkedReader(THOUGHTS["think"], FORMATS["hermes"], TOOLS)


def generation(text: str, reason: Any) -> Generation:
    return Generation([1, 2, 3], [0] * len(text), text, reason, Stats(cached_tokens=2), [0] * len(text))


def whole(text: str, reason: Any) -> dict[str, Any]:
    reply, made = read_reply(reader(), text), generation(text, reason)
    used = HEADING.used(PLAN, made, reply.thought or "")
    return without_ids(HEADING.message(blocks_of(reply), ended_by(made, bool(reply.calls)), used))


def streamed(pieces: list[str], reason: Any) -> dict[str, Any]:
    writer, text = MessageWriter(HEADING, PLAN, REQUEST, reader()), "".join(pieces)
    events = b"".join(writer.chunk(0, Chunk(piece, [0] * len(piece), [])) for piece in pieces)
    events += writer.finish(0, reason) + writer.end([generation(text, reason)])
    return without_ids(message_of(events_of(events.decode())))


def test_a_text_cut_at_every_place_makes_the_message() -> None:
    """Keeps out: a block that is begun twice or never ended, a mark that is shown, and arguments in another call."""
    expected = whole(TEXT, "eos")
    kinds = ["thinking", "text", "tool_use", "tool_use"]
    assert [block["type"] for block in expected["content"]] == kinds and expected["stop_reason"] == "tool_use"
    assert expected["content"][2]["input"] == {"text": "x\né}", "n": [1, 2.5]} and expected["content"][3]["input"] == {}
    assert expected["usage"]["input_tokens"] == 1 and expected["usage"]["cache_read_input_tokens"] == 2
    for place in range(len(TEXT) + 1):
        assert streamed([TEXT[:place], TEXT[place:]], "eos") == expected, TEXT[:place]
    assert streamed(list(TEXT), "eos") == expected


def test_a_text_that_ends_at_any_place_makes_the_message() -> None:
    """Keeps out: an empty block after a thought that was cut off, none at all for an empty text, and a stream whose call has
    another input than the whole message's where max_tokens ends it."""
    for place in range(len(TEXT) + 1):
        expected = whole(TEXT[:place], "length")
        assert expected["stop_reason"] == "max_tokens" and expected["content"]
        assert streamed(list(TEXT[:place]), "length") == expected, TEXT[:place]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": 1e999, "b": [-1e999]}', {"a": 1.7976931348623157e308, "b": [-1.7976931348623157e308]}),
        ('{"a": "\\ud800", "b": "\\ud83d\\ude00", "c": "\\\\ud800"}', {"a": "\ufffd", "b": "\U0001f600", "c": "\\ud800"}),
        ('{"a": 1, "b": "cut o', {"a": 1}),
    ],
)
def test_inputs_are_objects_that_json_can_hold(arguments: str, expected: Any) -> None:
    """Keeps out: an internal error for what the grammar of JSON allows and no reader takes."""
    assert input_of(arguments) == expected
