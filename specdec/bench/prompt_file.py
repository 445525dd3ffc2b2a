"""Prompts from a file: a text file holds one a line, a .jsonl (or .json) file one object a line, in any of the usual layouts.

The first of these keys that an object has says what its prompt is; other keys are ignored:
- token_ids: a list of ints;
- prompt, text, question or task: a text, as in HumanEval, plain corpora, GSM8K and task lists;
- turns: a list of texts, a conversation as in MT-bench; its first turn is the prompt, since it needs no answer before it;
- messages: a chat, a list of {"role": ..., "content": ...}, to which the target's chat template is always applied.

Lines end at a line feed, with or without a carriage return before it: other characters that break lines may stand in a text.
Knows no tokenizer: a prompt stays the text, the token ids or the messages that the file holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.checks import read_some, require_int
from specdec.prompts.encode import chat_fault

FilePrompt = str | list[int] | list[dict[str, Any]]  # text, token ids, or a chat
TEXT_KEYS = ("prompt", "text", "question", "task")
KEYS = ("token_ids", *TEXT_KEYS, "turns", "messages")


def read_prompts(path: str | Path, count: int | None = None) -> list[FilePrompt]:
    """The first `count` prompts of the file, or all.  ValueError names the line that is wrong, or says how many there are."""
    if count is not None:
        require_int("--num-prompts", count, 1)
    path = Path(path)
    if path.is_dir() or not path.exists():  # what is no plain file, such as the end of a pipe, can be read too
        got = "a folder" if path.is_dir() else "no file"
        raise ValueError(f"--prompts: expected a .jsonl file, or text with one prompt a line, got {got} at {str(path)!r}")
    is_json = path.suffix in (".jsonl", ".json")
    prompts: list[FilePrompt] = []
    for number, line in enumerate(_lines(path), 1):
        if line.strip() and (count is None or len(prompts) < count):
            prompts.append(_from_json(line, f"{path}:{number}") if is_json else line)
    if not prompts:
        raise ValueError(f"{path} holds no prompt; expected one a line")
    if count is not None and len(prompts) < count:
        raise ValueError(f"{path} holds {len(prompts)} prompts, {count} were asked for; nearest: --num-prompts {len(prompts)}")
    return prompts


def _lines(path: Path) -> list[str]:
    """All lines, without the byte order mark that some editors write at a file's beginning."""
    lines = []
    for number, line in enumerate(read_some(path).split(b"\n"), 1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number} is not UTF-8 text: {error}") from error
    return lines


def _from_json(line: str, where: str) -> FilePrompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(record).__name__}")
    key = next((key for key in KEYS if key in record), None)
    if key is None:
        raise ValueError(f"{where} must have one of the keys {', '.join(KEYS)}; got {', '.join(record) or 'none'}")
    value = record[key]
    if key == "token_ids":
        if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
            raise ValueError(f"{where}: 'token_ids' must be a list of ints that is not empty, got {value!r}"[:300])
        return value
    if key == "messages":
        if fault := chat_fault(value, "messages"):
            raise ValueError(f"{where}: {fault}")
        return value
    if key == "turns":
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where}: 'turns' must be a list that holds text, got {value!r}"[:300])
        return _text(value[0], "turns[0]", where)
    return _text(value, key, where)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {key!r} must be text that is not empty, got {value!r}"[:300])
    return value
