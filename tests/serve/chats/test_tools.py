"""Tools and thoughts over HTTP: what is called, what is streamed, what the template is told, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served, error_of

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.chat.answer import ChatAnswer

PATH, PARAMETERS = "/v1/chat/completions", "tools[0].function.parameters"
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "It", "parameters": SCHEMA}}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "now"}}]
FORCED = {"type": "function", "function": {"name": "get_weather"}}
# A thought, some content, and a call.
SCRIPT = {
    ":": "<think>", "<think>": "h", "h": "i", "i": "</think>", "</think>": "L", "L": "o", "o": "<tool_call>",
    "</tool_call>": "</s>", "f": "c",
}  # fmt: skip
ECHO = '<think>hi</think>Lo<tool_call>\n{"name": "get_weather", "arguments": {"unit": "f", "exact": false}}\n</tool_call>'
USER: list[Any] = [{"role": "user", "content": ECHO}]  # of which n-grams draft all of the answer


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = save_scripted(tmp_path_factory.mktemp("scripted"), SCRIPT)
    with SpecDecoder.from_pretrained(target, "ngram", SpecConfig(4, 2, 9), device="cpu", max_batch_size=4) as decoder:
        with Served(decoder) as server:
            yield server
        Driver(decoder).assert_nothing_leaked()


def function(**held: Any) -> dict[str, Any]:
    return {"type": "function", "function": held}


def ask(served: Served, **body: Any) -> Any:
    answer = served.post(PATH, {"model": "tiny", "messages": USER, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def streamed(served: Served, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the chunks of a stream make, and the chunks' choices."""
    text = served.post(PATH, {"model": "tiny", "messages": USER, "temperature": 0, "stream": True, **body}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in text.split("\n\n") if line.startswith("data: {")]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (chunk["delta"] for chunk in chunks):
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], **call["function"]})
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    assert [chunk["delta"].get("role") for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return message, chunks


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize("speculate", [True, False])
def test_a_model_calls_by_itself(scripted: Served, speculate: bool) -> None:
    """Keeps out: a thought or a marker in the content, arguments that no grammar holds because drafts crossed the marker, and
    another text in a stream or without speculation."""
    choice = ask(scripted, tools=TOOLS, speculate=speculate, return_origins=True)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == ("hi", "Lo", "tool_calls")
    assert len(called(message)) == 1 and message["tool_calls"][0]["id"].startswith("call_")
    name, arguments = called(message)[0]
    assert name in ("get_weather", "now") and (arguments == {} or arguments["unit"] in ("c", "f"))
    assert any(choice["origins"]) == speculate
    other = ask(scripted, tools=TOOLS, speculate=not speculate)
    assert called(other["message"]) == called(message)
    stream, chunks = streamed(scripted, tools=TOOLS, speculate=speculate)
    assert (stream["reasoning_content"], stream["content"]) == ("hi", "Lo") and called(stream) == called(message)
    assert chunks[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("speculate", [True, False])
def test_a_decoder_calls_too(scripted: Served, speculate: bool) -> None:
    """Keeps out: tools in Python that differ from those over HTTP."""
    answer = scripted.decoder.chat(USER, SamplingParams(max_tokens=200), tools=TOOLS, speculate=speculate)
    message = ask(scripted, tools=TOOLS)["message"]
    assert (answer.thought, answer.content) == ("hi", "Lo") and answer.generation.text.startswith("<think>hi</think>Lo<tool")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == called(message)
    with pytest.raises(ValueError, match="there are no tools"):
        scripted.decoder.chat(USER, tool_choice="required")
    plain = scripted.decoder.chat(USER, SamplingParams(max_tokens=4))
    assert (plain.thought, plain.content, plain.calls) == ("hi", "", ())


def test_coroutines_chat_too(scripted: Served) -> None:
    """Keeps out: another answer of a chat in a coroutine, an argument that is lost on the way, errors that come otherwise."""
    decoder, long = scripted.decoder, SamplingParams(max_tokens=200)
    asked: dict[str, Any] = {
        "tools": TOOLS, "tool_choice": FORCED, "parallel_tool_calls": False, "tool_parser": "hermes", "speculate": False,
        "chat_template_kwargs": {"enable_thinking": False}, "reasoning_parser": "none",
    }  # fmt: skip
    ways: list[dict[str, Any]] = [{"tools": TOOLS}, asked]

    async def all_of() -> list[ChatAnswer]:
        several = AsyncSpecDecoder(decoder)
        with pytest.raises(ValueError, match="tool_parser must be .* nearest"):
            await several.chat(USER, tool_parser="herms")
        return await asyncio.gather(*(several.chat(USER, long, **how) for how in ways))

    for found, how in zip(asyncio.run(all_of()), ways, strict=True):
        same = decoder.chat(USER, long, **how)
        assert (found.thought, found.content, found.calls) == (same.thought, same.content, same.calls) and found.calls
        assert found.generation.token_ids == same.generation.token_ids
        assert bool(found.generation.stats.drafted) == how.get("speculate", True)


@pytest.mark.parametrize("choice", ["required", FORCED])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 4}])
def test_a_call_can_be_required(scripted: Served, choice: Any, sampling: dict[str, Any]) -> None:
    """Keeps out: content before a required call, another function than the named one, and a thought that no call may have."""
    found = ask(scripted, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **sampling)
    assert found["message"]["content"] is None and found["finish_reason"] == "tool_calls"
    ((name, arguments),) = called(found["message"])
    assert (
        name == "get_weather" and {*arguments} == {"unit", "exact"} if choice != "required" else name in ("get_weather", "now")
    )
    assert sampling["temperature"] or found["message"]["reasoning_content"] == "hi"


