"""Turns the body of /v1/messages into that of a chat.  Knows no decoder: the chat's own reader checks what the values hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from specdec.checks import nearest_name, shown
from specdec.serve.messages.history import read_messages
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import EFFORTS, EXTENSIONS, SAMPLING_FIELDS, UNSUPPORTED, only_used
from specdec.serve.wire.left_out import sift

# Fields that say who asks, how the answer is billed, or what is kept of the prompt: whatever they hold, the text is the same.
SILENT = ("metadata", "service_tier", "inference_geo", "cache_control", "user_profile_id", "workspace_id")
KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (), "mcp_servers": ([],), "context_management": ({"edits": []}, {"edits": [KEEP_THOUGHTS]}),
    "diagnostics": (), "speed": ("standard",), "betas": ([],),
}  # fmt: skip
# Of the chat's fields, those that mean the same here.
APART = ("stop", "logprobs", "logprobs_mode", "return_origins", "return_trees", "return_token_ids", "prompt_logprobs",
         "continue_final_message", "add_generation_prompt")  # fmt: skip
SAME = tuple(name for name in dict.fromkeys((*SAMPLING_FIELDS, *EXTENSIONS)) if name not in APART)
COUNTED = (
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs",
)  # fmt: skip
USED = tuple(dict.fromkeys((*COUNTED, "max_tokens", "stop_sequences", "stream", *SAME)))
NEUTRAL_OF_TOOLS: dict[str, tuple[Any, ...]] = {
    "defer_loading": (False,), "input_examples": ([],), "allowed_callers": (["direct"],)
}  # fmt: skip
TOOL = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = {"enabled": True, "adaptive": None, "disabled": False}  # None: as the model's template says by itself
ELSEWHERE = {  # what says the same as a field of OpenAI's
    "stop": "stop_sequences", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens",
    "response_format": "output_config", "output_format": "output_config", "reasoning_effort": "output_config",
    "parallel_tool_calls": "tool_choice", "instructions": "system", "input": "messages",
}  # fmt: skip
# How errors about a chat's fields are to call them.
CALLED = {
    "stop": "stop_sequences", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format.json_schema": "output_config.format", "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}  # fmt: skip


class AskedChat(NamedTuple):
    """The body of the chat that is asked for.  thinks: see RequestPlan.  left_out: what a lenient server has left out."""

    body: dict[str, Any]
    thinks: bool | None
    left_out: list[str]


def chat_body(body: dict[str, Any], lenient: bool, counts: bool = False) -> AskedChat:
    """What a body asks for.  counts: the tokens alone.  ApiError 400 with the name of the field that is wrong."""
    left_out, used = list[str](), COUNTED if counts else USED
    body = {name: value for name, value in body.items() if name not in SILENT}
    if lenient:
        body, left_out = sift(body, used, NEUTRAL)
    values = only_used(body, used, NEUTRAL, "", ELSEWHERE)
    if not counts and "max_tokens" not in values:
        raise wrong(
            "max_tokens", "max_tokens is missing: expected the most tokens of the answer; nearest thing that works: 1024"
        )
    chat = {name: values[name] for name in ("model", "max_tokens", "stream", *SAME) if name in values}
    chat["messages"] = read_messages(values.get("messages"), values.get("system"))
    if chat["messages"][-1]["role"] == "assistant":  # the answer goes on with it
        chat["continue_final_message"] = True
    if (stops := values.get("stop_sequences", [])) != []:
        if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
            raise wrong("stop_sequences", f"stop_sequences must be a list of texts, got {shown(stops)}")
        chat["stop"] = stops
    chat |= _tools(values.get("tools"), values.get("tool_choice")) | _output(values.get("output_config"))
    return AskedChat(chat, _thinks(values.get("thinking")), left_out)


def _object(name: str, value: Any, used: tuple[str, ...], neutral: dict[str, tuple[Any, ...]] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, f"{name} must be an object, got {shown(value)}")
    return only_used(value, used, neutral or {}, f"{name}.")


def _tools(tools: Any, choice: Any) -> dict[str, Any]:
    """The chat's fields about tools."""
    chat: dict[str, Any] = {}
    if tools is not None:
        if not isinstance(tools, list):
            raise wrong("tools", f"tools must be a list, got {shown(tools)}")
        chat["tools"] = [_tool(each, f"tools[{index}]") for index, each in enumerate(tools)]
    if choice is None:
        return chat
    kind = choice.get("type") if isinstance(choice, dict) else None
    told = _object("tool_choice", choice, ("type", "disable_parallel_tool_use", *(["name"] if kind == "tool" else [])))
    if kind not in (*CHOICES, "tool"):
        expected = f"tool_choice.type must be one of {', '.join((*CHOICES, 'tool'))}"
        near = "any" if kind == "required" else "auto"
        raise wrong("tool_choice.type", f"{expected}, got {shown(kind)}; nearest setting that works: {near!r}")
    names = [tool["function"]["name"] for tool in chat.get("tools", ())]
    if not names and kind not in ("auto", "none"):
        fault = f"tool_choice asks for a call ({kind}), but there are no tools"
        raise wrong("tool_choice", f"{fault}; nearest setting that works: {{'type': 'none'}}")
    if kind == "tool" and told.get("name") not in names:
        near = nearest_name(str(told.get("name"))[:100], names) or names[0]
        fault = f"tool_choice.name must be the name of one of the tools, got {shown(told.get('name'))}"
        raise wrong("tool_choice.name", f"{fault}; nearest setting that works: {near!r}")
    named = {"type": "function", "function": {"name": told.get("name")}}
    chat["tool_choice"] = named if kind == "tool" else CHOICES[kind]
    if (alone := told.get("disable_parallel_tool_use")) is not None:
        if not isinstance(alone, bool):
            name = "tool_choice.disable_parallel_tool_use"
            raise wrong(name, f"{name} must be true or false, got {shown(alone)}")
        chat["parallel_tool_calls"] = not alone
    return chat


