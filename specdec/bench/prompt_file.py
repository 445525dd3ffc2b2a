"""Prompts from a file: a text file holds one a line, a .jsonl file one object a line, in any of the usual layouts.

Knows no tokenizer: a prompt stays the string or the token ids that the file holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.checks import require_int

FilePrompt = str | list[int]
TEXT_KEYS = ("prompt", "text", "question", "task")  # HumanEval, plain corpora, GSM8K, task lists


def read_prompts(path: str | Path, count: int | None = None) -> list[FilePrompt]:
    """The first `count` prompts of the file, or all.  ValueError names the line that is wrong, or says how many there are."""
    if count is not None:
        require_int("--num-prompts", count, 1)
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no prompts file {str(path)!r}; expected a .jsonl file, or text with one prompt a line")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    is_json = path.suffix in (".jsonl", ".json")
    prompts: list[FilePrompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and (count is None or len(prompts) < count):
            prompts.append(_from_json(line, f"{path}:{number}") if is_json else line)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    if count is not None and len(prompts) < count:
        raise ValueError(f"{path} holds {len(prompts)} prompts, {count} were asked for; nearest: --num-prompts {len(prompts)}")
    return prompts


def _from_json(line: str, where: str) -> FilePrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} must be a JSON object, got {type(record).__name__}")
    if "token_ids" in record:
        return _ids(record["token_ids"], where)
    for key in TEXT_KEYS:
        if key in record:
            return _text(record[key], key, where)
    if "turns" in record:  # MT-bench: a conversation, of which the first turn can be asked without an answer
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{where}: 'turns' must be a list that holds text, got {turns!r}"[:300])
        return _text(turns[0], "turns[0]", where)
    expected = ", ".join(("token_ids", *TEXT_KEYS, "turns"))
    raise ValueError(f"{where} must have one of the keys {expected}; got {', '.join(record) or 'none'}")


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ValueError(f"{where}: 'token_ids' must be a list of ints that is not empty, got {value!r}"[:300])
    return value


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {key!r} must be text that is not empty, got {value!r}"[:300])
    return value