def test_the_shipped_pair_calls_too(tmp_path: Path) -> None:
    """Keeps out: calls that need special tokens of a tokenizer; errors of a template that knows no tools or no format."""
    template = tmp_path / "template.jinja"
    for text, fault in (
        ("{{ messages[0].content }}<tool_call>", "has no place for them"),
        ("{{ messages[0].content }}{{ tools }}", "tells of no known format"),
        ("{{ messages[0].content }}{{ tools }}<tool_call>", ""),
    ):
        template.write_text(text)
        with SpecDecoder.from_pretrained(
            shipped.target_folder(), shipped.draft_folder(), device="cpu", chat_template=template
        ) as decoder:
            with Served(decoder) as server:
                body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
                answer = server.post(PATH, {**body, "tool_choice": "required", "parallel_tool_calls": False})
                if fault:
                    assert error_of(answer, 400)["param"] == "tools" and fault in error_of(answer, 400)["message"]
                    if "format" in fault:  # in Python the format is named in the call
                        asked: dict[str, Any] = {
                            "tools": TOOLS,
                            "tool_choice": FORCED,
                            "parallel_tool_calls": False,
                            "tool_parser": "hermes",
                        }
                        (call,) = decoder.chat(body["messages"], SamplingParams(200), **asked).calls
                        assert call.name == "get_weather" and json.loads(call.arguments)
                        with pytest.raises(ValueError, match="tool_parser must be .* nearest .* tool_parser='hermes'"):
                            decoder.chat(USER, tool_parser="herms")
                else:
                    ((name, arguments),) = called(answer.json()["choices"][0]["message"])
                    assert name == "get_weather" and arguments["unit"] in ("c", "f") and arguments["exact"] in (True, False)


