"""openai-agents with its defaults: /v1/responses and tools, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served

from specdec import SpecConfig, SpecDecoder

# A thought and a call, and after a tool's answer (which ends with "9") content alone.
SCRIPT = {
    ":": "<think>", "<think>": "h", "h": "</think>", "</think>": "<tool_call>", "</tool_call>": "</s>", "9": "O", "O": "k",
    "k": "</s>",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.content or '' }};{% endfor %}{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% if messages[-1].role == 'tool' %}9{% else %}:{% endif %}{# <tool_call> </think> #}"
)


@pytest.fixture(scope="module")
def served(asked_for: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = save_scripted(tmp_path_factory.mktemp("scripted"), SCRIPT, TEMPLATE)
    with (
        SpecDecoder.from_pretrained(target, "ngram", SpecConfig(4, 2, 9), device="cpu", max_batch_size=4) as decoder,
        Served(decoder) as server,
    ):
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_a_tool(served: Served, stream: bool) -> None:
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
        client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none")
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
