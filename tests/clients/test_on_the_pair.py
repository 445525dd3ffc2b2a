"""Every client once over the shipped pair, which calls tools only where it must: its texts are real, and so are its drafts."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict
from toolkit.serving.messages import anthropic_client
from toolkit.serving.server import Served

from specdec import SamplingParams


class Weather(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")
    unit: Literal["c", "f"]
    exact: bool


ASK: list[Any] = [{"role": "user", "content": "Once upon a time"}]
SIZE = 24  # tokens of a text; a tool of the pair's own choice would be called for ever
CHOICE = {"type": "tool", "name": "Weather", "disable_parallel_tool_use": True}
TOOL: Any = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}


@pytest.fixture(scope="module")
def text(shipped_served: Served) -> str:
    """What every client must get: the target's own text."""
    (answer,) = shipped_served.decoder.generate(ASK, SamplingParams(SIZE), speculate=False)
    return answer.text


def test_openai_and_instructor(shipped_served: Served, text: str) -> None:
    """Keeps out: a text of the pair that is not the target's own, and arguments that drafts broke."""
    client = shipped_served.client()
    how: Any = {"model": "tiny", "messages": ASK, "temperature": 0}
    assert client.chat.completions.create(**how, max_tokens=SIZE).choices[0].message.content == text
    assert isinstance(client.chat.completions.parse(**how, response_format=Weather).choices[0].message.parsed, Weather)
    held_to = importlib.import_module("instructor").from_openai(client)
    assert isinstance(held_to.chat.completions.create(**how, response_model=Weather, parallel_tool_calls=False), Weather)


def test_anthropic(shipped_served: Served, text: str) -> None:
    """Keeps out: another text than the target's own at this endpoint, whole and streamed."""
    client = anthropic_client(shipped_served)
    how: Any = {"model": "tiny", "max_tokens": SIZE, "messages": ASK, "extra_body": {"temperature": 0}}
    assert client.messages.create(**how).content[0].text == text
    with client.messages.stream(**how) as stream:
        assert "".join(stream.text_stream) == text
    tool = {"name": "Weather", "input_schema": Weather.model_json_schema()}
    (call,) = client.messages.create(**{**how, "max_tokens": 128}, tools=[tool], tool_choice=CHOICE).content
    assert Weather.model_validate(call.input)
    parsed = client.messages.parse(**{**how, "max_tokens": 128}, output_format=Weather)
    assert isinstance(parsed.parsed_output, Weather)


def test_langchain_and_pydantic_ai(shipped_served: Served, text: str) -> None:
    """Keeps out: structured output that a real text does not obey."""
    chat = importlib.import_module("langchain_openai").ChatOpenAI(
        base_url=f"{shipped_served.url}/v1", api_key="none", model="tiny", temperature=0, max_tokens=SIZE
    )
    assert chat.invoke("Once upon a time").content == text
    chat.max_tokens = 128
    assert isinstance(chat.with_structured_output(Weather).invoke("Once upon a time"), Weather)
    importlib.import_module("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{shipped_served.url}/v1", api_key="none"))
    agent = Agent(model, output_type=Weather, model_settings={"temperature": 0, "parallel_tool_calls": False})
    assert isinstance(agent.run_sync("Once upon a time").output, Weather)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(shipped_served: Served, text: str, provider: str) -> None:
    """Keeps out: another text by way of litellm, and a required call that it does not find."""
    litellm: Any = importlib.import_module("litellm")
    url = shipped_served.url + ("/v1" if provider == "openai" else "")
    how: Any = {"model": f"{provider}/tiny", "api_base": url, "api_key": "none", "temperature": 0, "messages": ASK}
    assert litellm.completion(**how, max_tokens=SIZE).choices[0].message.content == text
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**how, max_tokens=SIZE, stream=True)]
    assert "".join(pieces) == text
    called = litellm.completion(**how, max_tokens=128, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    answer = called.choices[0].message
    assert Weather.model_validate(json.loads(answer.tool_calls[0].function.arguments))


def test_openai_agents(shipped_served: Served, text: str) -> None:
    """Keeps out: another text at /v1/responses."""
    from agents import Agent, AsyncOpenAI, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled

    async def run() -> Any:
        set_tracing_disabled(True)
        model = OpenAIResponsesModel("tiny", AsyncOpenAI(base_url=f"{shipped_served.url}/v1", api_key="none"))
        settings = ModelSettings(temperature=0, extra_body={"stop": ["."]})  # an answer that is cut off is an error there
        return (await Runner.run(Agent(name="a", model=model, model_settings=settings), "Once upon a time")).final_output

    before, mark, _ = text.partition(".")
    assert mark and asyncio.run(run()) == before
