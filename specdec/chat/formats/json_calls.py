"""Families whose calls are JSON between marks, by their published chat templates and model cards."""

from __future__ import annotations

from specdec.chat.pieces import ARGUMENTS, BLANK, LINE, MAYBE, NAME, NUMBER, SPACE, PieceFormat, Pieces, Slot, json_call
from specdec.chat.said import short_id

# Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ: each call stands between its own pair of tags.
HERMES = PieceFormat(
    "hermes",
    ("<tool_call>",),
    (LINE, *json_call("arguments"), LINE, "</tool_call>"),
    between=(LINE, "<tool_call>"),
)

# Llama 3.1 to 3.3: an answer that begins as JSON of a call is one; several stand after semicolons.
_NAMED, _LLAMA = '{"name": "', json_call("parameters")
LLAMA_JSON = PieceFormat(
    "llama3_json",
    (_NAMED, f"<|python_tag|>{_NAMED}", '{"type": "function", "name": "'),
    (SPACE, *_LLAMA),
    between=(BLANK, ";"),
    at_start=True,
    first=_LLAMA[_LLAMA.index(NAME) :],
)

# Mistral until Small 3.1: a list after a token of its own.
MISTRAL_LIST = PieceFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    (SPACE, *json_call("arguments")),
    between=(BLANK, ","),
    end=(BLANK, "]"),
    first=(MAYBE, "[", BLANK, *json_call("arguments")),
    new_id=short_id,
)

# Mistral since Small 3.2, Magistral and Devstral: the token, the name, another token and the arguments.
MISTRAL_ARGS = PieceFormat(
    "mistral_args", ("[TOOL_CALLS]",), (NAME, "[ARGS]", ARGUMENTS), between=(BLANK, "[TOOL_CALLS]"), new_id=short_id
)

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _section(name: str, opening: str, begin: str, call: Pieces, end: str, gap: Slot = BLANK) -> PieceFormat:
    """A format whose calls stand in a section of their own, each after a mark.  gap: between a call and the next mark."""
    return PieceFormat(name, (opening,), call, (gap, begin), (BLANK, end), first=(BLANK, begin, *call))


# DeepSeek V3 and R1: the arguments in a fence of Markdown; V3.1: no fence.
DEEPSEEK_V3 = _section(
    "deepseek_v3", _ALL, _BEGIN, ("function<｜tool▁sep｜>", NAME, "\n```json\n", ARGUMENTS, "\n```", _END), _ALL_END, LINE
)
DEEPSEEK_V31 = _section("deepseek_v31", _ALL, _BEGIN, (NAME, "<｜tool▁sep｜>", ARGUMENTS, _END), _ALL_END)

# Kimi K2: calls carry their number.
KIMI = _section(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    ("functions.", NAME, ":", NUMBER, BLANK, "<|tool_call_argument_begin|>", BLANK, ARGUMENTS, BLANK, "<|tool_call_end|>"),
    "<|tool_calls_section_end|>",
)
