"""Programs that call tools, with their own defaults, against a server over a target that calls one by itself."""

from __future__ import annotations

import importlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from toolkit.serving.server import Served

ASK: list[Any] = [{"role": "user", "content": "How warm?"}]


class Weather(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    unit: Literal["c", "f"]
    exact: bool


TOOL: Any = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}


def test_openai(caller_served: Served) -> None:
    """Keeps out: chunks that the helper of streams can't join, and a second turn that history breaks."""
    client = caller_served.client()
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=[TOOL], temperature=0) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds and message.tool_calls
    call = message.tool_calls[0]
    assert Weather.model_validate_json(call.function.arguments).unit in ("c", "f")
    turns = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    last = client.chat.completions.create(model="tiny", messages=turns, tools=[TOOL], temperature=0).choices[0]
    assert (last.message.content, last.finish_reason) == ("Ok", "stop")
    parsed = client.chat.completions.parse(model="tiny", messages=ASK, response_format=Weather, temperature=0)
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_instructor(caller_served: Served) -> None:
    """Keeps out: a named function that is refused, in the mode that the package takes by itself."""
    client = importlib.import_module("instructor").from_openai(caller_served.client())
    assert isinstance(client.chat.completions.create(model="tiny", messages=ASK, response_model=Weather), Weather)


def test_langchain(caller_served: Served) -> None:
    """Keeps out: tools that a chat model binds and the server refuses, and structured output in any of its methods."""
    chat = importlib.import_module("langchain_openai").ChatOpenAI(
        base_url=f"{caller_served.url}/v1", api_key="none", model="tiny", temperature=0
    )
    answer = chat.bind_tools([Weather]).invoke("How warm?")
    assert answer.tool_calls[0]["name"] == "Weather" and answer.tool_calls[0]["args"]["unit"] in ("c", "f")
    chunks = list(chat.bind_tools([Weather]).stream("How warm?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == answer.tool_calls[0]["args"]
    for more in ({}, {"method": "function_calling"}, {"method": "json_schema", "strict": True}):
        assert isinstance(chat.with_structured_output(Weather, **more).invoke("How warm?"), Weather)


def test_pydantic_ai(caller_served: Served) -> None:
    """Keeps out: an agent whose output is a tool, which must be called, and one whose tool's answer comes back."""
    importlib.import_module("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{caller_served.url}/v1", api_key="none"))
    assert isinstance(Agent(model, output_type=Weather).run_sync("How warm?").output, Weather)
    asked = list[str]()
    agent = Agent(model, model_settings={"temperature": 0})

    @agent.tool_plain
    def weather(unit: Literal["c", "f"]) -> str:
        asked.append(unit)
        return json.dumps({"warm": 21})

    assert agent.run_sync("How warm?").output == "Ok" and asked in (["c"], ["f"])
