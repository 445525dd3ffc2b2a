"""/v1/responses through the real client, over a target that thinks, writes and calls a tool as a script says."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from toolkit.driver import Driver
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served, error_of

from specdec import SpecConfig, SpecDecoder
from specdec.serve.responses.thoughts import MARK, pack, unpack

PATH = "/v1/responses"
SCRIPT = {
    ":": "<think>", "<think>": "h", "h": "i", "i": "</think>", "</think>": "L", "L": "o", "o": "<tool_call>",
    "</tool_call>": "</s>", "9": "O", "O": "k", "k": "</s>",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content or '' }}{{ m.reasoning_content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %};{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% if messages[-1].role == 'tool' %}9{% else %}:{% endif %}{# <tool_call> </think> #}"
)


class Unit(BaseModel):
    """Of a temperature."""

    model_config = ConfigDict(extra="forbid")
    unit: bool


TOOL: Any = {"type": "function", "name": "look", "parameters": Unit.model_json_schema(), "strict": False}
ASK: dict[str, Any] = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = save_scripted(tmp_path_factory.mktemp("responses"), SCRIPT, TEMPLATE)
    with SpecDecoder.from_pretrained(target, "ngram", SpecConfig(4, 2, 9), device="cpu", max_batch_size=4) as decoder:
        with Served(decoder) as server:
            yield server
        Driver(decoder).assert_nothing_leaked()


def test_a_turn_with_a_tool_and_the_next_one(scripted: Served) -> None:
    """Keeps out: items out of order, a history that renders otherwise than the same chat does, and ids that don't fit."""
    client = scripted.client()
    first = client.responses.create(**ASK, input="How warm?", instructions="Be brief", tools=[TOOL])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"] and first.status == "completed"
    thought, message, call = first.output
    assert thought.content[0].text == "hi" and message.content[0].text == "Lo" and first.output_text == "Lo"  # type: ignore
    assert call.name == "look" and Unit.model_validate_json(call.arguments)  # type: ignore[union-attr]
    assert first.instructions == "Be brief" and first.tools[0].name == "look"  # type: ignore[union-attr]
    used = first.usage
    assert (
        used
        and used.output_tokens_details.reasoning_tokens == 2
        and used.total_tokens == used.input_tokens + used.output_tokens
    )
    asked = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]},
    ]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}  # type: ignore[union-attr]
    history: Any = [*asked, *(item.model_dump(exclude_none=True) for item in first.output), answer]
    last = client.responses.create(**ASK, input=history, tools=[TOOL])
    assert last.output_text == "Ok" and [item.type for item in last.output] == ["message"]
    own = {"role": "assistant", "content": "Lo", "reasoning_content": "hi"}
    told = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "How warm?"}, {**own, "tool_calls": [told]}]
    chat.append({"role": "tool", "tool_call_id": "a", "content": "21"})
    tools = [{"type": "function", "function": {"name": "look", "parameters": TOOL["parameters"]}}]
    same = scripted.post("/tokenize", {"messages": chat, "tools": tools}).json()
    assert last.usage and last.usage.input_tokens == same["count"]


