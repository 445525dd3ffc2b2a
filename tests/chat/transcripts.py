"""What models of each family write, by their published templates and guides, and what it says.

hermes: the chat templates of NousResearch/Hermes-3-Llama-3.1-8B and Qwen/Qwen2.5-7B-Instruct.
llama3_json, pythonic: Meta's pages on prompt formats of Llama 3.1 ("JSON based tool calling") and of Llama 3.2 and 4
("zero-shot function calling").  mistral: the tokenizers v3 and v7, mistral_args: v11 and v13 of mistral-common.
deepseek_v3, deepseek_v31: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1.
kimi_k2: "tool call guidance" of MoonshotAI/Kimi-K2.  glm45: the chat template of zai-org/GLM-4.5.
qwen3_xml: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.  harmony: OpenAI's guide to the harmony format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                    "exact": {"type": "boolean"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
                },
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"Tag": {"type": "string", "maxLength": 9}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
WEATHER: tuple[str, dict[str, Any]] = ("get_weather", {"city": 'Zürich "HB" {1}', "days": 2, "tags": ["a]", "b"]})
NOW: tuple[str, dict[str, Any]] = ("now", {})
JSON = '{"city": "Zürich \\"HB\\" {1}", "days": 2, "tags": ["a]", "b"]}'


@dataclass(frozen=True)
class Transcript:
    """An answer's text, of a model of this format, and what it says."""

    form: str
    text: str
    calls: Calls = field(default_factory=list)
    content: str = ""
    thought: str | None = None


BOTH: Calls = [WEATHER, NOW]
TRANSCRIPTS = [
    Transcript(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        BOTH,
    ),
    Transcript(
        "hermes",
        "<think>\nIf <tool_call> is right\n</think>\n\nLet me see.\n"
        f'<tool_call>{{"name":"get_weather","arguments":{JSON}}}</tool_call>',
        [WEATHER],
        "Let me see.",
        "If <tool_call> is right",
    ),
    Transcript("hermes", "It is 5 < 6, and <tool is no mark.", [], "It is 5 < 6, and <tool is no mark."),
    Transcript("hermes", '<tool_call>\n{"nme": 3}', [], '<tool_call>\n{"nme": 3}'),
    Transcript(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}',
        BOTH,
    ),
    Transcript("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {JSON}}}', [WEATHER]),
    Transcript("llama3_json", 'Like {"name": "now", "parameters": {}}', [], 'Like {"name": "now", "parameters": {}}'),
    Transcript(
        "pythonic", """[get_weather(city="Zürich \\"HB\\" {1}", days=2, tags=['a]', "b"]), now()]""", BOTH
    ),
    Transcript(
        "pythonic",
        "[get_weather(city='a\\'b', exact=True, note=None)]",
        [("get_weather", {"city": "a'b", "exact": True, "note": None})],
    ),
    Transcript("pythonic", "[get_whether(x)] is a link", [], "[get_whether(x)] is a link"),
    Transcript(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]',
        BOTH,
    ),
    Transcript("mistral_args", f"So.[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[ARGS]{{}}", BOTH, "So."),
    Transcript(
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
    ),
    Transcript(
        "deepseek_v31",
        f"Good.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
        "Good.",
    ),
    Transcript(
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        BOTH,
    ),
    Transcript(
        "glm45",
        "<think>so</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich \"HB\" {1}</arg_value>\n"
        '<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a]", "b"]</arg_value>\n'
        "</tool_call>\n<tool_call>now\n</tool_call>",
        BOTH,
        thought="so",
    ),
    Transcript(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12</arg_value><arg_key>note</arg_key><arg_value>null</arg_value>"
        "<arg_key>unit</arg_key><arg_value>celsius</arg_value></tool_call>",
        [("get_weather", {"city": "12", "note": None, "unit": "celsius"})],
    ),
    Transcript(
        "qwen3_xml",
        'Now.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich "HB" {1}\n</parameter>\n<parameter=days>\n2\n'
        '</parameter>\n<parameter=tags>\n["a]", "b"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        BOTH,
        "Now.",
    ),
    Transcript(
        "harmony",
        "<|channel|>analysis<|message|>Need <it>.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{JSON}<|call|>",
        [WEATHER],
        thought="Need <it>.",
    ),
    Transcript(
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{JSON}",
        [WEATHER],
        "I look.",
    ),
    Transcript("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", [], "b", "a"),
]  # fmt: skip
