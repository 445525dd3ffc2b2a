"""The formats of calls and of thoughts by name, and which of them a chat template's text speaks of."""

from __future__ import annotations

from specdec.chat.formats import harmony
from specdec.chat.formats.json_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    KIMI,
    LLAMA_JSON,
    MISTRAL_ARGS,
    MISTRAL_LIST,
)
from specdec.chat.formats.pythonic import PYTHONIC
from specdec.chat.formats.tagged import GLM, QWEN_XML
from specdec.chat.said import ToolFormat
from specdec.grammar.wait import Thought

ALL: tuple[ToolFormat, ...] = (
    HERMES, LLAMA_JSON, PYTHONIC, MISTRAL_LIST, MISTRAL_ARGS, DEEPSEEK_V3, DEEPSEEK_V31, KIMI, GLM, QWEN_XML,
)  # fmt: skip
FORMATS = {each.name: each for each in ALL}
# Texts of a template, in the order in which they are looked for, and the format of which all of them tell.
SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((harmony.SIGN, "commentary"), harmony.NAME),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_xml"),
    (("<tool_call>",), "hermes"),
    (("[func_name1(",), "pythonic"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
THOUGHTS = {"think": Thought("<think>", "</think>"), "mistral": Thought("[THINK]", "[/THINK]")}
THOUGHT_SIGNS = ((harmony.SIGN, harmony.NAME), ("</think>", "think"), ("[THINK]", "mistral"))


def format_of(template: str) -> str | None:
    """The name of the format that a template tells of; None: of none that is known."""
    return next((name for signs, name in SIGNS if all(sign in template for sign in signs)), None)


def thoughts_of(template: str) -> str | None:
    """The name of the marks around thoughts that a template tells of; None: it tells of none."""
    return next((name for sign, name in THOUGHT_SIGNS if sign in template), None)
