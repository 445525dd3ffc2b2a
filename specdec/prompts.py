"""What users may hand in as a prompt, and the token ids it becomes.  Knows a tokenizer, no model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.config import SamplingParams

Prompt = Any  # str | list[int] | list[{"role", "content"}]


class Tokenizer:
    """A Hugging Face tokenizer behind the three things we ask of it.  A folder without one takes token ids only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inner: Any = None
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            from transformers import AutoTokenizer

            self._inner = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        return list(self._need("a text prompt").encode(text))

    def encode_chat(self, messages: list[Any]) -> list[int]:
        inner = self._need("chat messages")
        if not inner.chat_template:
            raise ValueError("prompts holds chat messages, but this tokenizer has no chat template; expected a string or ids")
        ids = inner.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)

    def decode(self, token_ids: Any) -> str:
        """Text of the ids; empty where the folder has no tokenizer."""
        if self._inner is None:
            return ""
        return self._inner.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @property
    def is_present(self) -> bool:
        return self._inner is not None

    def _need(self, what: str) -> Any:
        if self._inner is None:
            raise ValueError(f"{what} needs a tokenizer, but {self._folder} holds none; expected lists of token ids")
        return self._inner


def is_one_prompt(prompts: Any) -> bool:
    """A string, a list of ids or one chat, as opposed to a list of such."""
    if isinstance(prompts, str):
        return True
    return isinstance(prompts, list) and bool(prompts) and (_is_ids(prompts) or _is_chat(prompts))


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or several as a list; TypeError for what is neither."""
    if is_one_prompt(prompts):
        return [prompts]
    if isinstance(prompts, tuple):
        prompts = list(prompts)
    if isinstance(prompts, list) and not prompts:
        raise ValueError("prompts is empty: expected a string, a list of token ids, chat messages, or a list of such")
    if not isinstance(prompts, list):
        raise TypeError(
            f"prompts must be a string, a list of token ids, chat messages, or a list of such; got {type(prompts).__name__}"
        )
    if fault := _fault(prompts, "prompts"):
        raise TypeError(f"{_expected('prompts[0]', prompts[0])}; or, as one prompt, {fault}")
    return prompts


def encode_prompt(prompt: Prompt, name: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids of one prompt, checked against the vocabulary.  `name` says which prompt an error means."""
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"{name} is an empty string: expected some text")
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, list) and prompt and _is_chat(prompt):
        ids = tokenizer.encode_chat(prompt)
    elif isinstance(prompt, list) and _is_ids(prompt):
        ids = list(prompt)
    else:
        fault = _fault(prompt, name)
        raise TypeError(_expected(name, prompt) + (f"; {fault}" if fault else ""))
    if not ids:
        raise ValueError(f"{name} is empty: expected at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds the token id {token}; expected ids in [0, {vocab_size - 1}]")
    return ids


def check_length(ids: list[int], sampling: SamplingParams, name: str, max_seq_len: int) -> None:
    """Prompt and output must fit the context together."""
    if len(ids) >= max_seq_len:
        raise ValueError(
            f"{name} has {len(ids)} tokens; expected at most max_seq_len - 1 = {max_seq_len - 1}, so that one can follow; "
            "shorten the prompt or raise max_seq_len"
        )
    if len(ids) + sampling.max_tokens > max_seq_len:
        raise ValueError(
            f"tokens of {name} + max_tokens must be at most max_seq_len = {max_seq_len}, got {len(ids)} + "
            f"{sampling.max_tokens}; nearest setting that works: max_tokens={max_seq_len - len(ids)}"
        )


def _expected(name: str, prompt: Any) -> str:
    return f"{name} must be a string, a list of token ids or a list of chat messages, got {prompt!r}"[:400]


def _fault(value: Any, name: str) -> str:
    """The first element that keeps a list, by its beginning token ids or chat messages, from being that; empty if none."""
    if not isinstance(value, list) or not value:
        return ""
    if isinstance(value[0], Mapping):
        for i, message in enumerate(value):
            if not isinstance(message, Mapping):
                return f"{name}[{i}] must be a chat message, got {message!r}"[:400]
            if missing := [key for key in ("role", "content") if key not in message]:
                return f"{name}[{i}] lacks {missing[0]!r}"
    elif _is_ids(value[:1]):
        for i, token in enumerate(value):
            if not _is_ids([token]):
                return f"{name}[{i}] must be an int, got {token!r}"[:400]
    return ""


def _is_ids(value: list[Any]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _is_chat(value: list[Any]) -> bool:
    return all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value)
