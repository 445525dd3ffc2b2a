"""Which fields a request may have: those that specdec uses, and OpenAI's other fields, which must hold what changes nothing.

No field is ignored in silence.  The exceptions are SILENT_FIELDS, which say nothing about the text, and at temperature 0 the
fields of sampling that greedy decoding does not look at: OpenAI's clients send top_p and seed with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.checks import nearest_name
from specdec.config import SAMPLING_OPTIONS
from specdec.serve.wire.errors import wrong

COMPLETIONS, CHAT, CORPUS = "/v1/completions", "/v1/chat/completions", "/v1/corpus"
DRAFTING = "/v1/drafting"
# Options of SamplingParams that are fields of another form, or whose limits depend on other fields.
READ_APART = ("max_tokens", "min_tokens", "n", "logprobs", "json_schema", "regex", "grammar", "prediction")
SAMPLING_FIELDS = tuple(name for name in SAMPLING_OPTIONS if name not in READ_APART)  # the others, fields of the same meaning
SHARED_FIELDS = (
    "model", "max_tokens", "max_completion_tokens", "min_tokens", "n", "logprobs", "stream", "stream_options",
    "response_format", "structured_outputs", "return_origins", "return_trees", "return_token_ids", "prediction",
    "cache_salt", *SAMPLING_FIELDS,
)  # fmt: skip
TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
TEMPLATE_FIELDS = ("chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "continue_final_message")
USED_FIELDS = {
    COMPLETIONS: ("prompt", "echo", *SHARED_FIELDS),
    CHAT: ("messages", "top_logprobs", *TOOL_FIELDS, *TEMPLATE_FIELDS, *SHARED_FIELDS),
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # values of reasoning_effort
OPENAI = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias")  # of SAMPLING_FIELDS
EXTENSIONS = (  # of the fields above, those that OpenAI does not have
    "min_tokens", "structured_outputs", "return_origins", "return_trees", "return_token_ids", "cache_salt",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    *(name for name in SAMPLING_FIELDS if name not in OPENAI),
)  # fmt: skip

# OpenAI's fields that specdec does not support, and the values besides null that say no more than leaving the field out.
ENGINE_VALUES: dict[str, tuple[Any, ...]] = {"skip_special_tokens": (True,), "priority": (0,)}  # vLLM's and SGLang's
NEUTRAL_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    COMPLETIONS: {"best_of": (1,), "suffix": ("",), **ENGINE_VALUES},
    CHAT: {
        **ENGINE_VALUES,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "moderation": (),
    },
}
# Fields that say who asks, how the answer is billed or kept: whatever they hold, the text is the same.
SILENT_FIELDS = (
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "service_tier", "verbosity",
)  # fmt: skip
# What other servers call a field, and what says the same here.
ELSEWHERE = {
    "guided_json": 'structured_outputs {"json": ...}', "guided_regex": 'structured_outputs {"regex": ...}',
    "guided_grammar": 'structured_outputs {"grammar": ...}', "guided_choice": 'structured_outputs {"choice": [...]}',
    "json_schema": 'structured_outputs {"json": ...}', "regex": 'structured_outputs {"regex": ...}',
    "grammar": 'structured_outputs {"grammar": ...}', "ebnf": 'structured_outputs {"grammar": ...}',
    "structured_outputs.json_object": 'response_format {"type": "json_object"}', "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens", "n_predict": "max_tokens", "min_new_tokens": "min_tokens", "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty", "num_return_sequences": "n", "do_sample": "temperature",
    "enable_thinking": 'chat_template_kwargs {"enable_thinking": false}', "thinking": "chat_template_kwargs",
    "chat_template": "the server's flag --chat-template", "think": "chat_template_kwargs", "extra_body": "what it holds",
    "num_ctx": "the server's flag --max-seq-len", "input": "messages", "system": "a message of the role 'system'",
    "options": "what it holds", "usage": 'stream_options {"include_usage": true}',
    "response_format.schema": "json_schema", "response_format.json_schema.type": "schema",
    "response_format.pattern": 'structured_outputs {"regex": ...}',
}  # fmt: skip
# OpenAI's older fields, and what says the same now.
INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
# reasoning is vLLM's and OpenRouter's name of reasoning_content.
MESSAGE_FIELDS = ("role", "reasoning", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
NEUTRAL_MESSAGE_VALUES: dict[str, tuple[Any, ...]] = {  # what an answer of this server holds too, sent back as history
    "refusal": (), "audio": (), "annotations": ([],), "function_call": (), "parsed": (),
}  # fmt: skip
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
UNKNOWN_FIELD, UNSUPPORTED = "unknown_parameter", "unsupported_parameter"  # codes of errors
NEUTRAL_STREAM_VALUES: dict[str, tuple[Any, ...]] = {"include_obfuscation": (False,)}


def used_fields(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of a body that specdec uses, without those that are null.  ApiError 400 for any other."""
    neutral, body = dict(NEUTRAL_VALUES[path]), {name: value for name, value in body.items() if name not in SILENT_FIELDS}
    if path == COMPLETIONS and type(body.get("n")) is int:
        neutral["best_of"] = (1, body["n"])  # the best n of n are all
    other = CHAT if path == COMPLETIONS else COMPLETIONS
    theirs = {*USED_FIELDS[other], *NEUTRAL_VALUES[other]} - {*USED_FIELDS[path], *neutral}
    for name in body:
        if name in theirs:
            nearest = USED_FIELDS[path][0] if name == USED_FIELDS[other][0] else "leave it out"  # the prompts' own name
            raise wrong(name, f"{name} is a field of {other}, not of {path}; nearest: {nearest}", UNSUPPORTED)
    return only_used(body, USED_FIELDS[path], neutral, "")


def only_used(
    values: dict[str, Any], used: tuple[str, ...], neutral: dict[str, tuple[Any, ...]], where: str,
    elsewhere: Mapping[str, str] = ELSEWHERE,
) -> dict[str, Any]:  # fmt: skip
    """The values that are used and not null.  ApiError 400 for any other, unless it is neutral.

    where: what errors put before a name.  elsewhere: what says the same as a field of another API.
    """
    kept = {}
    for name, value in values.items():
        full = f"{where}{name[:100]}"
        if name in used:
            kept[name] = value
        elif name not in neutral and value is not None:
            alike = elsewhere.get(full) or nearest_name(name[:100], [*used, *neutral])
            hint = f"nearest: {alike or 'leave it out'}"
            raise wrong(full, f"{full} is not supported: there is no such field; {hint}", UNKNOWN_FIELD)
        elif value is not None and not any(is_same(value, allowed) for allowed in neutral[name]):
            accepted = "".join(f" or send {json.dumps(allowed)}" for allowed in neutral[name][:1])
            works = INSTEAD.get(full) or ("tool_calls" if name == "function_call" else f"leave it out{accepted}")
            raise wrong(full, f"{full} is not supported by this server; nearest thing that works: {works}", UNSUPPORTED)
    return {name: value for name, value in kept.items() if value is not None}


def is_same(value: Any, allowed: Any) -> bool:
    """Equal, but 0 is not False."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