def _tool(value: Any, name: str) -> dict[str, Any]:
    """A tool as a chat has it."""
    if isinstance(value, dict) and value.get("type") not in (None, "custom"):
        fault = f"{name} is one of type {shown(value['type'])}, which this server does not know"
        raise wrong(name, f'{fault}; nearest thing that works: {{"name": ..., "input_schema": {{...}}}}', UNSUPPORTED)
    told = _object(name, value, TOOL, NEUTRAL_OF_TOOLS)
    if not isinstance(told.get("name"), str):
        raise wrong(f"{name}.name", f"{name}.name must be a text, got {shown(told.get('name'))}")
    if not isinstance(told.get("input_schema"), dict):
        expected = f"{name}.input_schema must be the JSON schema of an object"
        raise wrong(f"{name}.input_schema", f"{expected}, got {shown(told.get('input_schema'))}")
    kept = {key: told[key] for key in ("name", "description", "strict") if key in told}
    return {"type": "function", "function": {**kept, "parameters": told["input_schema"]}}


def _output(value: Any) -> dict[str, Any]:
    """The chat's fields about the answer's form, and about how much the model is to think."""
    chat: dict[str, Any] = {}
    told = {} if value is None else _object("output_config", value, ("effort", "format"))
    if "effort" in told:
        chat["reasoning_effort"] = EFFORTS[-1] if told["effort"] == "max" else told["effort"]
    if "format" in told:
        form = _object("output_config.format", told["format"], ("type", "schema"))
        if form.get("type") != "json_schema":
            expected = 'output_config.format must be {"type": "json_schema", "schema": {...}}'
            raise wrong("output_config.format", f"{expected}, got {shown(told['format'])}")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
    return chat


def _thinks(value: Any) -> bool | None:
    """Whether the model is to think, for templates that read it.  As in Anthropic's API it is not, unless it is told to."""
    if value is None:
        return False
    told = _object("thinking", value, ("type", "budget_tokens"), {"display": ("summarized",)})
    kind, budget = told.get("type"), told.get("budget_tokens")
    if kind not in (*THINKING,):
        raise wrong(
            "thinking.type", f"thinking.type must be one of {', '.join(THINKING)}, got {shown(kind)}; nearest: 'adaptive'"
        )
    if budget is not None and (type(budget) is not int or budget < 1):
        raise wrong("thinking.budget_tokens", f"thinking.budget_tokens must be an integer of 1 or more, got {shown(budget)}")
    return THINKING[kind]
