"""What real agents send, shortened: Codex, smolagents, the openai package for node, the AI SDK, servers of tools (MCP).

Every body here was refused once, and with it all that the agent wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served, error_of

from specdec import SpecConfig, SpecDecoder

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCRIPT = {
    ":": "<think>", "<think>": "h", "h": "</think>", "</think>": "<tool_call>", "</tool_call>": "</s>", "9": "O", "O": "k",
    "k": "</s>", "f": "c",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.reasoning_content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %};{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% if messages[-1].role == 'tool' %}9{% else %}:{% endif %}{# <tool_call> </think> #}"
)
USER: list[Any] = [{"role": "user", "content": "x"}]
UNIT = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}
SPAWN = {"type": "function", "name": "spawn", "description": "It", "strict": False, "parameters": UNIT}
CODEX: dict[str, Any] = {
    "model": "tiny", "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    "client_metadata": {"turn_id": "t", "x-codex-turn-metadata": "{}"}, "reasoning": {"summary": "auto"},
    "tools": [
        {"type": "namespace", "name": "agents", "description": "Others", "tools": [SPAWN]},
        {"type": "web_search", "external_web_access": False},
    ],
    "parallel_tool_calls": True,
}  # fmt: skip
ASKED = {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
# Of a property: what the library holds no text to, from zod, pydantic, OpenAPI and MCP servers.
UNHELD: list[dict[str, Any]] = [
    {"type": "string", "format": "email", "pattern": "^(?!\\.)(?!.*\\.\\.)[a-z]+@[a-z]+$"},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"type": "string", "format": "uri-reference"},
    {"not": {"type": "string"}},
    {"type": "object", "properties": {"a": {}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
]
HELD: list[dict[str, Any]] = [
    {"type": "string", "format": "path"},
    {"type": "string", "nullable": True, "enumDescriptions": ["a"], "markdownDescription": "b"},
]


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = save_scripted(tmp_path_factory.mktemp("agents"), SCRIPT, TEMPLATE)
    with SpecDecoder.from_pretrained(target, "ngram", SpecConfig(4, 2, 9), device="cpu", max_batch_size=4) as decoder:
        with Served(decoder) as server:
            yield server
        Driver(decoder).assert_nothing_leaked()


def tool(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}, "a": schema}, "required": ["unit"]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def test_codex(agents: Served) -> None:
    """Keeps out: a call whose namespace is lost, in a stream or in history; a search that the server would have to run."""
    body = {**CODEX, "input": [ASKED], "temperature": 0}
    first = agents.post(RESPONSES, body).json()
    thought, call = first["output"]
    assert (call["name"], call["namespace"], json.loads(call["arguments"])["unit"]) in [
        ("spawn", "agents", unit) for unit in ("c", "f")
    ]
    events = agents.post(RESPONSES, {**body, "stream": True}).text.strip().split("\n\n")
    streamed = json.loads(events[-1].partition("data: ")[2])["response"]["output"][-1]
    assert [streamed[key] for key in ("name", "namespace", "arguments")] == [
        call[key] for key in ("name", "namespace", "arguments")
    ]
    plain = agents.post(RESPONSES, {**body, "speculate": False}).json()["output"][-1]
    assert plain["arguments"] == call["arguments"]
    answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "9"}
    last = agents.post(RESPONSES, {**body, "input": [ASKED, {**thought, "encrypted_content": None}, call, answer]}).json()
    assert last["output"][0]["content"][0]["text"] == "Ok", last
    prompt = "user x;assistant hagents.spawn;tool 9;agents.spawn;9"
    assert last["usage"]["input_tokens"] == len(agents.decoder.tokenizer.encode(prompt))
    named = {"type": "function", "name": "spawn", "namespace": "agents"}
    assert agents.post(RESPONSES, {**body, "tool_choice": named}).json()["output"][-1]["namespace"] == "agents"


def test_a_call_that_the_openai_package_has_parsed(agents: Served) -> None:
    """Keeps out: a second turn that is refused, because the package for node sends its own copy of the arguments back."""
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "parsed_arguments": {}}
    answer = {"type": "function_call_output", "call_id": "a", "output": "9"}
    body = {"model": "tiny", "input": [ASKED, call, answer], "temperature": 0}
    assert agents.post(RESPONSES, body).json()["output"][0]["content"][0]["text"] == "Ok"


@pytest.mark.slow_cases
@pytest.mark.parametrize("schema", UNHELD)
def test_a_schema_is_held_as_far_as_it_can_be(agents: Served, schema: dict[str, Any]) -> None:
    """Keeps out: a server of tools that stops all others for one keyword; what can be held is forgotten with what can't; a
    strict tool that is held to less than it says."""
    body = {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 60, "tool_choice": "required"}
    texts = []
    for speculate in (True, False):
        answer = agents.post(CHAT, {**body, "tools": [tool(schema)], "speculate": speculate}).json()
        texts.append(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert texts[0] == texts[1] and texts[0].startswith(('{"unit":"c"', '{"unit":"f"', '{"unit": "c"', '{"unit": "f"'))
    error = error_of(agents.post(CHAT, {**body, "tools": [tool(schema, strict=True)]}), 400)
    assert error["param"] == "tools[0].function.parameters"


def test_annotations_of_schemas_are_taken(agents: Served) -> None:
    """Keeps out: smolagents' optional arguments, pydantic's paths and editors' hints that are refused, strict or not."""
    for schema in HELD:
        for more in ({}, {"strict": True}, {"strict": None, "description": None}):
            body = {"model": "tiny", "messages": USER, "max_tokens": 1, "tools": [tool(schema, **more)]}
            assert agents.post(CHAT, body).status_code == 200, (schema, more)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, "assistant ;"),
        ({"role": "assistant", "content": None, "reasoning_content": "b", "odd": None}, "assistant b;"),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, "assistant ab;"),
        ({"role": "tool", "content": None, "tool_call_id": "a"}, "tool ;"),
    ],
)
def test_messages_that_are_no_openai_s(agents: Served, message: dict[str, Any], text: str) -> None:
    """Keeps out: a history that no request can bring back; None as a word of the prompt."""
    answer = agents.post(CHAT, {"model": "tiny", "messages": [*USER, message, *USER], "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(agents.decoder.tokenizer.encode(f"user x;{text}user x;:")), answer


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"functions": [{"name": "f"}]}, "works: tools"),
        ({"function_call": {"name": "f"}}, "works: tool_choice"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {}}]}, "works: tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]}, '{"a"'),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "nearest: {'type': 'text', 'text': 'a'}"),
        ({"messages": USER[0]}, "works: [{'role': 'user', 'content': 'x'}]"),
        ({"messages": [{"role": "user", "content": 5}]}, "works: '5'"),
        ({"response_format": {"type": "json"}}, 'nearest: {"type": "json_object"}'),
        ({"response_format": {"type": "regex"}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "nearest: json_schema"),
        ({"reasoning_effort": "max"}, "nearest: 'xhigh'"),
        ({"max_tokens": "5"}, "works: max_tokens=5"),
        ({"temperature": "0.5"}, "works: temperature=0.5"),
        ({"top_k": 1.5}, "works: top_k=1"),
        ({"stream": "true"}, "works: stream=True"),
        ({"num_ctx": 5}, "--max-seq-len"),
        ({"system": "x"}, "a message of the role 'system'"),
        ({"zzz": 1}, "nearest: leave it out"),
        ({"tools": [tool({"type": "STRING"})]}, "works: string"),
    ],
)  # fmt: skip
def test_errors_say_what_works(agents: Served, body: dict[str, Any], said: str) -> None:
    """Keeps out: an error that names a field and leaves its author to guess."""
    error = error_of(agents.post(CHAT, {"model": "tiny", "messages": USER, **body}), 400)
    assert said in error["message"], error