def test_events_of_a_stream_make_the_response(scripted: Served) -> None:
    """Keeps out: an item that is never done, deltas that do not add up, numbers that skip, another end than the whole's."""
    ask: dict[str, Any] = {**ASK, "input": "How warm?", "tools": [TOOL]}
    with scripted.client().responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = scripted.client().responses.create(**ask)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert events[-1].type == "response.completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.id, item.type) for item in done] == [(item.id, item.type) for item in events[-1].response.output]
    texts = dict.fromkeys(("response.reasoning_text", "response.output_text", "response.function_call_arguments"), "")
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.type.removesuffix(".delta")] += event.delta  # type: ignore[union-attr]
    thought, message, call = whole.output
    assert list(texts.values()) == [thought.content[0].text, message.content[0].text, call.arguments]  # type: ignore
    assert final.output_text == whole.output_text and final.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_and_a_text_that_is_cut(scripted: Served, stream: bool) -> None:
    """Keeps out: a schema that nobody holds the text to, and a cut text that is called complete."""
    client = scripted.client()
    if stream:
        with client.responses.stream(**ASK, input="x", text_format=Unit) as events:
            parsed = events.until_done().get_final_response().output_parsed
    else:
        parsed = client.responses.parse(**ASK, input="x", text_format=Unit).output_parsed
    assert isinstance(parsed, Unit)
    cut: Any = client.responses.create(**ASK, input="x", max_output_tokens=5, stream=stream)
    if stream:
        *_, event = cut
        assert event.type == "response.incomplete"
        cut = event.response
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("size", [2, 5, 30])
def test_a_cut_text_has_the_items_of_its_stream(scripted: Served, size: int) -> None:
    """Keeps out: an empty message after a thought that was cut off, and a cut thought or call that is called complete."""
    asked: Any = {**ASK, "input": "x", "max_output_tokens": size, "tools": [TOOL]}
    whole: Any = scripted.client().responses.create(**asked)
    *_, last = scripted.client().responses.create(**asked, stream=True)
    streamed: Any = last
    said = [[(item.type, item.status) for item in each.output] for each in (whole, streamed.response)]
    assert said[0] == said[1] and [status for _, status in said[0]][-1] == "incomplete", said
    assert all(status == "completed" for _, status in said[0][:-1])
    assert size > 2 or said[0] == [("reasoning", "incomplete")]


def test_log_probabilities(scripted: Served) -> None:
    """Keeps out: numbers that an include asks for and nobody gives."""
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    answer = scripted.client().responses.create(**ASK, input="x", include=include, top_logprobs=2)
    part: Any = answer.output[-1].content[0]  # type: ignore[union-attr, index]
    assert part.logprobs and all(len(each.top_logprobs) == 2 for each in part.logprobs)


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole history as input"),
        ({"conversation": "c"}, "conversation", "send the whole history as input"),
        ({"background": True}, "background", "background=false"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "this server runs no tools itself"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name", "tools[0].name must"),
        ({"input": []}, "input", "an empty list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "keeps no items"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "input_text"),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be"),
        ({"max_tokens": 5}, "max_tokens", "no such field"),
        ({"text": {"format": {"type": "odd"}}}, "text.format", "text.format must be"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"logprobs_mode": "processed"}, "logprobs_mode", "include=['message.output_text.logprobs']"),
        ({"temperature": 200}, "temperature", "nearest"),
        ({"input": "x" * 2000}, "input", "maximum context length is"),
    ],
)
def test_what_a_response_can_not_be(scripted: Served, more: dict[str, Any], param: str, said: str) -> None:
    """Keeps out: errors that name a field of another endpoint, and a memory that is promised in silence."""
    error = error_of(scripted.post(PATH, {**ASK, "input": "x", **more}), 400)
    assert error["param"] == param and said in error["message"], error


def test_an_event_tells_of_a_failure(scripted: Served) -> None:
    """Keeps out: an event that this endpoint's clients don't know, where no token is left in the middle of a text."""
    banned = {"structured_outputs": {"regex": "aaaa"}, "logit_bias": {str(ord("a")): -100}, "bad_words": ["aa"], "tools": []}
    text = scripted.post(PATH, {**ASK, "input": "x", "stream": True, **banned}).text
    kind, data = text.strip().split("\n\n")[-1].split("\n")
    assert kind == "event: error", text
    assert "leave no token" in json.loads(data.removeprefix("data: "))["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["metadata", "user", "reasoning"])
def test_a_number_that_no_answer_can_repeat(scripted: Served, name: str, stream: bool) -> None:
    """Keeps out: an internal error, and a stream that ends without a word, for a field that the response repeats."""
    body = json.dumps({"input": "a", "stream": stream, name: {"summary": "1e999"}}).replace('"1e999"', "1e999")
    error = error_of(scripted.post(PATH, body.encode()), 400)
    assert error["param"] == name and f"{name} must hold finite numbers" in error["message"]


def test_a_made_up_thought_is_no_thought() -> None:
    """Keeps out: half a surrogate pair that passes the body's checks as the bytes of a thought, which no tokenizer can read."""
    assert unpack(pack("a thought \U0001f600")) == "a thought \U0001f600"
    for made_up in (b"\xed\xa0\x80", b"\xff"):
        assert unpack(MARK + urlsafe_b64encode(made_up).decode()) is None
