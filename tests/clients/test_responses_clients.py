"""openai-agents with its defaults: /v1/responses and tools, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from toolkit.serving.server import Served


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_a_tool(caller_served: Served, stream: bool) -> None:
    """Keeps out: a default of the package that the server refuses, and a second turn that its own items break."""
    from agents import Agent, AsyncOpenAI, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

    asked: list[str] = []

    @function_tool
    def weather(unit: Literal["c", "f"], exact: bool) -> str:
        """How warm it is."""
        asked.append(unit)
        return "21"

    async def run() -> Any:
        set_tracing_disabled(True)
        client = AsyncOpenAI(base_url=f"{caller_served.url}/v1", api_key="none")
        model = OpenAIResponsesModel("tiny", client)
        settings = ModelSettings(temperature=0)
        agent = Agent(name="a", instructions="Be brief", model=model, tools=[weather], model_settings=settings)
        if not stream:
            return (await Runner.run(agent, "How warm?")).final_output
        found = Runner.run_streamed(agent, "How warm?")
        async for _ in found.stream_events():
            pass
        return found.final_output

    assert asyncio.run(run()) == "Ok" and len(asked) == 1 and asked[0] in ("c", "f")