def test_grammars_hold_for_the_answer_and_not_for_the_thought(scripted: Served) -> None:
    """Keeps out: a schema that forbids the thought, that is forgotten after it, or that an answer without a thought escapes."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for more, thought in (({}, "hi"), ({"chat_template_kwargs": {"enable_thinking": False}}, None)):
        message = ask(scripted, response_format=form, **more)["message"]
        assert {*json.loads(message["content"])} == {"unit", "exact"} and message.get("reasoning_content") == thought
    both = ask(scripted, response_format=form, tools=TOOLS)["message"]
    assert both["reasoning_content"] == "hi" and (called(both) or json.loads(both["content"]))


def test_what_the_template_is_told(scripted: Served) -> None:
    """Keeps out: tools that the prompt does not name, history that is refused or lost, and settings that do nothing."""
    decoder = scripted.decoder

    def prompt(**body: Any) -> str:
        said = ask(scripted, max_tokens=1, **body) and scripted.post(
            PATH, {"model": "tiny", "messages": USER, "max_tokens": 1, **body}
        )
        return str(said.json()["usage"]["prompt_tokens"])

    calls = [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"unit": "c"}'}}]
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "b"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "d"}], "name": "now"},
    ]
    for body, text in (
        ({"messages": history}, "user a;assistant bnowc;tool dnow;assistant:"),
        ({"messages": history[:1], "tools": TOOLS}, "user a;get_weather;now;assistant:"),
        ({"messages": history[:1], "tools": TOOLS, "tool_choice": "none"}, "user a;assistant:"),
        ({"messages": history[:1], "reasoning_effort": "low"}, "user a;lowassistant:"),
        ({"messages": history[:1], "reasoning_effort": "none"}, "user a;none<think></think>"),
        ({"messages": history[:1], "add_generation_prompt": False}, "user a;"),
        (
            {"messages": [*history[:1], {"role": "assistant", "content": "xy"}], "continue_final_message": True},
            "user a;assistant xy",
        ),
    ):
        assert prompt(**body) == str(len(decoder.tokenizer.encode(text))), text


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": {}}, "tools", "must be a list of"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "got one of type 'web_search'"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "nearest setting that works: 'a_b'"),
        ({"tools": [function(nme="a")]}, "tools[0].function.nme", "nearest: name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "which is taken"),
        ({"tools": [function(name="a", parameters={"typ": "object"})]}, PARAMETERS, "unknown keyword 'typ' at #; expected"),
        ({"tools": [function(name="a", strict=True, parameters={"properties": {"b": {"format": "b"}}})]}, PARAMETERS, "format"),
        ({"tools": [function(name="a", parameters={"type": "array"})]}, PARAMETERS, "nearest: 'object'"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "nearest setting that works: 'required'"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_wether"}}},
            "tool_choice.function.name",
            "none of the tools; nearest setting that works: 'get_weather'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
        ({"chat_template_kwargs": {"enable_thinkin": True}}, "chat_template_kwargs", "nearest: enable_thinking"),
        ({"reasoning_effort": "lots"}, "reasoning_effort", "must be one of none, minimal"),
        ({"reasoning_effort": "hgh"}, "reasoning_effort", "nearest: 'high'"),
        ({"continue_final_message": True}, "continue_final_message", "needs a last message of the assistant"),
        ({"messages": [{**USER[0], "tool_call_id": "b"}]}, "messages[0].tool_call_id", "of the role 'tool'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "b"}]}]}, "messages[0].tool_calls[0]", "must be {"),
    ],
)  # fmt: skip
def test_what_is_refused(scripted: Served, body: dict[str, Any], param: str, said: str) -> None:
    """Keeps out: a tool that is ignored, and an error that does not say which field is wrong and what would work."""
    answer = scripted.post(PATH, {"model": "tiny", "messages": USER, **body})
    error = error_of(answer, 400)
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"unit": "\\ud800"}', '{"unit": 1e999}', '{"unit": ' + "9" * 5000 + "}"])
def test_odd_arguments_of_an_earlier_call_stay_a_text(scripted: Served, arguments: str) -> None:
    """Keeps out: an internal error, and a history that no request can bring back, for what a model once wrote."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ask(scripted, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}, *USER], max_tokens=1)
